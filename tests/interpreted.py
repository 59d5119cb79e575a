"""Tiny models that compute by the kernels for GPUs: on a GPU, or in Triton's interpreter."""

from __future__ import annotations

from unittest.mock import patch

from torch import Tensor, nn

import tiny_models
from tandem.config import ModelConfig
from tandem.model import load
from tandem.model.attention.base import AttentionKernel
from tandem.model.linear import PlainWeight, pack_linears
from tandem.model.load import LoadedModel


def interpreted(device: str = "cpu", **changes: int) -> LoadedModel:
    """A tiny Llama, prepared as for a CUDA device. On the CPU products are torch's."""
    from tandem.model.gpu.adapters import TableUpdates

    config, model = ModelConfig(model="tiny"), tiny_models.make_model("llama", **changes)
    if device == "cuda":
        return load.prepare_model(model.to(device), config)
    updates = TableUpdates(model.device, model.dtype)
    with (
        patch.object(load, "_accelerate", _accelerate),
        patch.object(load, "_adapter_updates", lambda *_: updates),
    ):
        return load.prepare_model(model, config)


def _accelerate(model: nn.Module, *_: str) -> tuple[AttentionKernel, str, bool]:
    from tandem.model.attention.triton_kernel import TritonKernel
    from tandem.model.fuse import LayerKernels, fuse_modules
    from tandem.model.gpu.layer import TritonLayer
    from tandem.model.gpu.rows import TritonRows

    fuse_modules(model, LayerKernels(TritonRows(), TritonLayer, _plain))
    pack_linears(model, _plain)
    return TritonKernel(), "triton+fused", False


def _plain(weight: Tensor, bias: Tensor | None) -> PlainWeight:
    return PlainWeight(weight.detach(), bias)
