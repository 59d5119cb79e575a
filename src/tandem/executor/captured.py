"""Passes that were recorded once, for a number of rows each, and are done again with one call.

A pass of a few rows computes for less time than its kernels take to launch, one by one. Here all of
them are launched at once. What differs between two passes lies in tensors that keep their place:
tokens, positions, block tables, tiles of adapters, rows to record. They are filled before each
pass, by asynchronous copies. Rows beyond the real ones are padding: token 0 at position 0, stored
nowhere, attending to nothing, with no adapter. Invariant: a pass has the same results captured and
layer by layer, up to rounding.
"""

from __future__ import annotations

import logging
import math
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from tandem.executor.batch import Batch
from tandem.executor.capture import Capture
from tandem.executor.device import wait_for
from tandem.executor.forward import Computed
from tandem.executor.inner import InnerArena, RowWriter
from tandem.executor.kv_storage import KVStorage
from tandem.executor.recorder import Recorder
from tandem.executor.shortage import lacks_memory, relieve
from tandem.model.attention.base import PagedContext, ReservedAttention
from tandem.model.gpu.staging import Staging
from tandem.model.load import LoadedModel
from tandem.model.lora import ReservedTiles
from tandem.model.sampling import Best

logger = logging.getLogger(__name__)

_FEW, _STEP, _FINE_ROWS = (1, 2, 4), 8, 64
# From `_FINE_ROWS` on, sizes per doubling: a pass computes at most an eighth more rows than it has.
_PER_DOUBLING = 8
# How long no pass is recorded after memory was short: a try costs as much as several passes.
_SHORTAGE_S = 60.0
# Tokens, positions, and rows of both arenas.
_INPUTS = 4
# Mixed passes that are captured at the start: the usual chunks of prompts beside decodes, and all
# sizes with recorded rows up to the largest of these, since training fills what requests leave.
_USUAL_MIXED = (128, 256, 512, 1024)


def buckets(most: int) -> list[int]:
    """Numbers of rows that are captured, up to `most`, which is one of them.

    Few enough that all of them take little memory and time: 43 up to 1,024 rows, and 8 for each
    doubling after that. In steps of 8 rows up to 64 (less is no faster, since matrix units take 8
    or 16 at once), then in steps of at most an eighth, where each row costs time.
    """
    found = chain(_FEW, range(_STEP, _FINE_ROWS, _STEP))
    sizes = [size for size in found if size < most]
    at = _FINE_ROWS
    while at < most:
        step = at // _PER_DOUBLING
        sizes += [size for size in range(at, 2 * at, step) if size < most]
        at *= 2
    return [*sizes, most]


@dataclass(frozen=True, slots=True)
class PassLimits:
    """The largest pass: its rows and sequences, and the blocks of one sequence."""

    rows: int
    sequences: int
    blocks: int


@dataclass(frozen=True, slots=True)
class PassKind:
    """What a recorded pass is for: up to `rows` rows; one row of each sequence and the head for all
    of them (`decodes`), or any; with adapters; with recorded rows."""

    rows: int
    decodes: bool
    adapters: bool = False
    recorded: bool = False


@dataclass(frozen=True, slots=True)
class _Pass:
    """One recorded pass: its inputs, what writes its layers' exports, and how to do it again."""

    kind: PassKind
    attention: ReservedAttention
    tiles: ReservedTiles | None
    inner: RowWriter | None
    replay: Callable[[], None]


