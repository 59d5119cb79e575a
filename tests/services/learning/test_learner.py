"""Learning from samples to published versions, over the scripted engine and a real store."""

from __future__ import annotations

import asyncio
import math
import time
from pathlib import Path

import pytest

from fake_engine import FakeEngine
from fake_scores import score_of
from learning_world import settled, state_of, world
from patience import PATIENCE_S, until
from tandem.core.learning import SampleKind, SampleState, VersionState
from tandem.core.training import LossKind, Role, ScoreRequest, TrainingStep
from tandem.services.learning.settings import LearningSettings
from tandem.store import adapters, events, feedback, samples
from tandem.store.feedback import Filter


async def test_samples_become_a_published_version(tmp_path: Path) -> None:
    async with world(tmp_path) as made:
        given = [made.sample() for _ in range(8)]
        await made.give([*given, *made.held_out(3)])
        made.learner.notify("formal")
        await settled(made)
        version = made.engine.adapters["formal"]
        record = await made.store.read(adapters.version, "formal", version.number)
        assert record is not None and record.state is VersionState.PUBLISHED
        assert Path(record.path) == tmp_path / "adapters" / "formal" / "1"
        assert Path(record.path).is_dir()
        assert record.metrics["held_out_pairs"] == 3 and record.metrics["steps"] == 2
        assert {"win_rate", "clpd", "canary_quality_drop", "loss"} <= set(record.metrics)
        assert [name for name in made.engine.adapters if name.startswith("~")] == []
        [event] = await made.store.read(events.listed, "formal")
        assert event.message == "version 1 published" and event.data["samples"] == 8
        row = (await made.store.read(samples.get, [given[0].sample_id]))[0]
        assert row.state is SampleState.CONSUMED and row.version == 1 and row.uses == 1


async def test_a_clock_that_is_set_back_shortens_no_version(tmp_path: Path) -> None:
    engine, started_s = FakeEngine(), time.time()
    async with world(
        tmp_path, engine=engine, now=lambda: started_s - 3600.0 * len(engine.steps)
    ) as made:
        await made.give([made.sample() for _ in range(4)])
        made.learner.notify("formal")
        await settled(made)
        took_s = made.learner.took_s("formal")
        assert took_s is not None and took_s >= 0.0


async def test_steps_are_pairs_with_references_of_the_base(tmp_path: Path) -> None:
    async with world(tmp_path) as made:
        await made.give([made.sample() for _ in range(3)])
        made.learner.notify("formal")
        await settled(made)
        [step] = made.engine.steps
        assert step.loss.kind is LossKind.DPO
        sequences = [sequence for batch in step.micro_batches for sequence in batch]
        assert [s.role for s in sequences] == [Role.CHOSEN, Role.REJECTED] * 3
        for sequence in sequences:
            expected = score_of(sequence.tokens, sequence.prompt_tokens, None)
            assert sequence.reference == expected
            assert sequence.tokens[-1] == made.engine.info.eos_token_ids[0]


