"""Compiles row kernels and thin products for an H100; see `hopper`."""

from __future__ import annotations

import torch

from hopper import compiled
from tandem.model.gpu.products import BUCKETS, candidates
from tandem.model.gpu.rows import TritonRows
from tandem.model.gpu.thin import Workspace, multiply

# (outputs, inputs) of Llama-3-8B and Qwen2.5-0.5B. Other shapes compile nothing else.
SHAPES = [(6144, 4096), (4096, 14336), (1152, 896)]
WIDTHS = [64, 896, 4096, 14336]


def products(dtype: torch.dtype) -> None:
    for outputs, inputs in SHAPES:
        weight = torch.empty(outputs, inputs, dtype=dtype)
        for rows in BUCKETS.values():
            x = torch.empty(rows, inputs, dtype=dtype)
            residual = torch.empty(rows, outputs, dtype=dtype)
            for cut in candidates((outputs, inputs), rows, dtype, 132):
                workspace = Workspace(weight.device)
                workspace.reserve(rows, outputs, cut)
                multiply(x, weight, None, residual, cut, workspace)


def rows(dtype: torch.dtype) -> None:
    by = TritonRows()
    for width in WIDTHS:
        x, weight = torch.empty(1, 3, 2 * width, dtype=dtype), torch.empty(width, dtype=dtype)
        first, second = x[..., :width], x[..., width:]
        for shifted in (False, True):
            by.rms_norm(first, weight, 1e-5, shifted)
            by.add_rms_norm(second, first, weight, 1e-5, shifted)
        by.silu_mul(first, second)
        by.gelu_tanh_mul(first, second)
    for dim in (64, 128, 96):
        heads, angles = torch.empty(1, 3, 6, dim, dtype=dtype), torch.empty(1, 3, dim, dtype=dtype)
        by.rotary(heads[:, :, :4], heads[:, :, 4:], angles, angles)


def main() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for run in (products, rows):
            for each in compiled(lambda run=run, dtype=dtype: run(dtype)):
                assert "griddepcontrol.wait" in each.ptx
                print(f"{each.name} {dtype} shared {each.shared}, registers {each.registers}, "
                      f"stack {each.spilled}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
