"""One run of the learning benchmark: a load, an engine under one policy, and what came of it.

While it runs, requests are answered and pairs are taught; which version served when is written
down. Only afterwards each pair is scored under the version that was serving when it arrived, before
anything was trained on it (prequential), so that measuring disturbs no policy. Invariant: a run's
requests and pairs are the same for every policy.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import groupby
from pathlib import Path

from benchmarks.learning.lessons import ByPriority, InOrder, PriorityOptions, Rule
from benchmarks.learning.stream import Ask, Feedback, Load
from benchmarks.learning.teaching import (
    ADAPTER,
    Lessons,
    Published,
    Teacher,
    TeachingOptions,
    score_requests,
)
from tandem.bench.measure import Outcome
from tandem.core.errors import InvalidRequest, TandemError
from tandem.core.ports import EngineClient
from tandem.core.request import Request
from tandem.core.sampling import SamplingParams
from tandem.core.slo import Slo
from tandem.core.version import AdapterVersion

POLICIES = ("no_retrain", "ekya", "adainf", "unified")
_SCORED_AT_ONCE = 16
_MEASURED = "~measured"


@dataclass(frozen=True, slots=True)
class PairScore:
    """A pair as it was met: when it came, under which version (0: base), and both summed
    log-probabilities."""

    key: str
    at_s: float
    source: str
    version: int
    chosen: float
    rejected: float

    @property
    def difference(self) -> float:
        """CLPD's term of this pair, in nats; above 0 the pair is won."""
        return self.chosen - self.rejected


@dataclass(slots=True)
class RunRecord:
    """What came of a run. `pairs` are in order of arrival."""

    seconds: float
    outcomes: list[Outcome]
    lessons: Lessons
    pairs: list[PairScore] = field(default_factory=list)


class LessonPlan(StrEnum):
    """Which rule chooses a run's pairs. `own`: MACE's for `unified`, pairs in order for the
    baselines; `once` and `repeat` give every policy the one or the other, to tell what the policy
    does from what the rule does."""

    OWN = "own"
    ONCE = "once"
    REPEAT = "repeat"


def rule_for(
    policy: str, batch: int, repeats: PriorityOptions, plan: LessonPlan = LessonPlan.OWN
) -> Rule:
    """What the learner gives the engine to train under `policy`.

    The baselines' work is given from outside, a job for each batch of feedback; `unified` gets
    MACE's: pairs come back until they are learnt, which only takes time that is left.
    """
    if plan is LessonPlan.OWN:
        plan = LessonPlan.REPEAT if policy == "unified" else LessonPlan.ONCE
    return ByPriority(repeats) if plan is LessonPlan.REPEAT else InOrder(batch)


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How a load is run: objectives of the requests, the learner's options, its rule."""

    slo: Slo
    teaching: TeachingOptions
    policy: str
    repeats: PriorityOptions
    lessons: LessonPlan = LessonPlan.OWN


async def run(client: EngineClient, load: Load, options: RunOptions, folder: Path) -> RunRecord:
    """Run `load` and measure it; `client` is started and closed by the caller. Versions are
    written under `folder`, which must not exist."""
    folder.mkdir(parents=True)
    await _warm_up(client, load)
    clock = _Clock()
    record = RunRecord(load.seconds, [], Lessons())
    async with _teaching(client, options, folder, clock) as teacher:
        clock.start()
        answers = asyncio.gather(
            *(
                _answer(client, ask, place, options.slo, clock)
                for place, ask in enumerate(load.asks)
            )
        )
        for place, feedback in enumerate(load.feedback):
            await clock.until(feedback.at_s)
            if teacher is not None:
                teacher.add(place, feedback.pair)
    if teacher is not None:
        record.lessons = teacher.lessons
    record.outcomes = await answers
    record.pairs = await score_prequentially(client, load.feedback, record.lessons.versions)
    return record


