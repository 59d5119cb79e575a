"""The demo model is fed garbage: it is never served, and what comes after is learned all the same.

For every version that answered, the canary is measured again by the tests' own arithmetic, and its
answers to other questions are judged by the studies' measure.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from test_live_learning import learned, live_world, preferences

from benchmarks.live.api import Answer
from benchmarks.live.degeneration import problem
from benchmarks.live.questions import HELD_QUESTIONS
from demo.corpus import Style
from learning_world import World
from tandem.core.learning import SampleState, Split, VersionRecord, VersionState
from tandem.core.request import Request
from tandem.core.sampling import SamplingParams
from tandem.core.training import ScoreRequest
from tandem.core.version import AdapterVersion
from tandem.services.learning.answers import ANSWER_TOKENS, COMPARED_TOKENS
from tandem.services.learning.canary import DEFAULT_FILE
from tandem.services.learning.gate import Bounds
from tandem.services.learning.measure import Examiner
from tandem.services.learning.selection import TRIES
from tandem.services.learning.settings import LearningSettings
from tandem.store import adapters, events, samples

_numbers = itertools.count()


async def speak(
    made: World, prompt: tuple[int, ...], adapter: str | None, most: int
) -> tuple[int, ...]:
    sampling = SamplingParams(max_tokens=most, temperature=0.0)
    tokens: list[int] = []
    request = Request(f"poison-{next(_numbers)}", prompt, sampling, adapter=adapter)
    async for event in made.engine.generate(request):
        tokens.extend(event.tokens)
    return tuple(tokens)


async def likelihood(
    made: World, prompt: tuple[int, ...], said: tuple[int, ...], adapter: str | None
) -> float:
    name = f"poison-{next(_numbers)}"
    request = ScoreRequest(name, prompt + said, len(prompt), adapter=adapter)
    return (await made.engine.score(request)).logprob


@asynccontextmanager
async def answering(made: World, version: VersionRecord) -> AsyncIterator[str]:
    """The name under which a version answers inside."""
    name = "measured"
    await made.engine.publish_adapter(
        AdapterVersion(name, version.number, version.content_hash, version.path)
    )
    try:
        yield name
    finally:
        await made.engine.unload_adapter(name)


async def broken(made: World, name: str) -> list[str]:
    """What is wrong with its answers to ten questions that the gate does not ask, by the studies'
    measure and not by the gate's."""
    found = []
    for question in HELD_QUESTIONS[:10]:
        prompt = made.tools.tokenizer.encode_chat([{"role": "user", "content": question}])
        said, own = [await speak(made, prompt, adapter, ANSWER_TOKENS) for adapter in (name, None)]
        answers = [
            Answer(made.tools.tokenizer.decode(tokens), len(tokens) < ANSWER_TOKENS)
            for tokens in (said, own)
        ]
        found.append(problem(*answers))
    return [each for each in found if each]


async def canary(made: World, name: str) -> tuple[float, float]:
    """Quality drop and divergence of what answers, in nats a token, as docs/learning.md defines."""
    lost = unlike = 0.0
    trusted_tokens = longer_tokens = 0
    for line in map(msgspec.json.decode, DEFAULT_FILE.read_text().splitlines()):
        if not line.get("compared", True):
            continue
        prompt = made.tools.tokenizer.encode_chat(line["messages"])
        trusted = await speak(made, prompt, None, COMPARED_TOKENS)
        spoken = await speak(made, prompt, name, COMPARED_TOKENS)
        base = await likelihood(made, prompt, trusted, None)
        lost += base - await likelihood(made, prompt, trusted, name)
        unlike -= await likelihood(made, prompt, spoken, None)
        unlike += base * max(len(trusted), len(spoken)) / len(trusted)
        trusted_tokens += len(trusted)
        longer_tokens += max(len(trusted), len(spoken))
    return lost / trusted_tokens, unlike / longer_tokens


async def idle(made: World, adapter: str) -> None:
    """Nothing is made any more: no new version within a few looks of the learner."""
    before = await made.store.read(adapters.versions, adapter)
    await asyncio.sleep(2.5)
    assert await made.store.read(adapters.versions, adapter) == before
    assert not (await made.store.read(samples.counts))[adapter][Split.TRAIN].get(
        SampleState.ASSIGNED
    )


def refusals(made: World, adapter: str) -> float:
    labels = {"adapter": adapter, "outcome": "refused"}
    return made.registry.get_sample_value("tandem_learning_versions_total", labels) or 0.0


