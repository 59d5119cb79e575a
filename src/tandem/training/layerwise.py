"""The backward pass of a recorded micro-batch, in slices of layers from the top.

Each layer is computed again from its recorded input, unless what that gives was kept, and
differentiated at once: by hand where its replay knows how, else by autograd. So no graph spans two
layers, and the pass can stop anywhere between them. Knows no model: layers come through a protocol.
Invariant: a slice that fails changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tandem.core.plan import BackwardSlice
from tandem.training.parameters import Pair
from tandem.training.recordings import Graph, Recording, Recordings

# d/d(a), d/d(b) by module; None where nothing depends on it.
Gradients = dict[str, tuple[Tensor | None, Tensor | None]]


class LayerReplay(Protocol):
    """The layers over the rows of some sequences, with one trainer's working parameters."""

    @property
    def embedded(self) -> Tensor:
        """[rows, width] that enter layer 0."""
        ...

    def layer(self, index: int, hidden: Tensor) -> Tensor:
        """[rows, width] through layer `index`; differentiable."""
        ...

    def forward_by_hand(self, index: int, hidden: Tensor) -> tuple[Tensor, Graph] | None:
        """[rows, width] through layer `index`, and what `by_hand` may be given to spare itself
        that; None where only `layer` can compute it."""
        ...

    def by_hand(
        self, index: int, hidden: Tensor, gradient: Tensor, below: bool, graph: Graph | None
    ) -> tuple[Tensor | None, Gradients] | None:
        """What autograd would give for d(loss)/d(output) of layer `index`: d/d(hidden) if wanted
        `below`, and the LoRA gradients. None where autograd has to do it."""
        ...

    def finish(self, hidden: Tensor) -> Tensor:
        """[rows, width] through the final norm; differentiable."""
        ...

    def leaves(self, index: int) -> Mapping[str, Pair]:
        """The LoRA halves that layer `index` reads, by module; they require gradients."""
        ...


# Makes the replay of `tokens` int64 [rows], the sequences of `lengths` one after the other.
MakeReplay = Callable[[str, Tensor, Sequence[int]], LayerReplay]


@dataclass(frozen=True, slots=True)
class _Progress:
    """Where the pass stands: `gradient` of what leaves layer `at` - 1."""

    at: int
    gradient: Tensor | None
    found: Gradients


def slice_problem(recording: Recording | None, plan: BackwardSlice, num_layers: int) -> str | None:
    """Why `plan` cannot be computed, if so."""
    if recording is None:
        return f"micro-batch {plan.micro_batch} is not open"
    if not recording.complete:
        return f"micro-batch {plan.micro_batch} is not recorded to its end"
    if len(plan.coefficients) != len(recording.lengths):
        return f"{len(plan.coefficients)} coefficients for {len(recording.lengths)} sequences"
    if not 0 <= plan.lo < plan.hi <= num_layers or plan.hi != recording.at:
        return f"layers [{plan.hi}, {plan.lo}) were asked, {recording.at} are left"
    return None


def run_slice(
    recordings: Recordings, recording: Recording, plan: BackwardSlice, make: MakeReplay
) -> Gradients:
    """Compute layers [hi, lo) and return their LoRA gradients by module.

    `slice_problem` found nothing. The recording moves on only when everything was computed.
    """
    first = recording.at == recordings.num_layers
    if first:
        recording.active = tuple(
            s for s, c in enumerate(plan.coefficients) if c != 0.0 and recording.lengths[s]
        )
    if not recording.active:
        recording.at = plan.lo
        return {}
    rows = recording.rows_of(recording.active)
    if first and rows != slice(0, recording.num_rows):
        # What was prepared or kept is of all rows.
        recordings.drop_graphs(recording)
        recording.replay = None
    if recording.replay is None:
        lengths = [recording.lengths[s] for s in recording.active]
        recording.replay = make(recording.trainer, recording.tokens[rows], lengths)
    replay: LayerReplay = recording.replay  # type: ignore[assignment]
    inputs = _Inputs(recordings.rows(recording), rows, replay, plan)
    gradient = recording.gradient
    if first:
        gradient = _seed(recording, rows, plan.coefficients, inputs.of(plan.hi), replay)
    found: Gradients = {}
    for index in reversed(range(plan.lo, plan.hi)):
        assert gradient is not None
        graph = recordings.take_graph(recording, index)
        gradient = _layer_backward(index, inputs.of(index), gradient, replay, graph, found)
    recording.at, recording.gradient = plan.lo, gradient
    return found


def _layer_backward(
    index: int,
    hidden: Tensor,
    gradient: Tensor,
    replay: LayerReplay,
    graph: Graph | None,
    found: Gradients,
) -> Tensor | None:
    """d(loss)/d(input) of layer `index`, None for the lowest; LoRA gradients go to `found`."""
    done = replay.by_hand(index, hidden, gradient, index > 0, graph)
    if done is not None:
        found.update(done[1])
        return done[0]
    leaves = replay.leaves(index)
    wanted = [half for pair in leaves.values() for half in pair]
    with torch.enable_grad():
        entering = hidden.detach().requires_grad_(index > 0)
        leaving = replay.layer(index, entering)
    if not leaving.requires_grad:
        return None
    inputs = [entering, *wanted] if index > 0 else wanted
    gradients = list(torch.autograd.grad(leaving, inputs, gradient, allow_unused=True))
    below = gradients.pop(0) if index > 0 else None
    for module, a, b in zip(leaves, gradients[::2], gradients[1::2], strict=True):
        found[module] = (a, b)
    return below


def _seed(
    recording: Recording,
    rows: slice | Tensor,
    coefficients: Sequence[float],
    output: Tensor,
    replay: LayerReplay,
) -> Tensor:
    """d(loss)/d(output of the last layer): the slopes scaled, through the final norm."""
    slopes = recording.slopes
    if slopes is None:
        return torch.zeros_like(output)
    lengths = [recording.lengths[s] for s in recording.active]
    # Numbers of the host, since a tensor of them would wait for the device.
    parts = [
        part * coefficients[s]
        for s, part in zip(recording.active, slopes[rows].split(lengths), strict=True)
    ]
    seed = torch.cat(parts).to(output.dtype)
    with torch.enable_grad():
        leaving = output.detach().requires_grad_()
        final = replay.finish(leaving)
    (gradient,) = torch.autograd.grad(final, leaving, seed)
    return gradient


class _Inputs:
    """What entered each layer of a slice: recorded, or computed again from the tokens."""

    def __init__(
        self,
        recorded: Tensor | None,
        rows: slice | Tensor,
        replay: LayerReplay,
        plan: BackwardSlice,
    ) -> None:
        self._recorded = recorded
        self._rows = rows
        self._embedded = replay.embedded
        self._again: dict[int, Tensor] = {}
        if recorded is None:
            hidden = replay.embedded
            with torch.no_grad():
                for index in range(plan.hi):
                    if index >= plan.lo:
                        self._again[index] = hidden
                    hidden = replay.layer(index, hidden)
            self._again[plan.hi] = hidden

    def of(self, index: int) -> Tensor:
        """[rows, width] that entered layer `index`, or left the last one."""
        if index == 0:
            return self._embedded
        if self._recorded is None:
            return self._again[index]
        return self._recorded[index - 1][self._rows]
