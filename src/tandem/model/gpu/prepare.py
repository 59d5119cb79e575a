"""Makes a loaded model fast on its CUDA device: fused modules, packed and measured products."""

from __future__ import annotations

import torch
from torch import nn

from tandem.model.fuse import LayerKernels, fuse_modules
from tandem.model.gpu.layer import TritonLayer
from tandem.model.gpu.products import tune_products
from tandem.model.gpu.rows import TritonRows
from tandem.model.linear import pack_linears


def accelerate(model: nn.Module) -> list[str]:
    """Change `model` in place. Returns what was done, for `LoadedModel.kernels`."""
    done = []
    if fuse_modules(model, LayerKernels(TritonRows(), TritonLayer)).replaced:
        done.append("fused")
    pack_linears(model)
    done.append("packed")
    # The weights before they were joined are free, but in pieces of other sizes.
    torch.cuda.empty_cache()
    if any(choice.cut is not None for choice in tune_products(model).values()):
        done.append("thin")
    return done