async def test_what_was_learned_is_replayed(tmp_path: Path) -> None:
    async with world(tmp_path) as made:
        await made.give([made.sample() for _ in range(6)])
        made.learner.notify("formal")
        await settled(made)
        await made.give([made.sample() for _ in range(3)])
        made.learner.notify("formal")
        await settled(made)
        assert made.engine.adapters["formal"].number == 2
        pairs = [sum(len(batch) for batch in step.micro_batches) // 2 for step in made.engine.steps]
        assert pairs[-1] == 4  # three new ones and one of version 1
        second = await made.store.read(adapters.version, "formal", 2)
        assert second is not None and second.parent == 1 and second.metrics["samples"] == 3


async def test_what_can_no_longer_be_replayed_is_left_out_without_a_word(tmp_path: Path) -> None:
    """As after `max_sample_tokens` was lowered: it is learned, and the next version is not told."""
    async with world(tmp_path) as made:
        many = " ".join(map(str, range(60)))
        long = [made.sample(chosen=f"Certainly. It is {n}. {many}") for n in range(4)]
        await made.give(long)
        made.learner.notify("formal")
        await settled(made)
        await made.store.write(adapters.set_settings, "formal", {"max_sample_tokens": 64})
        await made.give([made.sample() for _ in range(3)])
        made.learner.notify("formal")
        await settled(made)
        assert made.engine.adapters["formal"].number == 2
        pairs = [sum(len(batch) for batch in step.micro_batches) // 2 for step in made.engine.steps]
        assert pairs[-1] == 3
        assert {await state_of(made, sample) for sample in long} == {SampleState.CONSUMED}
        told = [
            event.message for event in await made.store.read(events.listed, "formal", limit=100)
        ]
        assert not any("cannot be trained on" in message for message in told)


async def test_a_refused_candidate_is_tried_more_gently_and_does_not_loop(tmp_path: Path) -> None:
    def collapse(request: ScoreRequest, under: str | None) -> float:
        usual = score_of(request.tokens, request.prompt_tokens, None)
        return usual * 5 if under and "candidate" in under else usual

    large = LearningSettings(batch_samples=4, steps_per_version=4, epochs=1, version_wait_s=0.0)
    async with world(tmp_path, engine=FakeEngine(score_as=collapse), settings=large) as made:
        given = [made.sample() for _ in range(4)]
        await made.give(given)
        made.learner.notify("formal")
        await settled(made)
        assert {await state_of(made, sample) for sample in given} == {SampleState.REFUSED}
        assert "formal" not in made.engine.adapters
        assert not [name for name in made.engine.adapters if name.startswith("~")]
        record = await made.store.read(adapters.version, "formal", 1)
        assert record is not None and record.state is VersionState.REFUSED
        assert "canary answers lost" in record.reason
        told = await made.store.read(events.listed, "formal")
        assert {event.level for event in told} == {"warning"}
        messages = sorted((event.number, event.message) for event in told)
        assert "1/2 of the learning rate, from the base on (2 more tries)" in messages[0][1]
        assert "1/4 of the learning rate, from the base on (1 more try); nothing" in messages[1][1]
        assert "tandem adapters publish formal 3" in messages[2][1]
        rates = [spec.optimizer.learning_rate for spec in made.engine.opened]
        assert rates == [1e-3, 5e-4, 2.5e-4]
        refused = made.registry.get_sample_value(
            "tandem_learning_versions_total", {"adapter": "formal", "outcome": "refused"}
        )
        assert refused == 3.0
        before = len(made.engine.steps)
        made.learner.notify("formal")
        await asyncio.sleep(0.2)
        assert len(made.engine.steps) == before
        # The next feedback starts from the base again, not from the refused parameters.
        await made.give([made.sample() for _ in range(4)])
        made.learner.notify("formal")
        await settled(made)
        await until(lambda: made.engine.closed.count("learn/formal") >= 2)


async def test_samples_that_break_a_step_are_isolated(tmp_path: Path) -> None:
    poison: set[tuple[int, ...]] = set()

    def judge(step: TrainingStep) -> str | None:
        tokens = {s.tokens for batch in step.micro_batches for s in batch}
        return "the loss is not finite" if tokens & poison else None

    async with world(tmp_path, engine=FakeEngine(judge=judge)) as made:
        bad = made.sample(chosen="poison")
        encoder = made.tools.encoder(made.tools.defaults)
        encoded = encoder.encode(bad)
        poison.add(encoded.prompt + encoded.chosen)
        good = [made.sample() for _ in range(3)]
        await made.give([bad, *good])
        made.learner.notify("formal")
        await settled(made)
        assert await state_of(made, bad) is SampleState.INVALID
        assert {await state_of(made, sample) for sample in good} == {SampleState.CONSUMED}
        row = (await made.store.read(samples.get, [bad.sample_id]))[0]
        assert row.problem == "the loss is not finite"


async def test_answers_that_repeat_themselves_are_not_imitated(tmp_path: Path) -> None:
    """The gate would read their beginnings, and refuse the others with them."""
    sound = "The capital of France is Paris, and it lies on the river Seine in the north. "
    again = "And that is all there is to say of it today. " * 6
    async with world(tmp_path) as made:
        bad = [
            made.sample(chosen=sound * 3 + again),
            made.sample(SampleKind.SFT, chosen=again),
            made.sample(SampleKind.KTO, chosen=again),
        ]
        fine = [
            made.sample(chosen=sound, rejected=again),
            made.sample(SampleKind.KTO, chosen=again, desirable=False),
            made.sample(SampleKind.KTO, chosen="no no no no no no"),
        ]
        await made.give([*bad, *fine])
        made.learner.notify("formal")
        await settled(made)
        assert {await state_of(made, each) for each in fine} == {SampleState.CONSUMED}
        for row in await made.store.read(samples.get, [each.sample_id for each in bad]):
            assert row.state is SampleState.INVALID and "repeats itself" in row.problem


@pytest.mark.parametrize(
    ("count", "noise", "gate", "invalid"),
    [(8, 5, "auto", 5), (8, 4, "auto", 0), (7, 7, "auto", 0), (8, 5, "always", 0)],
)
async def test_answers_that_read_like_noise_are_not_trained_on_where_they_are_most(
    tmp_path: Path, count: int, noise: int, gate: str, invalid: int
) -> None:
    """The gate would refuse what is learned from them, so nothing is. A few decide nothing."""
    strange: set[tuple[int, ...]] = set()

    def score_as(request: ScoreRequest, under: str | None) -> float:
        tokens, first = request.tokens, request.prompt_tokens
        lost = 6.0 * (len(tokens) - first) if tokens[first:] in strange else 0.0
        return score_of(tokens, first, under) - lost

    trained = set[tuple[int, ...]]()

    def judge(step: TrainingStep) -> None:
        trained.update(s.tokens[s.prompt_tokens :] for batch in step.micro_batches for s in batch)

    engine = FakeEngine(score_as=score_as, judge=judge)
    async with world(tmp_path, engine=engine) as made:
        given = [made.sample() for _ in range(count)]
        encoder = made.tools.encoder(made.tools.defaults)
        strange.update(encoder.encode(each).chosen for each in given[:noise])
        await made.give(given, {"gate": gate})
        made.learner.notify("formal")
        await settled(made)
        rows = await made.store.read(samples.get, [each.sample_id for each in given])
        found = [row for row in rows if row.state is SampleState.INVALID]
        assert {row.sample_id for row in found} == {s.sample_id for s in given[:invalid]}
        assert all("reads like noise" in row.problem for row in found)
        assert bool(strange & trained) == (not invalid)
        assert not any(row.state is SampleState.ACCEPTED for row in rows)


async def test_the_gauge_of_samples_falls_with_the_last_one(tmp_path: Path) -> None:
    async with world(tmp_path) as made:

        def shown() -> float | None:
            labels = {"adapter": "formal", "split": "train", "state": "consumed"}
            return made.registry.get_sample_value("tandem_learning_samples", labels)

        await made.give([made.sample() for _ in range(4)])
        made.learner.notify("formal")
        await settled(made)
        await made.learner.count()
        assert shown() == 4
        await made.store.write(feedback.erase, Filter(adapter="formal"))
        await made.learner.count()
        assert shown() == 0


async def test_unusable_samples_are_invalid_at_once(tmp_path: Path) -> None:
    async with world(tmp_path) as made:
        same = made.sample(chosen="yes", rejected="yes")
        empty = made.sample(chosen="  ")
        long = made.sample(chosen="word " * 400)
        await made.give([same, empty, long])
        made.learner.notify("formal")
        await settled(made)
        rows = await made.store.read(samples.get, [s.sample_id for s in (same, empty, long)])
        assert [row.state for row in rows] == [SampleState.INVALID] * 3
        assert "the same" in rows[0].problem and "empty" in rows[1].problem
        assert "tokens are more than" in rows[2].problem
        assert made.engine.steps == [] and "formal" not in made.engine.adapters


async def test_unscorable_references_do_not_stop_the_others(tmp_path: Path) -> None:
    async with world(tmp_path) as made:
        bad = made.sample(chosen="poison")
        tokens = made.tools.encoder(made.tools.defaults).encode(bad)

        def score(request: ScoreRequest, under: str | None) -> float:
            if request.tokens == tokens.prompt + tokens.chosen:
                return math.nan
            return score_of(request.tokens, request.prompt_tokens, None)

        made.engine.score_as = score
        good = made.sample()
        await made.give([bad, good])
        made.learner.notify("formal")
        await settled(made)
        assert await state_of(made, bad) is SampleState.INVALID
        assert await state_of(made, good) is SampleState.CONSUMED


async def test_each_kind_of_sample_has_its_own_steps(tmp_path: Path) -> None:
    async with world(tmp_path) as made:
        await made.give(
            [
                made.sample(SampleKind.SFT),
                made.sample(SampleKind.KTO),
                made.sample(SampleKind.KTO, desirable=False),
                made.sample(),
            ]
        )
        made.learner.notify("formal")
        await settled(made)
        kinds = {step.loss.kind: step for step in made.engine.steps}
        assert set(kinds) == set(LossKind)
        [batch] = kinds[LossKind.KTO].micro_batches
        assert [s.role for s in batch].count(Role.MISMATCHED) == 2


@pytest.mark.parametrize(("gained", "versions"), [(0.1, 2), (0.9, 1)])
async def test_demonstrations_are_known_once_most_is_gained(
    tmp_path: Path, gained: float, versions: int
) -> None:
    """What one more step of training would lower is no sign that it was learned."""

    def score(request: ScoreRequest, under: str | None) -> float:
        base = score_of(request.tokens, request.prompt_tokens, None)
        return base * (1.0 - gained) if under and under.startswith("working/") else base

    async with world(tmp_path) as made:
        for _ in range(2):
            shown = [made.sample(SampleKind.SFT) for _ in range(4)]
            await made.give(shown)
            made.learner.notify("formal")
            await settled(made)
            made.engine.score_as = score
        assert [await state_of(made, each) for each in shown] == [SampleState.CONSUMED] * 4
        assert len(await made.store.read(adapters.versions, "formal")) == versions


async def test_a_manual_gate_waits_and_learns_nothing_more(tmp_path: Path) -> None:
    async with world(tmp_path) as made:
        given = [made.sample() for _ in range(4)]
        await made.give(given, {"gate": "manual"})
        made.learner.notify("formal")

        async def waiting() -> bool:
            version = await made.store.read(adapters.version, "formal", 1)
            return version is not None and version.state is VersionState.CANDIDATE

        async with asyncio.timeout(PATIENCE_S):
            while not await waiting():
                await asyncio.sleep(0.02)
        assert "formal" not in made.engine.adapters
        steps = len(made.engine.steps)
        await made.give([made.sample() for _ in range(4)])
        made.learner.notify("formal")
        await asyncio.sleep(0.3)
        assert len(made.engine.steps) == steps
        assert await state_of(made, given[0]) is SampleState.ASSIGNED


@pytest.mark.parametrize("gate", ["auto", "always"])
async def test_a_candidate_without_finite_output_is_refused_once(tmp_path: Path, gate: str) -> None:
    def broken(request: ScoreRequest, under: str | None) -> float:
        return math.nan if under else score_of(request.tokens, request.prompt_tokens, None)

    async with world(tmp_path, engine=FakeEngine(score_as=broken)) as made:
        given = [made.sample() for _ in range(4)]
        await made.give(given, {"gate": gate})
        made.learner.notify("formal")
        await settled(made)
        assert {await state_of(made, sample) for sample in given} == {SampleState.REFUSED}
        record = await made.store.read(adapters.version, "formal", 1)
        assert record is not None and record.state is VersionState.REFUSED
        assert record.reason == "the model's output is not finite"
        assert "formal" not in made.engine.adapters
