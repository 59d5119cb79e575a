"""What recorded spans left for the backward pass: rows in one arena, and whose they are.

A micro-batch owns consecutive rows of the arena, sequence after sequence, so that chunks join
without a copy. What its layers' gradients need besides may be kept too, a cache that goes first.
Knows no model: rows have a width, layers are counted. Invariant (`check`): every row of the arena
is free or owned by exactly one micro-batch, and graphs stay within their budget.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from tandem.core.errors import AccountingError
from tandem.core.plan import OpenMicroBatch


class Graph(Protocol):
    """What a layer's gradient needs of its forward pass, beside the layer's input."""

    @property
    def nbytes(self) -> int:
        """Memory of it."""
        ...


@dataclass(slots=True)
class Recording:
    """One open micro-batch.

    `first_row` is where its rows lie in the arena, None after they were dropped: they are then
    computed again from `tokens` int64 [rows]. `done[s]` counts recorded tokens of sequence s.
    `slopes` [rows, width] is d(log p)/d(hidden) after the final norm, zero where nothing was
    scored. `at` is how many layers the backward pass still has to do; `gradient` is what leaves
    the lowest one done, for the rows of the `active` sequences. `replay` is kept between slices;
    `graphs` by layer are of all rows.
    """

    micro_batch: int
    trainer: str
    revision: int
    lengths: tuple[int, ...]
    first_row: int | None
    tokens: Tensor
    done: list[int]
    at: int
    slopes: Tensor | None = None
    gradient: Tensor | None = None
    active: tuple[int, ...] = ()
    replay: object | None = None
    graphs: dict[int, Graph] = field(default_factory=dict)
    starts: tuple[int, ...] = field(default=())

    @property
    def num_rows(self) -> int:
        """Rows of all sequences."""
        return sum(self.lengths)

    @property
    def complete(self) -> bool:
        """Whether all rows were recorded."""
        return tuple(self.done) == self.lengths

    def rows_of(self, sequences: Sequence[int]) -> slice | Tensor:
        """Rows of `sequences` within this recording; a slice if they are all of them."""
        wanted = [s for s in range(len(self.lengths)) if self.lengths[s]]
        if list(sequences) == wanted:
            return slice(0, self.num_rows)
        parts = [torch.arange(self.starts[s], self.starts[s] + self.lengths[s]) for s in sequences]
        index = torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)
        return index.to(self.tokens.device)


class Recordings:
    """The arena and the micro-batches in it.

    `arena` is [num_layers, capacity, width]: entry i holds what leaves layer i. What enters layer
    0 comes from the tokens. Graphs take up to `graph_budget` bytes.
    """

    def __init__(self, arena: Tensor, graph_budget: int = 0) -> None:
        self._arena = arena
        self._graph_budget = graph_budget
        self._capacity = arena.shape[1]
        self._open: dict[int, Recording] = {}
        self._high_rows = 0

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return self._arena.shape[0]

    @property
    def capacity(self) -> int:
        """Rows that can be recorded at once."""
        return self._capacity

    @property
    def nbytes(self) -> int:
        """Memory that was written so far: pages of the arena are taken when they are needed."""
        width = self._arena.shape[0] * self._arena.shape[2] * self._arena.element_size()
        own = [
            tensor.nbytes
            for each in self._open.values()
            for tensor in (each.slopes, each.gradient, each.tokens)
            if tensor is not None
        ]
        return self._high_rows * width + sum(own)

    @property
    def graph_bytes(self) -> int:
        """Memory of all graphs that are kept."""
        return sum(graph.nbytes for each in self._open.values() for graph in each.graphs.values())

    @property
    def keeps_graphs(self) -> bool:
        """Whether there is any room for graphs."""
        return self._graph_budget > 0

    def get(self, micro_batch: int) -> Recording | None:
        """The open recording of that number."""
        return self._open.get(micro_batch)

    def of(self, trainer: str) -> list[Recording]:
        """All open recordings of `trainer`."""
        return [each for each in self._open.values() if each.trainer == trainer]

    def open(self, plan: OpenMicroBatch) -> Recording:
        """Make room for a micro-batch; the inputs of others are dropped if there is none.

        Raises `MemoryError` if it is larger than the arena.
        """
        rows = sum(plan.lengths)
        if rows > self._capacity:
            raise MemoryError(f"{rows} rows of a micro-batch do not fit in {self._capacity}")
        first = self._find(rows)
        starts, at = [], 0
        for length in plan.lengths:
            starts.append(at)
            at += length
        recording = Recording(
            plan.micro_batch,
            plan.trainer,
            plan.revision,
            plan.lengths,
            first,
            torch.zeros(rows, dtype=torch.int64, device=self._arena.device),
            [0] * len(plan.lengths),
            self.num_layers,
            starts=tuple(starts),
        )
        self._open[plan.micro_batch] = recording
        self._high_rows = max(self._high_rows, first + rows)
        return recording

    def close(self, micro_batch: int) -> None:
        """Let a recording go; harmless if it is not open."""
        self._open.pop(micro_batch, None)

    def rows(self, recording: Recording) -> Tensor | None:
        """[num_layers, rows, width] of the arena, or None if they were dropped."""
        first = recording.first_row
        if first is None:
            return None
        return self._arena[:, first : first + recording.num_rows]

    def keep_graph(self, recording: Recording, layer: int, graph: Graph) -> None:
        """Keep a layer's graph if it fits; what is older stays, since it is needed sooner."""
        recording.graphs.pop(layer, None)
        if self.graph_bytes + graph.nbytes <= self._graph_budget:
            recording.graphs[layer] = graph

    def take_graph(self, recording: Recording, layer: int) -> Graph | None:
        """A layer's graph if it was kept; it is needed once."""
        return recording.graphs.pop(layer, None)

    def drop_graphs(self, recording: Recording) -> None:
        """Let the graphs of a recording go; a backward slice computes its layers again."""
        recording.graphs.clear()

    def drop_inputs(self, recording: Recording) -> None:
        """Give the rows of a recording back, its graphs first; a slice computes them again."""
        self.drop_graphs(recording)
        recording.first_row = None

    def check(self, trainers: Callable[[str], bool]) -> None:
        """Account for every row; `trainers` says whether one is open. Raises `AccountingError`."""
        end = 0
        for first, last, number in sorted(self._ranges()):
            if first < end or last > self._capacity:
                raise AccountingError(f"rows of micro-batch {number} are owned twice or not there")
            end = last
        if self.graph_bytes > self._graph_budget:
            raise AccountingError(f"graphs take {self.graph_bytes} of {self._graph_budget} bytes")
        for recording in self._open.values():
            if any(layer >= recording.at for layer in recording.graphs):
                raise AccountingError(f"micro-batch {recording.micro_batch} keeps a graph it used")
            if not trainers(recording.trainer):
                raise AccountingError(
                    f"micro-batch {recording.micro_batch} belongs to no open trainer"
                )

    def _ranges(self) -> list[tuple[int, int, int]]:
        """(first row, end, micro-batch) of every range in use."""
        return [
            (each.first_row, each.first_row + each.num_rows, number)
            for number, each in self._open.items()
            if each.first_row is not None
        ]

    def _find(self, rows: int) -> int:
        """First row of a free range; makes one by moving ranges together, then by dropping."""
        end = 0
        for first, last, _ in sorted(self._ranges()):
            if first - end >= rows:
                return end
            end = last
        if self._capacity - end >= rows:
            return end
        self._compact()
        end = max((last for _, last, _ in self._ranges()), default=0)
        while self._capacity - end < rows:
            # The latest to come is the last to be needed, and lies at the end.
            _, end, number = max(self._ranges())
            end -= self._open[number].num_rows
            self.drop_inputs(self._open[number])
        return end

    def _compact(self) -> None:
        end = 0
        for first, last, number in sorted(self._ranges()):
            if first > end:
                # Ranges may overlap where they come from and go to, so each layer is copied out.
                for layer in self._arena:
                    layer[end : end + last - first] = layer[first:last].clone()
                self._open[number].first_row = end
            end += last - first