class CapturedPasses:
    """All recorded passes of one model, over its KV.

    Outputs lie in tensors that all passes share: they are valid until the next pass. `arena` takes
    recorded rows, [layers, rows, width], and `inner` what their layers export; None if the model is
    not trained, or its layers export nothing.
    """

    def __init__(
        self,
        model: LoadedModel,
        storage: KVStorage,
        capture: Capture,
        limits: PassLimits,
        arena: Tensor | None,
        inner: InnerArena | None = None,
    ) -> None:
        self._model, self._storage, self._capture = model, storage, capture
        self._limits, self._arena, self._inner = limits, arena, inner
        self._rows = buckets(limits.rows)
        self._passes: dict[PassKind, _Pass] = {}
        self._generation = model.lora.generation
        self._resumes_s = 0.0  # no pass is recorded before
        self._recording_s = 0.0
        device, dtype = model.device, model.dtype
        decodes = self._size(limits.sequences)
        self._staging = Staging(8 * _INPUTS * self._rows[-1], device)
        self._inputs = self._staging.device.view(torch.int64)
        self._hosts = [mirror.view(torch.int64) for mirror in self._staging.mirrors]
        self._hidden = torch.zeros(self._rows[-1], model.width, dtype=dtype, device=device)
        self._logits = torch.zeros(decodes, model.vocab_size, dtype=dtype, device=device)
        self._best = Best(
            torch.zeros(decodes, dtype=torch.int64, device=device),
            torch.zeros(decodes, dtype=torch.bool, device=device),
        )

    def find(self, batch: Batch) -> PreparedPass | None:
        """The pass that can compute `batch`; None if there is none."""
        rows, (spans, blocks) = batch.num_rows, batch.layout.tables.shape
        recorded = any(span.record is not None for span in batch.spans)
        decodes = rows == spans and not recorded
        most = self._limits.sequences if decodes else self._most_spans(rows)
        if rows > self._rows[-1] or spans > most or blocks > self._limits.blocks:
            return None
        if recorded and self._arena is None:
            return None
        kind = PassKind(self._size(rows), decodes, bool(batch.segments), recorded)
        found = self._pass(kind)
        return PreparedPass(self, found) if found is not None else None

    def take_recording_s(self) -> float:
        """Seconds that recording took since the last call."""
        spent_s, self._recording_s = self._recording_s, 0.0
        return spent_s

    def warm(self, seconds: float) -> None:
        """Record the passes that nearly every engine runs, those that begin within `seconds` after
        the largest of each sort, which compile kernels.

        Smaller ones then use the memory of larger ones.
        """
        began, kinds = time.monotonic(), self._usual()
        largest = {(each.decodes, each.adapters, each.recorded): each for each in reversed(kinds)}
        for kind in largest.values():
            self._pass(kind)
        compiled = time.monotonic()
        for kind in kinds:
            if time.monotonic() - compiled >= seconds:
                break
            self._pass(kind)
        logger.info("%d passes captured in %.1f s", len(self._passes), time.monotonic() - began)

    def _usual(self) -> list[PassKind]:
        """Decodes of all sizes, and mixed passes of usual ones, the largest first; then those with
        recorded rows."""
        decodes = self._rows[: self._rows.index(self._size(self._limits.sequences)) + 1]
        mixed = {self._size(rows) for rows in _USUAL_MIXED if 1 < rows <= self._rows[-1]}
        kinds = [PassKind(rows, False) for rows in mixed]
        kinds += [PassKind(rows, True, adapters) for rows in decodes for adapters in (False, True)]
        if self._arena is not None:
            rows = [rows for rows in self._rows if rows <= _USUAL_MIXED[-1]]
            kinds += [PassKind(size, False, adapters=True, recorded=True) for size in rows]
        return sorted(kinds, key=lambda kind: (not kind.recorded, kind.rows), reverse=True)

    def run(self, found: _Pass, batch: Batch, recorder: Recorder | None) -> Computed:
        """Compute `batch`."""
        kind, rows = found.kind, batch.num_rows
        found.attention.fill(batch.layout)
        if found.tiles is not None:
            found.tiles.fill(batch.segments)
        self._fill(kind, batch, recorder)
        found.replay()
        if found.inner is not None and recorder is not None and recorder.inner is not None:
            recorder.inner.hear(found.inner.layers)
        hidden = self._hidden[:rows]
        if not kind.decodes:
            return Computed(hidden)
        best = Best(self._best.choice[:rows], self._best.finite[:rows])
        return Computed(hidden, self._logits[:rows], best)

    def _size(self, rows: int) -> int:
        return self._rows[bisect_left(self._rows, min(rows, self._rows[-1]))]

    def _most_spans(self, rows: int) -> int:
        """Of a mixed pass: those that are served and as many that learn, if there are rows."""
        return min(2 * self._limits.sequences, rows - 1) if rows > 1 else 1

    def _pass(self, kind: PassKind) -> _Pass | None:
        """The pass of this kind; recorded now if there is none. None if it cannot be."""
        self._forget_outdated()
        found = self._passes.get(kind)
        if found is not None or time.monotonic() < self._resumes_s:
            return found
        wait_for(self._model.device)  # else the time of slices would be that of the recording
        began = time.monotonic()
        try:
            found = self._record(kind)
        except Exception as error:  # compilers may fail in any way
            # Another pass of this model would fail, too; when memory was short, not for good.
            logger.warning("a pass cannot be captured, computing layer by layer", exc_info=True)
            self._resumes_s = math.inf
            if lacks_memory(error):
                relieve()
                self._resumes_s = time.monotonic() + _SHORTAGE_S
        self._recording_s += time.monotonic() - began
        if found is not None:
            self._passes[kind] = found
        return found

    def _record(self, kind: PassKind) -> _Pass | None:
        """Record a pass in which all rows are padding."""
        spans = kind.rows if kind.decodes else self._most_spans(kind.rows)
        attention = self._model.kernel.reserve(kind.rows, spans, self._limits.blocks)
        tiles = self._model.lora.reserve(kind.rows) if kind.adapters else None
        self._forget_outdated()  # the adapters' table may have been made only now
        if attention is None or (kind.adapters and tiles is None):
            return None
        self._inputs.zero_()
        if kind.recorded:
            self._inputs[2 * kind.rows : _INPUTS * kind.rows].fill_(-1)
        inner = None
        if kind.recorded and self._inner is not None:
            inner = RowWriter(self._inner, self._inputs[3 * kind.rows : 4 * kind.rows])
        context = PagedContext(attention, self._storage.layers, inner_rows=inner)
        replay = self._capture.record(lambda: self._compute(kind, context, tiles))
        return _Pass(kind, attention, tiles, inner, replay)

    def _forget_outdated(self) -> None:
        """Passes that read an earlier table of adapters."""
        generation = self._model.lora.generation
        if generation != self._generation:
            self._passes = {kind: each for kind, each in self._passes.items() if not kind.adapters}
            self._generation = generation

    def _fill(self, kind: PassKind, batch: Batch, recorder: Recorder | None) -> None:
        rows, size = batch.num_rows, kind.rows
        count = (_INPUTS if kind.recorded else 2) * size
        values = self._hosts[self._staging.begin()][:count].zero_().view(-1, size)
        values[0, :rows], values[1, :rows] = batch.tokens, batch.positions
        if kind.recorded:
            values[2:] = -1
            if recorder is not None:
                values[2, :rows] = recorder.claim_places(rows)
            if recorder is not None and recorder.inner is not None:
                values[3, :rows] = recorder.inner.places(rows)
        self._staging.send(8 * count)
        if batch.drawn is not None:
            self._inputs[:rows].copy_(batch.drawn)

    def _compute(self, kind: PassKind, context: PagedContext, tiles: ReservedTiles | None) -> None:
        """What is recorded: from inputs to outputs, both at their places."""
        model, size = self._model, kind.rows
        tokens, positions, places = self._inputs[: 3 * size].split(size)
        with torch.no_grad():
            if tiles is not None:
                model.lora.activate_reserved(tiles)
            try:
                if kind.recorded:
                    hidden = self._recorded(tokens, positions, context, places)
                else:
                    hidden = model.hidden(tokens, positions, context)
            finally:
                model.lora.activate(())
            self._hidden[:size].copy_(hidden)
            if kind.decodes:
                logits = model.head(hidden)
                best = Best.of(logits)
                self._logits[:size].copy_(logits)
                self._best.choice[:size].copy_(best.choice)
                self._best.finite[:size].copy_(best.finite)

    def _recorded(
        self, tokens: Tensor, positions: Tensor, context: PagedContext, places: Tensor
    ) -> Tensor:
        from tandem.model.gpu.record import keep_rows

        arena, stack = self._arena, self._model.stack
        assert arena is not None and stack is not None
        with stack.recording(lambda layer, rows: keep_rows(rows, places, arena[layer - 1])):
            return self._model.hidden(tokens, positions, context)


class PreparedPass:
    """A `CapturedPass`."""

    def __init__(self, passes: CapturedPasses, found: _Pass) -> None:
        self._passes, self._found = passes, found

    def compute(self, batch: Batch, recorder: Recorder | None) -> Computed:
        """See `CapturedPass`."""
        return self._passes.run(self._found, batch, recorder)