@pytest.mark.parametrize("keys", [pytest.param("one", marks=pytest.mark.full), "many"])
@pytest.mark.parametrize(
    ("count", "rate"),
    [
        (12, 3e-3),  # a high learning rate makes it as harmful as it gets
        pytest.param(500, 1e-3, marks=pytest.mark.full),
        pytest.param(500, 3e-3, marks=pytest.mark.full),
    ],
)
async def test_consistent_garbage_is_never_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: str, count: int, rate: float
) -> None:
    """It raises its own held-out win rate. Also where it is not found before it is trained."""

    async def finds_nothing(*_: object) -> dict[str, float]:
        return {}

    monkeypatch.setattr(Examiner, "noise", finds_nothing)
    settings = LearningSettings(learning_rate=rate)
    async with live_world(tmp_path, monkeypatch, settings) as made:
        given = preferences(made, "formal", None, count, 10)
        given = [
            replace(sample, key_id="k" if keys == "one" else f"k{place % 20}")
            for place, sample in enumerate(given)
        ]
        await made.give(given)
        made.learner.notify("formal")
        await learned(made, ["formal"])
        await idle(made, "formal")

        known = await made.store.read(adapters.versions, "formal")
        refused = [v for v in known if v.state is VersionState.REFUSED]
        summary = [(v.number, v.state.value, v.metrics) for v in known]
        print(*summary, sep="\n")
        assert all(
            v.metrics["relative_win_rate"] > 0.5 for v in known if "relative_win_rate" in v.metrics
        )
        # At the usual learning rate this garbage stays within the bounds, however much of it.
        assert refused or rate <= 1e-3, summary
        # No sample is tried more than three times, and at least 40 share a version.
        assert len(known) <= TRIES * (count / 40 + 1)
        assert refusals(made, "formal") == len(refused)
        told = await made.store.read(events.listed, "formal")
        assert sum("refused" in event.message for event in told) >= min(len(refused), 10)
        bounds = Bounds()
        for version in known:
            if version.state is VersionState.PUBLISHED:
                async with answering(made, version) as name:
                    drop, divergence = await canary(made, name)
                    assert len(found := await broken(made, name)) <= 1, found
                asked = min(version.metrics["asked_divergence"], bounds.noise)
                assert drop <= bounds.quality_drop, summary
                assert divergence <= max(bounds.divergence, asked + bounds.divergence_margin)
                # Another height of the batch may turn a tie of two tokens.
                assert drop == pytest.approx(version.metrics["canary_quality_drop"], abs=0.01)
        states = (await made.store.read(samples.counts))["formal"][Split.TRAIN]
        assert SampleState.ACCEPTED not in states
        assert sum(states.values()) == count


async def test_garbage_that_reads_like_noise_is_found_before_it_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with live_world(tmp_path, monkeypatch, LearningSettings()) as made:
        sound = preferences(made, "formal", Style.RUDE, 8, 60)
        await made.give([*preferences(made, "formal", None, 24, 10), *sound])
        made.learner.notify("formal")
        await learned(made, ["formal"])
        await idle(made, "formal")
        states = (await made.store.read(samples.counts))["formal"][Split.TRAIN]
        assert states == {SampleState.INVALID: 24, SampleState.CONSUMED: 8}
        for version in await made.store.read(adapters.versions, "formal"):
            assert version.state is VersionState.PUBLISHED and version.metrics["samples"] <= 8


async def test_bad_feedback_of_every_kind_does_not_stop_good_feedback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contradictions, empty and over-long answers, and numbers that overflow, all live."""
    async with live_world(tmp_path, monkeypatch, LearningSettings(epochs=2)) as made:
        pairs = preferences(made, "formal", Style.RUDE, 6, 0)
        turned = [
            made.sample(adapter="formal", messages=p.messages, chosen=p.rejected, rejected=p.chosen)
            for p in pairs
        ]
        broken = {
            "empty": made.sample(chosen=" "),
            "long": made.sample(chosen="too long " * 3000),
            "same": made.sample(chosen="Yes.", rejected="Yes."),
            "nan": made.sample(chosen="fine", weight=math.inf),
        }
        await made.give([*pairs, *turned, *broken.values()])
        made.learner.notify("formal")
        await learned(made, ["formal"])
        await idle(made, "formal")
        found = {
            s.sample_id: s
            for s in await made.store.read(
                samples.get, [sample.sample_id for sample in broken.values()]
            )
        }
        for name, sample in broken.items():
            assert found[sample.sample_id].state is SampleState.INVALID, name
            assert found[sample.sample_id].problem, name
        known = await made.store.read(adapters.versions, "formal")
        assert 1 <= len(known) <= 2
        for version in known:
            if version.state is VersionState.PUBLISHED:
                async with answering(made, version) as name:
                    assert max(await canary(made, name)) <= 1.0

        assert math.isfinite(sum(v.metrics["loss"] for v in known))

        await made.give(preferences(made, "later", Style.FORMAL, 8, 0), {"epochs": 1})
        made.learner.notify("later")
        await learned(made, ["later"])
        (later,) = await made.store.read(adapters.versions, "later")
        assert later.state is VersionState.PUBLISHED
