"""Products of few rows on a CUDA device: cuBLAS, every cut of `thin`, and what is chosen.

`python -m benchmarks.gpu.products` prints GB/s of weights and the share of what a plain read of
memory reaches, for the shapes of an 8B Llama and of a 0.5B Qwen2.5. It takes less than 25 seconds.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from tandem.model.gpu import products
from tandem.model.gpu.products import BUCKETS, Shape
from tandem.model.gpu.thin import Cut, Workspace

SHAPES: dict[str, Shape] = {
    "8B qkv": (6144, 4096),
    "8B out": (4096, 4096),
    "8B gate, up": (28672, 4096),
    "8B down": (4096, 14336),
    "8B head": (128256, 4096),
    "0.5B qkv": (1152, 896),
    "0.5B out": (896, 896),
    "0.5B gate, up": (9728, 896),
    "0.5B down": (896, 4864),
    "0.5B head": (151936, 896),
}
BUDGET_S = 22.0
_READ_BYTES = 1 << 30


def ceiling() -> float:
    """Bytes a second of a sum over 1 GiB."""
    memory = torch.zeros(_READ_BYTES // 4, device="cuda")
    best = 0.0
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        memory.sum()
        end.record()
        end.synchronize()
        best = max(best, _READ_BYTES / (start.elapsed_time(end) * 1e-3))
    return best


def text(cut: Cut | None) -> str:
    """A cut in words."""
    if cut is None:
        return "cuBLAS"
    each = cut.stripe
    return f"{each.outputs}x{each.inputs} {each.stages} stages {each.warps} warps / {cut.parts}"


def main() -> None:
    """Measure and print."""
    began = time.monotonic()
    most = ceiling()
    print(f"{torch.cuda.get_device_name()}: a sum reads {most / 1e9:.0f} GB/s")
    device = torch.device("cuda")
    workspace, arena = (
        Workspace(device),
        products.Arena(torch.empty(0, dtype=torch.bfloat16, device=device)),
    )
    for name, shape in SHAPES.items():
        weight = torch.randn(shape, device=device, dtype=torch.bfloat16)
        for rows in BUCKETS.values():
            if time.monotonic() - began > BUDGET_S:
                print("the rest is skipped: no time is left")
                return
            choice = products.measure(weight, rows, arena, workspace)
            print(line(name, rows, weight, choice, most), flush=True)
        del weight
    print(f"{time.monotonic() - began:.1f} s")


def line(name: str, rows: int, weight: Tensor, choice: products.Choice, most: float) -> str:
    """One row of the table."""
    rate, cublas = (weight.nbytes / us * 1e6 for us in (choice.us, choice.cublas_us))
    return (
        f"{name:14} {rows:3} rows: {choice.us:7.1f} us {rate / 1e9:5.0f} GB/s {rate / most:4.0%}"
        f"  cuBLAS {choice.cublas_us:7.1f} us {cublas / most:4.0%}  {text(choice.cut)}"
    )


if __name__ == "__main__":
    main()