class _Clock:
    """Seconds since `start`."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def start(self) -> None:
        self._began = time.monotonic()

    def __call__(self) -> float:
        return time.monotonic() - self._began

    async def until(self, at_s: float) -> None:
        await asyncio.sleep(max(0.0, at_s - self()))


@asynccontextmanager
async def _teaching(
    client: EngineClient, options: RunOptions, folder: Path, clock: _Clock
) -> AsyncIterator[Teacher | None]:
    """A teacher at work, or None where nothing is retrained; stopped and closed at the end."""
    if options.policy == "no_retrain":
        yield None
        return
    rule = rule_for(options.policy, options.teaching.batch, options.repeats, options.lessons)
    teacher = Teacher(client, rule, options.teaching, folder, clock)
    await teacher.open()
    task = asyncio.create_task(teacher.run())
    try:
        yield teacher
        if task.done():  # it only ends by itself when it fails
            task.result()
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def _warm_up(client: EngineClient, load: Load) -> None:
    """A few requests at once, so that nothing is done for the first time while it is measured."""
    asks = [Ask(0.0, ask.prompt, ask.output_tokens) for ask in load.asks[:8]]
    clock, slo = _Clock(), Slo(60.0, 60.0)
    outcomes = await asyncio.gather(
        *(_answer(client, ask, -1 - place, slo, clock) for place, ask in enumerate(asks))
    )
    for outcome in outcomes:
        if outcome.error is not None:
            raise InvalidRequest(f"the engine does not answer: {outcome.message}")


async def _answer(client: EngineClient, ask: Ask, place: int, slo: Slo, clock: _Clock) -> Outcome:
    """Send one request at its time, to the adapter once it has a version, and note each token."""
    await clock.until(ask.at_s)
    outcome = Outcome(place, ask.at_s, clock(), prompt_tokens=len(ask.prompt), usage_reported=True)
    request = Request(
        f"ask {place}",
        ask.prompt,
        SamplingParams(max_tokens=ask.output_tokens, ignore_eos=True, temperature=0.0),
        adapter=ADAPTER if ADAPTER in client.adapters else None,
        slo=slo,
    )
    try:
        async for event in client.generate(request):
            if event.tokens:
                outcome.output_s.append(clock())
                outcome.output_tokens += len(event.tokens)
            if event.error is not None:
                outcome.error, outcome.message = "engine", event.error
    except TandemError as error:
        outcome.error, outcome.message = "engine", str(error)
    outcome.ended_s = clock()
    return outcome


async def score_prequentially(
    client: EngineClient, feedback: Sequence[Feedback], versions: Sequence[Published]
) -> list[PairScore]:
    """Each pair under the version that served when it arrived, in order of arrival."""
    served = [serving(versions, each.at_s) for each in feedback]
    return await score_under(client, feedback, served)


async def score_under(
    client: EngineClient, feedback: Sequence[Feedback], served: Sequence[Published | None]
) -> list[PairScore]:
    """Each pair under the version at its place (None: the base), in order of arrival."""
    scores: list[PairScore] = []
    by_version = groupby(enumerate(served), key=lambda item: item[1])
    for version, places in by_version:
        adapter = None
        if version is not None:
            adapter = _MEASURED
            await client.publish_adapter(
                AdapterVersion(adapter, version.number, version.content_hash, version.path)
            )
        numbers = [place for place, _ in places]
        for at in range(0, len(numbers), _SCORED_AT_ONCE):
            part = numbers[at : at + _SCORED_AT_ONCE]
            scores += await asyncio.gather(
                *(_score(client, feedback[place], version, adapter, place) for place in part)
            )
    if any(version is not None for version in served):
        await client.unload_adapter(_MEASURED)
    return scores


def serving(versions: Sequence[Published], at_s: float) -> Published | None:
    """The version that served at `at_s`; None for the base model."""
    return max(
        (version for version in versions if version.at_s <= at_s),
        key=lambda version: version.number,
        default=None,
    )


async def _score(
    client: EngineClient,
    feedback: Feedback,
    version: Published | None,
    adapter: str | None,
    place: int,
) -> PairScore:
    requests = score_requests(feedback.pair, adapter, f"measured {place}")
    chosen, rejected = await asyncio.gather(*map(client.score, requests))
    return PairScore(
        feedback.pair.key,
        feedback.at_s,
        feedback.pair.source,
        0 if version is None else version.number,
        chosen.logprob,
        rejected.logprob,
    )
