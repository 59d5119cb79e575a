"""Parameters that blow up: the version is refused and not tried again and again."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import pytest
from test_live_learning import live_world, preferences

from patience import START_S
from tandem.core.learning import GateMode, SampleState, Split, VersionState
from tandem.core.training import ScoreRequest
from tandem.services.learning.selection import TRIES
from tandem.services.learning.settings import LearningSettings
from tandem.store import adapters, events, samples


async def test_parameters_that_blow_up_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = LearningSettings(learning_rate=1e30, gate=GateMode.ALWAYS, version_wait_s=0.0)
    async with live_world(tmp_path, monkeypatch, settings) as made:
        await made.give(preferences(made, "formal", None, 6, 2))
        made.learner.notify("formal")
        async with asyncio.timeout(START_S):
            while len(versions := await made.store.read(adapters.versions, "formal")) < TRIES:
                await asyncio.sleep(0.1)
        for version in versions:
            assert version.state is VersionState.REFUSED
            assert "not finite" in version.reason
        told = await made.store.read(events.listed, "formal")
        assert not [event for event in told if "learning failed" in event.message]
        states = (await made.store.read(samples.counts))["formal"][Split.TRAIN]
        assert not states.get(SampleState.ACCEPTED) and not states.get(SampleState.ASSIGNED)
        # What is left of it in the cache harms nobody.
        prompt = made.tools.tokenizer.encode_chat([{"role": "user", "content": "Hello!"}])
        request = ScoreRequest("after", (*prompt, 5, 6), len(prompt))
        assert math.isfinite((await made.engine.score(request)).logprob)
