"""The layers of recorded rows again, under the parameters of one trainer.

Knows neither plans nor recordings. Invariant: what is read are the parameters of one revision.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from tandem.executor.starts import trainable_prefixes
from tandem.model.layer_gradient import Inner, Kept, LayerGradients
from tandem.model.load import LoadedModel
from tandem.model.lora import Segment
from tandem.model.lora_files import Lora, LoraWeights
from tandem.model.stack import Replay
from tandem.training.layerwise import Gradients
from tandem.training.parameters import Pair, ParameterLayout
from tandem.training.recordings import Graph

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Working:
    """What forward and backward passes read of a trainer at its current revision."""

    adapter: Lora
    by_layer: list[Lora]  # by the module's name within its layer
    gradients: LayerGradients


class LoraReplay:
    """`tandem.training.layerwise.LayerReplay` over the model's layers with one adapter."""

    def __init__(
        self, model: LoadedModel, replay: Replay, segment: Segment, working: Working
    ) -> None:
        self.embedded = replay.embedded
        self._lora = model.lora
        self._replay = replay
        self._segments = (segment,)
        self._prefixes = trainable_prefixes(model)
        self._working = working

    def layer(self, index: int, hidden: Tensor) -> Tensor:
        """See `LayerReplay`."""
        self._lora.activate(self._segments)
        try:
            return self._replay.layer(index, hidden)
        finally:
            self._lora.activate(())

    def forward_by_hand(self, index: int, hidden: Tensor) -> tuple[Tensor, Graph] | None:
        """See `LayerReplay`."""
        layer = self._working.gradients.of(self._replay, index)
        if layer is None:
            return None
        with torch.no_grad():
            kept = layer.forward(hidden)
            return layer.finish(kept), kept

    def by_hand(
        self, index: int, hidden: Tensor, gradient: Tensor, below: bool, graph: Graph | None
    ) -> tuple[Tensor | None, Gradients] | None:
        """See `LayerReplay`."""
        layer = self._working.gradients.of(self._replay, index)
        if layer is None:
            return None
        with torch.no_grad():
            inner = graph if isinstance(graph, Inner) else None
            kept = graph if isinstance(graph, Kept) else layer.forward(hidden, inner)
            entering, found = layer.backward(hidden, kept, gradient, below)
        prefix = self._prefixes[index]
        return entering, {f"{prefix}{name}": pair for name, pair in found.items()}

    def finish(self, hidden: Tensor) -> Tensor:
        """See `LayerReplay`."""
        return self._replay.finish(hidden)

    def leaves(self, index: int) -> Mapping[str, Pair]:
        """See `LayerReplay`."""
        prefix = self._prefixes[index]
        return {f"{prefix}{name}": (w.a, w.b) for name, w in self._working.by_layer[index].items()}


def within(prefix: str, named: Mapping[str, T]) -> dict[str, T]:
    """What is named within a layer, by the name there."""
    return {n.removeprefix(prefix): each for n, each in named.items() if n.startswith(prefix)}


def as_lora(pairs: Mapping[str, Pair], layout: ParameterLayout) -> Lora:
    """An adapter of the model from parameters by module."""
    return {name: LoraWeights(a, b, layout.modules[name].scale) for name, (a, b) in pairs.items()}
