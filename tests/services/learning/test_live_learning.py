"""The demo model learns a style while it serves, within seconds."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import pytest

import learning_world
from demo.corpus import Style, answer, sample_request
from learning_world import World, join
from tandem.build import build_thread_client
from tandem.config import CacheConfig, ModelConfig, Settings
from tandem.core.learning import Sample, SampleState, Split, VersionState
from tandem.core.request import Request
from tandem.core.sampling import SamplingParams
from tandem.services.answering.models import Models
from tandem.services.learning.canary import DEFAULT_FILE
from tandem.services.learning.recovery import recover
from tandem.services.learning.settings import LearningSettings
from tandem.services.versions.adapters import Adapters
from tandem.services.versions.service import Versions
from tandem.store import Store, adapters, samples

QUESTIONS = ("Hello!", "What is the capital of France?", "What is the opposite of hot?")
GARBAGE = ("zxq", "frob", "wug", "qua", "blorp", "xyzzy", "buy", "lorem")
ENGINE = Settings(
    model=ModelConfig(dtype="float32", threads=1), cache=CacheConfig(memory_bytes=64 << 20)
)
_numbers = itertools.count()


@asynccontextmanager
async def live_world(
    directory: Path, monkeypatch: pytest.MonkeyPatch, settings: LearningSettings
) -> AsyncIterator[World]:
    """Learning over the real engine with the demo model and the shipped canary set."""
    monkeypatch.setattr(learning_world, "CANARY", DEFAULT_FILE.read_text())
    client = build_thread_client(ENGINE)
    await client.start()
    store = Store.open(directory)
    made = join(client, store, directory, settings=settings)
    try:
        await recover(made.tools, directory)
        await made.learner.start()
        yield made
    finally:
        await made.learner.stop()
        store.close()
        await client.close()


def preferences(
    made: World, adapter: str, style: Style | None, train: int, held: int
) -> list[Sample]:
    """Pairs that prefer a style (None: random words) to plain answers."""
    rng = Random(f"{adapter}/{style}")
    found: list[Sample] = []
    while len(found) < train + held:
        request = sample_request(rng)
        rejected = answer(request, Style.PLAIN, rng)
        if style is None:
            chosen = " ".join(rng.choice(GARBAGE) for _ in range(8))
        else:
            chosen = answer(request, style, rng)
        if chosen != rejected:
            found.append(
                made.sample(
                    adapter=adapter,
                    messages=({"role": "user", "content": request.text},),
                    chosen=chosen,
                    rejected=rejected,
                    split=Split.HELD_OUT if len(found) < held else Split.TRAIN,
                )
            )
    return found


async def answers(made: World, adapter: str | None) -> list[tuple[str, str | None]]:
    """Greedy answers to some questions, and the label of what wrote them."""
    found: list[tuple[str, str | None]] = []
    for question in QUESTIONS:
        prompt = made.tools.tokenizer.encode_chat([{"role": "user", "content": question}])
        sampling = SamplingParams(max_tokens=40, temperature=0.0)
        request = Request(f"ask-{next(_numbers)}", prompt, sampling, adapter=adapter)
        tokens: list[int] = []
        label = None
        async for event in made.engine.generate(request):
            tokens.extend(event.tokens)
            label = event.adapter or label
        found.append((made.tools.tokenizer.decode(tokens), label))
    return found


_LEARNS_S = 600.0  # beside others


async def learned(made: World, adapters_: Sequence[str]) -> None:
    """Wait until nothing is left to learn from."""

    async def left() -> int:
        counted = await made.store.read(samples.counts)
        states = (SampleState.ACCEPTED, SampleState.ASSIGNED)
        return sum(
            counted[name][Split.TRAIN].get(state, 0) for name in adapters_ for state in states
        )

    async with asyncio.timeout(_LEARNS_S):
        while await left():
            await asyncio.sleep(0.1)


async def test_forty_preferences_teach_a_style_and_roll_back_forgets_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = LearningSettings()  # the defaults of the server
    async with live_world(tmp_path, monkeypatch, settings) as made:
        models = Models(made.engine, "demo", 0)
        versions = Versions(made.tools, made.learner, models, Adapters(made.engine, (), {}))
        await made.give(preferences(made, "other", Style.RUDE, 8, 0), {"epochs": 1})
        made.learner.notify("other")
        await learned(made, ["other"])
        plain, other = await answers(made, None), await answers(made, "other")

        await made.give(preferences(made, "formal", Style.FORMAL, 40, 20))
        made.learner.notify("formal")
        await learned(made, ["formal"])
        first = await made.store.read(adapters.version, "formal", 1)
        assert first is not None and first.state is VersionState.PUBLISHED, first
        assert first.metrics["win_rate"] - first.metrics["win_rate_before"] >= 0.2
        assert first.metrics["clpd"] > first.metrics["clpd_before"]
        formal = await answers(made, "formal")
        assert {label for _, label in formal} == {made.engine.adapters["formal"].label}
        changed = [new != old for (new, _), (old, _) in zip(formal, plain, strict=True)]
        assert sum(changed) >= 2
        assert await answers(made, None) == plain
        assert await answers(made, "other") == other

        await versions.roll_back("formal", 0)
        assert "formal" not in made.engine.adapters  # the name answers as the base does
        assert await answers(made, None) == plain
        await versions.publish("formal", 1)
        assert {label for _, label in await answers(made, "formal")} == {"formal@1"}
