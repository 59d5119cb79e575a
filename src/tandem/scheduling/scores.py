"""Scores that are asked for alone: reference log-probs, win rates, the gate.

They run like any other sequence; under a trainer's working parameters they are private and see one
revision only. Invariant: a score ends once, with its sum or with a reason.
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
    """A score that has no answer, and why."""

    request_id: str
    reason: str


class Scores:
    """The scores under way by request id. Owned by `Learning`."""

    def __init__(self, state: SchedulerState, cache: KVCache) -> None:
        self._state = state
        self._cache = cache
        self._sequences: dict[str, Sequence] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._sequences

    @property
    def sequences(self) -> ValuesView[Sequence]:
        """All of them, oldest first, waiting and running."""
        return self._sequences.values()

    def add(
        self, seq_id: int, request: ScoreRequest, version: AdapterVersion | None, now: float
    ) -> None:
        """Let a score wait. Raises `InvalidRequest`."""
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
        """All of it is forwarded."""
        assert seq.scoring is not None
        self.abort(seq.request.request_id)
        return _score(seq, seq.scoring.total)

    def finish_not_finite(self, seq: Sequence) -> Score:
        """Its model gives it no finite log-probability; what it left in the cache is like that."""
        del self._sequences[seq.request.request_id]
        leave(seq, self._state, self._cache, discard=True)
        return _score(seq, math.nan)

    def fail(self, seq: Sequence, reason: str) -> ScoreFailed:
        """It cannot be computed; what it left in the cache is not to be trusted."""
        del self._sequences[seq.request.request_id]
        leave(seq, self._state, self._cache, discard=True)
        return ScoreFailed(seq.request.request_id, reason)

    def under(self, trainer: str) -> Iterator[Sequence]:
        """Those under the working parameters of `trainer`."""
        for seq in list(self._sequences.values()):
            if seq.scoring is not None and seq.scoring.trainer == trainer:
                yield seq

    def holds_update(self, trainer: str, ending: set[int]) -> bool:
        """Whether one under `trainer` has begun and does not end with the sequences `ending`."""
        return any(
            seq.seq_id in self._state.running and seq.seq_id not in ending
            for seq in self.under(trainer)
        )

    def preempted(self, seq: Sequence) -> None:
        """Its KV is gone; working parameters may change before it runs again."""
        if seq.scoring is not None and seq.scoring.private:
            restart_score(seq)


def _score(seq: Sequence, total: float) -> Score:
    assert seq.scoring is not None
    label = seq.adapter.label if seq.adapter is not None else None
    scored = sum(target >= 0 for target in seq.scoring.targets)
    return Score(seq.request.request_id, total, scored, label)
