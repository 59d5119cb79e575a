"""Compiles the kernels of a layer's gradient for an H100; see `hopper`."""

from __future__ import annotations

import torch

from hopper import compiled
from tandem.model.gpu.gradients import TritonGradientRows
from tandem.model.gradient_rows import Operands
from tandem.model.joint import Joint
from tandem.model.kernels.backward import HeadTurn
from tandem.model.kernels.layer import NormWeights
from tandem.model.linear import PackedLinear
from tandem.model.lora_files import LoraWeights

# width, heads, KV heads, head size, head norms: Llama-3-8B, Qwen3-0.6B, SmolLM2-135M, Gemma-7B
SHAPES = [
    (4096, 32, 8, 128, False),
    (1024, 16, 8, 128, True),
    (576, 9, 3, 64, False),
    (3072, 16, 16, 256, False),
]
RANKS, ROWS = (8, 16, 64, 256), 40


def differentiate(shape, rank: int, dtype: torch.dtype) -> None:
    width, heads, kv_heads, dim, norms = shape
    rows = TritonGradientRows()

    def empty(*size: int) -> torch.Tensor:
        return torch.empty(size, dtype=dtype)

    for shifted in (False, True):
        x, norm = empty(ROWS, width), NormWeights(empty(width), 1e-6, shifted)
        rows.rms_norm(x, norm)
        rows.rms_norm_gradient(x, norm, x, x)
        weight = empty(dim) if norms else None
        cos = empty(ROWS, dim)
        turn = HeadTurn(weight, weight, norm, cos, cos, heads, kv_heads)
        qkv = empty(ROWS, (heads + 2 * kv_heads) * dim)
        rows.turn_heads(qkv, turn)
        rows.turn_heads_gradient(qkv, qkv, turn)
        rows.gated(empty(ROWS, 8 * width), shifted)
        rows.gate_gradient(empty(ROWS, 8 * width), empty(ROWS, 4 * width), shifted)
    ends = (heads * dim, (heads + kv_heads) * dim, (heads + 2 * kv_heads) * dim)
    starts = (0, *ends)
    adapter = {
        name: LoraWeights(empty(rank, width), empty(end - start, rank), 2.0)
        for name, start, end in zip("qkv", starts, ends, strict=False)
    }
    frozen = PackedLinear(empty(8, width))
    joint = Joint(frozen, list(zip("qkv", starts, ends, strict=False)), adapter, 8)
    low = empty(ROWS, 3 * rank)
    rows.pairs(Operands(empty(ROWS, width), low, empty(ROWS, ends[-1]), low), joint)


def main() -> None:
    for shape in SHAPES:
        for rank in RANKS:
            for dtype in (torch.bfloat16, torch.float16, torch.float32):
                if rank != RANKS[1] and dtype != torch.bfloat16:
                    continue
                for each in compiled(lambda s=shape, r=rank, d=dtype: differentiate(s, r, d)):
                    print(shape, rank, str(dtype).removeprefix("torch."), each.name,
                          f"shared {each.shared}, registers {each.registers}, "
                          f"stack {each.spilled}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
