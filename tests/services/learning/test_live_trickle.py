"""Honest pairs that come one at a time: all are learned, and no version breaks answers."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import pytest
from test_live_learning import learned, live_world, preferences
from test_live_poison import answering, broken

from demo.corpus import Style
from tandem.core.learning import SampleState, Split, VersionState
from tandem.services.learning.settings import LearningSettings
from tandem.store import adapters, samples

pytestmark = pytest.mark.full

PAIRS = 32
EVERY_S = 0.5


async def test_pairs_that_come_one_at_a_time_are_all_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = LearningSettings(version_wait_s=10 * EVERY_S)
    async with live_world(tmp_path, monkeypatch, settings) as made:
        for pair in preferences(made, "formal", Style.FORMAL, PAIRS, 0):
            await made.give([replace(pair, created_s=time.time())])
            made.learner.notify("formal")
            await asyncio.sleep(EVERY_S)
        await learned(made, ["formal"])

        states = (await made.store.read(samples.counts))["formal"][Split.TRAIN]
        assert states == {SampleState.CONSUMED: PAIRS}
        known = await made.store.read(adapters.versions, "formal")
        # More than one version; the first one waits for a step's worth of pairs.
        assert len(known) >= 2
        assert known[0].number == 1 and known[0].metrics["samples"] >= settings.batch_samples
        for version in known:
            assert version.state is VersionState.PUBLISHED, version
            async with answering(made, version) as name:
                assert not await broken(made, name), version
