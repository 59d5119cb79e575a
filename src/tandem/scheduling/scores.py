"""Scores requested on their own: reference log-probabilities, win rates, the gate.

They run like any other sequence. A score under a trainer's working parameters has private KV and
sees one revision only. Invariant: a score ends once, with its sum or with a reason.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, ValuesView
from dataclasses import dataclass

from tandem.core.errors import InvalidRequest
from tandem.core.sequence import Sequence
from tandem.core.training import Score, ScoreRequest
from tandem.core.version import AdapterVersion
from tandem.kv.cache import KVCache
from tandem.scheduling.scoring import enter, leave, restart_score, score_sequence
from tandem.scheduling.state import SchedulerState


@dataclass(frozen=True, slots=True)
class ScoreFailed:
    """A score that could not be computed, and why."""

    request_id: str
    reason: str


class Scores:
    """Scores in progress, by request id. Owned by `Learning`."""

    def __init__(self, state: SchedulerState, cache: KVCache) -> None:
        self._state = state
        self._cache = cache
        self._sequences: dict[str, Sequence] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._sequences

    @property
    def sequences(self) -> ValuesView[Sequence]:
        """All scores, oldest first, waiting and running."""
        return self._sequences.values()

    def add(
        self, seq_id: int, request: ScoreRequest, version: AdapterVersion | None, now: float
    ) -> None:
        """Queue a score. Raises `InvalidRequest`."""
        if request.request_id in self._sequences:
            raise InvalidRequest(f"request id {request.request_id!r} is in use")
        if not 0 < request.prompt_tokens < len(request.tokens):
            raise InvalidRequest(
                f"{request.prompt_tokens} prompt tokens of {len(request.tokens)} leave no prompt "
                "or no completion to score",
                param="prompt_tokens",
            )
        seq = score_sequence(seq_id, request, version, now)
        self._sequences[request.request_id] = seq
        enter(seq, self._state, self._cache)

    def abort(self, request_id: str) -> None:
        """Forget a score silently; idempotent."""
        if request_id in self._sequences:
            leave(self._sequences.pop(request_id), self._state, self._cache)

    def finish(self, seq: Sequence) -> Score:
        """All its rows are forwarded: end it with its sum."""
        assert seq.scoring is not None
        self.abort(seq.request.request_id)
        return _score(seq, seq.scoring.total)

    def finish_not_finite(self, seq: Sequence) -> Score:
        """The model gives it no finite log-probability. Its cached blocks may not be finite either,
        so they are discarded."""
        del self._sequences[seq.request.request_id]
        leave(seq, self._state, self._cache, discard=True)
        return _score(seq, math.nan)

    def fail(self, seq: Sequence, reason: str) -> ScoreFailed:
        """It cannot be computed. Its cached blocks are discarded, since they cannot be trusted."""
        del self._sequences[seq.request.request_id]
        leave(seq, self._state, self._cache, discard=True)
        return ScoreFailed(seq.request.request_id, reason)

    def under(self, trainer: str) -> Iterator[Sequence]:
        """Scores under the working parameters of `trainer`."""
        for seq in list(self._sequences.values()):
            if seq.scoring is not None and seq.scoring.trainer == trainer:
                yield seq

    def holds_update(self, trainer: str, ending: set[int]) -> bool:
        """Whether a score under `trainer` runs and is not among those `ending` in this plan."""
        return any(
            seq.seq_id in self._state.running and seq.seq_id not in ending
            for seq in self.under(trainer)
        )

    def preempted(self, seq: Sequence) -> None:
        """A score lost its KV. It restarts if parameters may change before it runs again."""
        if seq.scoring is not None and seq.scoring.private:
            restart_score(seq)


def _score(seq: Sequence, total: float) -> Score:
    assert seq.scoring is not None
    label = seq.adapter.label if seq.adapter is not None else None
    scored = sum(target >= 0 for target in seq.scoring.targets)
    return Score(seq.request.request_id, total, scored, label)
