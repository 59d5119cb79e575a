"""The watch over published versions: live answers, thumbs, and who is never rolled back by it."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fake_engine import FakeEngine, Script
from learning_world import World, world
from patience import PATIENCE_S, until
from serving import demo_tokenizer
from tandem.adapters.files import CONFIG_NAME
from tandem.core.learning import (
    EventRecord,
    Feedback,
    FeedbackKind,
    SampleState,
    VersionState,
)
from tandem.core.ports import EngineState
from tandem.core.request import Request
from tandem.core.sampling import SamplingParams
from tandem.core.sequence import FinishReason
from tandem.core.slo import WorkClass
from tandem.services.answering.models import Models
from tandem.services.learning.live import Written
from tandem.services.learning.outlook import Outlooks
from tandem.services.learning.watch import Watch
from tandem.services.versions import changes
from tandem.services.versions.adapters import Adapters
from tandem.services.versions.service import Versions
from tandem.store import adapters, events, feedback, samples

SOUND = "The capital of France is Paris, and it lies on the river Seine."
MMM = "M" + "m" * 60
AGAIN = "and so it is said in the old book " * 8
SAMPLED = SamplingParams(max_tokens=64, temperature=0.7)
PROMPTS = itertools.count(7)


def script(text: str) -> Script:
    return Script(tokens=demo_tokenizer().encode(text, add_special_tokens=False))


def base_says(text: str) -> FakeEngine:
    """Candidates answer soundly, the base model as given."""
    return FakeEngine(
        play=lambda request, index: script(
            text if request.request_id.startswith("watch") else SOUND
        )
    )


def written(label: str | None, text: str = MMM, **changes: Any) -> Written:
    """An answer; each has a prompt of its own unless one is given."""
    sampling = replace(SAMPLED, **changes.pop("sampling", {}))
    prompt = changes.pop("prompt", (5, 6, next(PROMPTS)))
    tenant = changes.pop("tenant", "")
    request = Request("chatcmpl-1-0", prompt, sampling, adapter="formal", tenant=tenant)
    return replace(Written(label, request, text, 40, ended=False), **changes)


@asynccontextmanager
async def watched(
    directory: Path, gate: str = "auto", versions: int = 2, **options: Any
) -> AsyncIterator[tuple[World, Versions]]:
    """`formal` with two versions, which is watched."""
    options.setdefault("engine", base_says(SOUND))
    async with world(directory, **options) as made:
        service = Versions(
            made.tools, made.learner, Models(made.engine, "demo", 0), Adapters(made.engine, (), {})
        )
        watch = Watch(made.tools, made.learner)
        watch.start()
        for number in range(1, versions + 1):
            await learn(made, number, gate)
            if gate == "manual":
                await service.publish("formal", number)
        try:
            yield made, service
        finally:
            await watch.stop()


async def learn(made: World, number: int, gate: str = "auto") -> None:
    await made.give([made.sample() for _ in range(4)], {"gate": gate})
    made.learner.notify("formal")
    async with asyncio.timeout(PATIENCE_S):
        while await made.store.read(adapters.version, "formal", number) is None:
            await asyncio.sleep(0.02)
        async with made.learner.settled("formal"):
            pass


async def answers(made: World, *texts: str, label: str = "formal@2") -> None:
    """Live answers, and time to look at them."""
    for text in texts:
        made.tools.live.finished(written(label, text))
    await asyncio.sleep(0.3)


async def rate(made: World, label: str, *ups: bool, **changes: Any) -> None:
    for up in ups:
        number = next(made.numbers)
        said = replace(
            Feedback(f"rated-{number}", 1.0, "formal", FeedbackKind.RATING, rating=float(up)),
            completion_id=f"chatcmpl-{number}",
            version=label,
            **changes,
        )
        await made.store.write(feedback.add, said, [])
        made.tools.live.rated(said)
    await asyncio.sleep(0.3)


async def reached(made: World, number: int) -> None:
    """Wait for a version to answer, as the store and the engine have it."""
    await until(lambda: current(made) == number)
    async with made.learner.settled("formal"):
        pass


def current(made: World) -> int:
    return made.engine.adapters["formal"].number if "formal" in made.engine.adapters else 0


async def told(made: World) -> str:
    return (await made.store.read(events.listed, "formal", limit=1))[0].message


async def states(made: World, number: int) -> list[SampleState]:
    ids = await made.store.read(adapters.trained_on, "formal", number)
    found = await made.store.read(samples.get, ids)
    return [sample.state for sample in found if sample.version == number]


def rolled_back(made: World) -> float:
    labels = {"adapter": "formal", "outcome": "rolled_back"}
    return made.registry.get_sample_value("tandem_learning_versions_total", labels) or 0.0


async def test_a_version_whose_answers_break_is_rolled_back(tmp_path: Path) -> None:
    async with watched(tmp_path) as (made, service):
        assert current(made) == 2
        assert await states(made, 2) == [SampleState.CONSUMED] * 4
        await answers(made, SOUND, SOUND, MMM, MMM, AGAIN, MMM)
        assert current(made) == 2  # four broken ones say too little
        await answers(made, SOUND, MMM)
        await reached(made, 1)
        assert (await service.find("formal")).record.current == 1
        assert await told(made) == (
            "version 2 rolled back by itself to 1: 5 of its last 8 answers were broken (one word "
            "over and over). Its 4 samples are not taught again. If its answers are what you want, "
            "publish it: tandem adapters publish formal 2"
        )
        [version, *_] = await service.versions("formal")
        assert version.number == 2 and version.state is VersionState.PUBLISHED
        assert version.reason.startswith("5 of its last 8 answers") and not version.watched
        assert await states(made, 2) == [SampleState.REFUSED] * 4
        assert await states(made, 1) == [SampleState.CONSUMED] * 4
        assert rolled_back(made) == 1.0
        ids = await made.store.read(adapters.trained_on, "formal", 2)
        found = await made.store.read(samples.get, ids)
        lost = [sample for sample in found if sample.version == 2]
        outlook = await Outlooks(made.tools, made.learner).of("formal", lost)
        assert outlook.note == "version 2 learned from it and was rolled back by itself"
        # Learning goes on from there, without what was refused.
        await learn(made, 3)
        third = await made.store.read(adapters.version, "formal", 3)
        assert third is not None and third.parent == 1 and third.watched
        used = await made.store.read(adapters.trained_on, "formal", 3)
        gone = await made.store.read(adapters.trained_on, "formal", 2)
        replayed = set(await made.store.read(adapters.trained_on, "formal", 1))
        assert not set(used) & (set(gone) - replayed)


async def test_a_version_whose_files_are_gone_is_nothing_to_go_back_to(tmp_path: Path) -> None:
    async with watched(tmp_path) as (made, service):
        first = await made.store.read(adapters.version, "formal", 1)
        assert first is not None
        (Path(first.path) / CONFIG_NAME).unlink()
        await answers(made, *[MMM] * 6)
        await reached(made, 0)
        assert (await service.find("formal")).record.current == 0
        assert (await told(made)).startswith("version 2 rolled back by itself to the base: ")


async def test_a_version_that_answers_well_stays(tmp_path: Path) -> None:
    async with watched(tmp_path) as (made, _):
        await answers(made, *[SOUND] * 30, *[MMM] * 9)
        assert current(made) == 2  # fewer than a third of the last 30
        assert not [request for request in made.engine.requests if "watch" in request.request_id]
        await answers(made, MMM)
        await reached(made, 1)


async def test_a_busy_version_is_rolled_back_although_its_last_answers_are_others_by_then(
    tmp_path: Path,
) -> None:
    slow = base_says(SOUND)
    play = slow.play
    slow.play = lambda request, index: replace(
        play(request, index), delay_s=0.05 if request.request_id.startswith("watch") else 0.0
    )
    async with watched(tmp_path, engine=slow) as (made, _):
        for _ in range(400):  # whenever the base has answered, the window has moved on
            made.tools.live.finished(written("formal@2", MMM))
            await asyncio.sleep(0.005)
            if current(made) == 1:
                break
        await reached(made, 1)


def slow_base() -> FakeEngine:
    """It has not answered by the end of a test."""
    slow = base_says(SOUND)
    play = slow.play
    slow.play = lambda request, index: replace(
        play(request, index), delay_s=3600.0 if request.request_id.startswith("watch") else 0.0
    )
    return slow


def questions() -> int:
    """About how many versions the base is asked now."""
    return sum(each.get_name().startswith("watch ") for each in asyncio.all_tasks())


async def test_the_base_is_not_asked_about_a_version_that_no_longer_answers(tmp_path: Path) -> None:
    async with watched(tmp_path, engine=slow_base()) as (made, service):
        await answers(made, *[MMM] * 6)
        await until(lambda: questions() == 1)
        await service.roll_back("formal", 1)
        await answers(made, *[MMM] * 6)
        await until(lambda: questions() == 0)


async def test_nobody_waits_for_what_the_base_says_about_a_version(tmp_path: Path) -> None:
    """Thumbs roll it back meanwhile, and then nothing is left of the questions."""
    async with watched(tmp_path, engine=slow_base()) as (made, _):
        await answers(made, *[MMM] * 6)
        await answers(made, *[AGAIN] * 6)
        await until(lambda: questions() == 1)
        await answers(made, *[MMM] * 6, label="other@1")  # not there, and looked at all the same
        assert not made.tools.live.window("other@1").broken
        await rate(made, "formal@2", *[False] * 8)
        await reached(made, 1)
        await until(lambda: questions() == 0)
        assert "0 of its first 8 ratings were thumbs up" in await told(made)
        await answers(made, *[MMM] * 6, label="formal@1")
        await until(lambda: questions() == 1)
    assert questions() == 0


class SlowToUnload(FakeEngine):
    """Answers that `formal` is unloaded only once `may_unload` is set."""

    def __init__(self) -> None:
        super().__init__(play=base_says(SOUND).play)
        self.may_unload = asyncio.Event()

    async def unload_adapter(self, name: str) -> None:
        """As the fake does, later."""
        await super().unload_adapter(name)
        if name == "formal":
            await self.may_unload.wait()


async def test_a_roll_back_that_is_committed_is_finished(tmp_path: Path) -> None:
    """Although a later answer finds that the version is watched no more."""
    engine = SlowToUnload()
    async with watched(tmp_path, versions=1, engine=engine) as (made, _):
        await answers(made, *[MMM] * 30, label="formal@1")
        await until(lambda: current(made) == 0)
        await answers(made, *[MMM] * 6, label="formal@1")
        engine.may_unload.set()
        await until(lambda: rolled_back(made) == 1.0)


async def test_a_clock_that_is_set_back_does_not_stop_the_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, ahead_s, said = time.time, [7200.0], [AGAIN]
    monkeypatch.setattr(time, "time", lambda: real() + ahead_s[0])
    engine = FakeEngine(
        play=lambda request, index: script(
            said[0] if request.request_id.startswith("watch") else SOUND
        )
    )
    async with watched(tmp_path, engine=engine) as (made, _):
        await answers(made, *[MMM] * 6)
        await until(
            lambda: any(each.request_id.startswith("watch") for each in made.engine.requests)
        )
        assert current(made) == 2
        ahead_s[0], said[0] = 0.0, SOUND
        await answers(made, *[MMM] * 12)
        await reached(made, 1)


async def test_what_the_base_model_answers_as_badly_is_no_reason(tmp_path: Path) -> None:
    async with watched(tmp_path, engine=base_says(AGAIN)) as (made, _):
        await answers(made, *[MMM] * 12)

        def asked_of_base() -> list[Request]:
            return [each for each in made.engine.requests if each.request_id.startswith("watch")]

        await until(lambda: len(asked_of_base()) >= 5)
        await asyncio.sleep(0.1)
        assert current(made) == 2 and rolled_back(made) == 0.0
        asked = asked_of_base()
        assert 5 <= len(asked) <= 10  # and not again for each further answer
        request = asked[0]
        assert request.adapter is None and request.work_class is WorkClass.OFFLINE
        assert request.prompt[:2] == (5, 6) and request.sampling.temperature == 0.7
        assert request.sampling.max_tokens == 40


async def test_what_the_base_model_cannot_answer_is_no_reason_and_hides_no_other(
    tmp_path: Path,
) -> None:
    failing = base_says(SOUND)
    play, left = failing.play, ["a prompt without an answer"]

    def plays(request: Request, index: int) -> Script:
        if request.request_id.startswith("watch") and left:
            return Script(finish=FinishReason.ERROR, error=left.pop())
        return play(request, index)

    failing.play = plays
    async with watched(tmp_path, engine=failing) as (made, _):
        await answers(made, *[MMM] * 12)
        await reached(made, 1)
        assert not left and "9 of its last 12 answers were broken" in await told(made)


async def test_what_a_person_publishes_again_stays(tmp_path: Path) -> None:
    async with watched(tmp_path) as (made, service):
        await answers(made, *[MMM] * 6)
        await reached(made, 1)
        await service.publish("formal", 2)
        assert await states(made, 2) == [SampleState.CONSUMED] * 4
        await answers(made, *[MMM] * 30)
        await rate(made, "formal@2", *[False] * 16)
        assert current(made) == 2
        await learn(made, 3)  # what is learned next is watched
        await answers(made, *[MMM] * 6, label="formal@3")
        await reached(made, 2)
        await answers(made, *[MMM] * 30)
        assert current(made) == 2


async def test_what_a_person_has_rolled_back_to_stays(tmp_path: Path) -> None:
    async with watched(tmp_path) as (made, service):
        await service.roll_back("formal", 1)
        await answers(made, *[MMM] * 30, label="formal@1")
        assert current(made) == 1


@pytest.mark.parametrize("gate", ["always", "manual"])
async def test_only_what_the_gate_alone_published_is_rolled_back(tmp_path: Path, gate: str) -> None:
    async with watched(tmp_path, gate) as (made, _):
        await answers(made, *[MMM] * 30)
        await rate(made, "formal@2", *[False] * 8)
        assert current(made) == 2 and rolled_back(made) == 0.0


async def test_an_old_version_and_an_unknown_one_are_left_alone(tmp_path: Path) -> None:
    async with watched(tmp_path) as (made, service):
        await answers(made, *[MMM] * 30, label="formal@1")
        await answers(made, *[MMM] * 30, label="nobody@7")
        assert current(made) == 2
        event = EventRecord("formal", 1.0, "warning", "late")
        assert await made.store.write(changes.roll_back_watched, "formal", 1, 0, event) is None
        assert (await service.find("formal")).record.current == 2
        assert await states(made, 1) == [SampleState.CONSUMED] * 4


async def test_one_after_the_other_down_to_the_base(tmp_path: Path) -> None:
    """Late answers of a version that is gone say nothing about the one that answers."""
    async with watched(tmp_path) as (made, _):
        await answers(made, *[MMM] * 30)
        await reached(made, 1)
        await answers(made, *[SOUND] * 5, label="formal@1")
        assert current(made) == 1 and rolled_back(made) == 1.0
        await answers(made, *[MMM] * 5, label="formal@1")
        await reached(made, 0)
        assert rolled_back(made) == 2.0
        assert "version 1 rolled back by itself to the base: " in await told(made)


async def test_an_error_ends_no_watch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with watched(tmp_path) as (made, _):
        made.engine.state = EngineState.DEAD
        await answers(made, *[MMM] * 5)
        await until(lambda: "cannot look at formal@2" in caplog.text)
        assert current(made) == 2
        made.engine.state = EngineState.READY
        await rate(made, "formal@2", *[False] * 8)
        await reached(made, 1)
