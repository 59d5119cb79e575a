"""A disk that takes nothing: learning waits, says so once, and does not train again for nothing."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from pathlib import Path

import pytest

from fake_engine import FakeEngine
from learning_world import World, settled, world
from patience import until
from tandem.core.errors import DiskError
from tandem.core.version import AdapterVersion
from tandem.services.learning import learner
from tandem.services.learning.publish import require_writable
from tandem.services.learning.settings import LearningSettings
from tandem.store import events

AT_ONCE = LearningSettings(batch_samples=4, replay=0.0, epochs=1, version_wait_s=0.0)


class Full(FakeEngine):
    """Whose disk takes no version while it is `full`."""

    full = True
    staged = 0

    async def stage(self, trainer: str, name: str, path: str) -> AdapterVersion:
        self.staged += 1
        if self.full:
            raise DiskError(f"cannot write {path}: no space left on device")
        return await super().stage(trainer, name, path)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learner, "_DISK_FIRST_S", 0.1)


async def waits(made: World) -> list[str]:
    told = await made.store.read(events.listed, "formal")
    return [event.message for event in told if "learning waits" in event.message]


async def test_what_the_disk_refuses_is_told_once_and_tried_less_and_less_often(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Full()
    async with world(tmp_path, engine=engine, settings=AT_ONCE) as made:
        await made.give([made.sample() for _ in range(4)])
        made.learner.notify("formal")
        await until(lambda: engine.staged > 1)
        await asyncio.sleep(1.0)
        assert engine.staged <= 5  # after 0.1 s, 0.2 s, 0.4 s, 0.8 s
        (told,) = await waits(made)
        assert "no space left on device" in told and str(tmp_path) not in told
        (line,) = [each for each in caplog.records if each.levelno >= logging.ERROR]
        assert line.exc_info is None and "no space left on device" in line.getMessage()
        assert str(tmp_path) in line.getMessage(), "the log says where"
        engine.full = False
        await settled(made)
        assert "formal" in engine.adapters


async def test_nothing_is_trained_while_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    free = [0]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=free[0]))
    async with world(tmp_path, settings=AT_ONCE) as made:
        await made.give([made.sample() for _ in range(4)])
        made.learner.notify("formal")
        await until(lambda: waits(made))
        await asyncio.sleep(0.2)
        assert made.engine.steps == [] and made.engine.trainers == {}
        (told,) = await waits(made)
        assert "the disk of the store is full: 0 MiB are free" in told
        free[0] = 1 << 40
        await settled(made)
        assert "formal" in made.engine.adapters


def test_a_version_needs_what_the_largest_one_took(tmp_path: Path) -> None:
    require_writable(tmp_path, tmp_path / "absent")
    version = tmp_path / "formal" / "1"
    version.mkdir(parents=True)
    with (version / "optimizer.safetensors").open("wb") as sparse:
        sparse.truncate(shutil.disk_usage(tmp_path).free)
    with pytest.raises(DiskError, match=r"is full: .* MiB are free, and a version needs"):
        require_writable(tmp_path, version.parent)


def test_a_disk_that_is_read_only_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(DiskError, match="cannot be written to"):
        require_writable(tmp_path, tmp_path)
