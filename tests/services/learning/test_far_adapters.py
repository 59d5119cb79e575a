"""Adapters that are further from the base than the gate allows: what their successors may be."""

from __future__ import annotations

from pathlib import Path

import pytest

from fake_scores import score_of
from learning_world import World, files_at, settled, state_of, world
from tandem.core.learning import IMPORTED, AdapterRecord, EventRecord, SampleState
from tandem.core.training import ScoreRequest, TrainerSpec
from tandem.core.version import AdapterVersion
from tandem.services.learning.loaded import keep_loaded
from tandem.services.versions import changes
from tandem.store import adapters


def load_by_hand(made: World, path: Path) -> None:
    content = files_at(path, "by hand")
    made.engine.adapters["formal"] = AdapterVersion("formal", 1, content, str(path))


def lossy(made: World, drops: list[float], answers: set[tuple[int, ...]]) -> None:
    """Under every adapter all but `answers`, which become likelier, lose the last of `drops`, in
    nats a token."""

    def score(request: ScoreRequest, under: str | None) -> float:
        usual = score_of(request.tokens, request.prompt_tokens, None)
        if under is None or request.tokens in answers:
            return usual if under is None else 0.9 * usual
        return usual - drops[-1] * (len(request.tokens) - request.prompt_tokens)

    made.engine.score_as = score


async def taught(made: World, answers: set[tuple[int, ...]]) -> set[SampleState]:
    """What becomes of four more pairs."""
    given = [made.sample() for _ in range(4)]
    encoded = [made.tools.encoder(made.tools.defaults).encode(each) for each in given]
    answers |= {each.prompt + each.chosen for each in encoded}
    await made.give(given)
    made.learner.notify("formal")
    await settled(made)
    return {await state_of(made, each) for each in given}


async def test_an_adapter_that_a_person_took_beyond_the_bounds_goes_on_learning(
    tmp_path: Path,
) -> None:
    """A refused version that was published lost 3 nats a token, twice what the gate allows.
    Feedback may take it half a nat further, over all versions together."""
    async with world(tmp_path) as made:
        drops, answers = [3.0], set[tuple[int, ...]]()
        lossy(made, drops, answers)
        assert await taught(made, answers) == {SampleState.REFUSED}
        refused = (await made.store.read(adapters.versions, "formal"))[-1]
        assert "(bound: 1.50)" in refused.reason
        event = EventRecord("formal", 0.0, "info", "published")
        version, _ = await made.store.write(changes.publish, "formal", refused.number, event)
        await made.tools.publisher.adopt(version)
        found = []
        for drop in (3.3, 3.4, 3.6):
            drops.append(drop)
            found.append(await taught(made, answers))
        assert found == [{SampleState.CONSUMED}, {SampleState.CONSUMED}, {SampleState.REFUSED}]
        later = (await made.store.read(adapters.versions, "formal"))[refused.number :]
        bounds = [each.metrics["quality_drop_bound"] for each in later]
        assert bounds == pytest.approx([3.5] * len(later), abs=0.01)
        assert "canary answers lost 3.60 nats a token (bound: 3.50)" in later[-1].reason


async def test_what_feedback_did_while_the_gate_was_off_loosens_nothing(tmp_path: Path) -> None:
    async with world(tmp_path) as made:
        drops, answers = [3.0], set[tuple[int, ...]]()
        lossy(made, drops, answers)
        await made.store.write(changes.create, AdapterRecord("formal", 0.0), {"gate": "always"})
        assert await taught(made, answers) == {SampleState.CONSUMED}
        await made.store.write(changes.create, AdapterRecord("formal", 0.0), {})
        assert await taught(made, answers) == {SampleState.REFUSED}


async def test_a_loaded_adapter_is_measured_when_it_learns_for_the_first_time(
    tmp_path: Path,
) -> None:
    """It is 3 nats a token from the base; its successor may be 3.3."""
    async with world(tmp_path) as made:
        drops, answers = [3.0], set[tuple[int, ...]]()
        lossy(made, drops, answers)
        load_by_hand(made, tmp_path / "loaded")
        assert await taught(made, answers) == {SampleState.CONSUMED}
        first, second = await made.store.read(adapters.versions, "formal")
        assert first.origin == IMPORTED
        assert first.metrics["canary_quality_drop"] == pytest.approx(3.0)
        assert second.metrics["quality_drop_bound"] == pytest.approx(3.5)


async def test_the_room_of_the_trust_region_is_what_the_bound_leaves(tmp_path: Path) -> None:
    async with world(tmp_path) as made:
        drops, answers = [3.0], set[tuple[int, ...]]()
        lossy(made, drops, answers)
        encoder = made.tools.encoder(made.tools.defaults)
        await made.engine.open_trainer(TrainerSpec("working"))
        examiner = made.tools.examiner
        assert await examiner.drift("working", "formal", encoder) == pytest.approx(2.0)
        load_by_hand(made, tmp_path / "loaded")
        await keep_loaded(made.tools, "formal")
        assert await examiner.drift("working", "formal", encoder) == pytest.approx(2 / 3)
