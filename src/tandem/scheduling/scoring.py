"""Makes sequences that are scored instead of continued, and the spans that forward them.

The last token of a scored sequence predicts nothing, so it is never forwarded. Invariant: every
scored position is scored once and every recorded row is recorded once, however often the KV is
recomputed.
"""

from __future__ import annotations

from tandem.core.plan import RecordTarget, Span, working_key
from tandem.core.request import Request
from tandem.core.sampling import SamplingParams
from tandem.core.sequence import Scoring, Sequence
from tandem.core.slo import WorkClass
from tandem.core.training import ScoreRequest, TrainingSequence
from tandem.core.version import AdapterVersion
from tandem.kv.cache import KVCache
from tandem.scheduling.state import SchedulerState

# Nothing is drawn from a scored sequence.
_SAMPLING = SamplingParams(max_tokens=0)


def score_sequence(
    seq_id: int, request: ScoreRequest, version: AdapterVersion | None, now: float
) -> Sequence:
    """The sequence of a score: under a pinned version, a trainer's parameters, or neither."""
    scoring = Scoring(_targets(request.tokens, request.prompt_tokens), trainer=request.trainer)
    return Sequence(
        seq_id,
        _request(request.request_id, request.tokens, request.tenant, now),
        0,
        version,
        list(request.tokens[:-1]),
        scored=request.prompt_tokens,
        scoring=scoring,
    )


def training_sequence(
    seq_id: int,
    step: tuple[str, str],
    source: TrainingSequence,
    place: tuple[int, int],
    record: RecordTarget | None,
    arrival_s: float,
) -> Sequence:
    """A sequence of a training step. `step` is (step id, trainer). `place` is (micro-batch, place
    in it) and appears in messages only. `record` is None if the sequence gets no gradient."""
    step_id, trainer = step
    scoring = Scoring(
        _targets(source.tokens, source.prompt_tokens),
        trainer=trainer,
        step_id=step_id,
        record=record,
    )
    name = f"{step_id}/{place[0]}/{place[1]}"
    return Sequence(
        seq_id,
        _request(name, source.tokens, "", arrival_s),
        0,
        None,
        list(source.tokens[:-1]),
        scored=source.prompt_tokens,
        scoring=scoring,
    )


def enter(seq: Sequence, state: SchedulerState, cache: KVCache) -> None:
    """Queue a new sequence."""
    state.add(seq)
    cache.add_reader(seq)


def leave(seq: Sequence, state: SchedulerState, cache: KVCache, *, discard: bool = False) -> None:
    """Remove a sequence and its blocks; `discard` as in `KVCache.release`."""
    cache.remove_reader(seq)
    if cache.holds(seq):
        cache.release(seq, discard=discard)
    state.remove(seq)


def restart_score(seq: Sequence) -> None:
    """Forget the score so far."""
    scoring = seq.scoring
    assert scoring is not None and scoring.record is None
    scoring.total = 0.0
    seq.scored = next(row for row, target in enumerate(scoring.targets) if target >= 0) + 1


def chunk_limit(seq: Sequence, wanted: int) -> int:
    """At most `wanted` tokens. A chunk does not mix rows that are recorded already with others."""
    scoring = seq.scoring
    if scoring is None or scoring.record is None or seq.computed >= scoring.recorded:
        return wanted
    return min(wanted, scoring.recorded - seq.computed)


def scoring_span(seq: Sequence, num_tokens: int, cache: KVCache) -> Span:
    """The next `num_tokens` rows. Records rows that are to be recorded and are not yet; scores the
    positions that are not scored yet."""
    scoring = seq.scoring
    assert scoring is not None
    start, end = seq.computed, seq.computed + num_tokens
    targets = scoring.targets[start:end]
    if start + 1 < seq.scored:  # scored before, or part of the prompt
        known = min(num_tokens, seq.scored - 1 - start)
        targets = (-1,) * known + targets[known:]
    if all(target < 0 for target in targets):
        targets = ()
    adapter = seq.adapter.content_hash if seq.adapter is not None else None
    if scoring.trainer is not None:
        adapter = working_key(scoring.trainer)
    return Span(
        seq.seq_id,
        start,
        tuple(seq.tokens[start:end]),
        cache.table(seq, end),
        adapter,
        (),
        targets,
        None if targets else 0,
        scoring.record if start >= scoring.recorded else None,
    )


def _targets(tokens: tuple[int, ...], prompt_tokens: int) -> tuple[int, ...]:
    return (-1,) * (prompt_tokens - 1) + tokens[prompt_tokens:]


def _request(name: str, tokens: tuple[int, ...], tenant: str, now: float) -> Request:
    return Request(
        name,
        tokens[:-1],
        _SAMPLING,
        tenant=tenant,
        work_class=WorkClass.LEARNING,
        arrival_s=now,
    )
