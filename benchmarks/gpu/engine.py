"""A model of random weights on the device, its executor, and a loop around it.

Speed does not depend on the weights, so they are drawn on the device: nothing is written, and the
same seed gives a peer the same ones. Invariant: executor and loop are those of a server.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights

from benchmarks.gpu.options import Options
from benchmarks.peers.engine_tandem import Tandem
from benchmarks.peers.models import prefill_flops, shape_of, streamed_bytes
from tandem.build import executor_of, ready_loop
from tandem.config import Settings, resolve
from tandem.model.load import Progress, prepare_model

MODEL_TOKENS = 8192
SPREAD = 0.02  # standard deviation of the weights


def random_model(name: str, options: Options) -> PreTrainedModel:
    """The shape `name` with weights drawn on the device."""
    config = shape_of(name)
    config.max_position_embeddings = max(MODEL_TOKENS, config.max_position_embeddings)
    with torch.device(options.device), no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, options.dtype))
    model.tie_weights()
    generator = torch.Generator(options.device).manual_seed(options.seed)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if weight.ndim > 1:
                weight.normal_(0.0, SPREAD, generator=generator)
            else:
                weight.fill_(0.0 if key.endswith("bias") else 1.0)
    return model.eval()


class Engine:
    """One model, ready for single passes; its loop is joined and measured when first needed."""

    def __init__(self, name: str, options: Options, say: Callable[[str], None]) -> None:
        """`name` of a shape, or a directory with a configuration."""
        self.name = Path(name).name
        self._shape = name
        settings = _settings(name, options)
        progress: Progress = lambda stage, _: say(f"{self.name}: {stage}")  # noqa: E731
        self.loaded = prepare_model(random_model(name, options), settings.model, progress)
        memory_bytes = options.kv_tokens * self.kv_token_bytes
        self._settings = replace(settings, cache=replace(settings.cache, memory_bytes=memory_bytes))
        self.executor = executor_of(self.loaded, self._settings, progress)
        say(f"{self.name}: computes with {self.loaded.kernels}")

    @cached_property
    def tandem(self) -> Tandem:
        """The loop, and how the study of peers drives it."""
        return Tandem(ready_loop(self._settings, self.executor))

    @property
    def kv_token_bytes(self) -> int:
        """Keys and values of one token, over all layers."""
        numbers = sum(2 * shape.kv_heads * shape.head_dim for shape in self.loaded.layers)
        return numbers * self.loaded.dtype.itemsize

    @property
    def pass_bytes(self) -> int:
        """Weights that a pass reads: all but an untied input embedding."""
        return streamed_bytes(self._shape) * self.loaded.dtype.itemsize // 2

    def fresh_model(self, options: Options) -> PreTrainedModel:
        """Another model of the same weights, as transformers makes it."""
        return random_model(self._shape, options)

    def prompt_flops(self, tokens: int) -> float:
        """Of a prompt alone, with one row of the head."""
        return prefill_flops(self._shape, tokens)


def _settings(name: str, options: Options) -> Settings:
    return resolve(
        {
            "model": {"model": name, "device": options.device, "dtype": options.dtype},
            "cache": {"prefix_caching": False},
            "scheduling": {"policy": "unified", "max_batch_tokens": options.max_batch_tokens},
            "adapters": {"max_loaded": 64},
            "learning": {"graph_bytes": options.graph_bytes},
        }
    )
