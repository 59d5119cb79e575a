"""Tiny models that compute by the kernels for GPUs, in Triton's interpreter on the CPU."""

from __future__ import annotations

from unittest.mock import patch

import tiny_models
from tandem.config import ModelConfig
from tandem.model import load
from tandem.model.load import LoadedModel


def interpreted(name: str = "llama", device: str = "cpu", **changes: int) -> LoadedModel:
    """`make_model`, prepared as a CUDA device has it."""
    config = ModelConfig(model="tiny")
    model = tiny_models.make_model(name, **changes)
    if device == "cuda":
        return load.prepare_model(model.to(device), config)
    from tandem.model.attention.triton_kernel import TritonKernel
    from tandem.model.gpu.adapters import TableUpdates

    with (
        patch.object(load, "_accelerate", lambda *_: (TritonKernel(), "triton", False)),
        patch.object(load, "_adapter_updates", lambda *_: TableUpdates(model.device, model.dtype)),
    ):
        return load.prepare_model(model, config)
