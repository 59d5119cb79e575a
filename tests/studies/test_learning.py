from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from benchmarks.learning.lessons import ByPriority, InOrder, PriorityOptions
from benchmarks.learning.runs import (
    POLICIES,
    LessonPlan,
    RunOptions,
    RunRecord,
    rule_for,
    run,
    score_prequentially,
    serving,
)
from benchmarks.learning.stream import EncodedPair, Load, LoadOptions, draw_load
from benchmarks.learning.teaching import ADAPTER, Published, TeachingOptions
from fake_engine import FakeEngine, Script
from fake_scores import score_of
from tandem.core.errors import InvalidRequest
from tandem.core.slo import Slo
from virtual_time import virtually

OPTIONS = RunOptions(
    Slo(1.0, 0.1),
    TeachingOptions(batch=2, micro_batch=1, steps_per_version=1),
    "unified",
    PriorityOptions(batch=2, threshold=0.01, most_uses=2),
)


def pairs(count: int) -> list[EncodedPair]:
    return [
        EncodedPair(f"pair {n}", "test", (n + 3, 5), (n + 4, 6, 2), (n + 3, 2))
        for n in range(count)
    ]


def small_load(count: int = 6) -> Load:
    return draw_load(pairs(count), LoadOptions(200.0, 0.1, count, 3, seed=1))


def test_equal_options_draw_equal_loads() -> None:
    load = draw_load(pairs(40), LoadOptions(10.0, 0.5, 30, 8, seed=3))
    assert load == draw_load(pairs(40), LoadOptions(10.0, 0.5, 30, 8, seed=3))
    assert load != draw_load(pairs(40), LoadOptions(10.0, 0.5, 30, 8, seed=4))
    assert [each.pair.key for each in load.feedback] == [f"pair {n}" for n in range(30)]
    assert load.seconds == load.feedback[-1].at_s
    assert all(ask.at_s <= load.seconds and ask.output_tokens == 8 for ask in load.asks)
    assert 30 < len(load.asks) < 90  # twice as many requests as preferences
    with pytest.raises(InvalidRequest, match="41 pairs"):
        draw_load(pairs(40), LoadOptions(pairs=41))


def test_rules_of_the_policies() -> None:
    rules = {policy: type(rule_for(policy, 8, PriorityOptions())) for policy in POLICIES}
    assert rules.pop("unified") is ByPriority
    assert set(rules.values()) == {InOrder}
    for plan, rule in ((LessonPlan.ONCE, InOrder), (LessonPlan.REPEAT, ByPriority)):
        assert {type(rule_for(name, 8, PriorityOptions(), plan)) for name in POLICIES} == {rule}


def test_version_that_served() -> None:
    versions = [Published(2.0, 1, "a", "p", 1), Published(5.0, 2, "b", "q", 2)]
    found = [serving(versions, at_s) for at_s in (1.9, 2.0, 4.9, 9.0)]
    assert found == [None, versions[0], versions[0], versions[1]]


def test_run_teaches_publishes_and_scores_what_served(tmp_path: Path) -> None:
    engine = FakeEngine(play=lambda request, index: Script(tokens=(10, 11, 12)), step_s=0.002)
    load = small_load()
    record = virtually(run(engine, load, OPTIONS, tmp_path / "versions"))
    assert [pair.key for pair in record.pairs] == [each.pair.key for each in load.feedback]
    assert all(outcome.error is None for outcome in record.outcomes)
    assert all(outcome.output_tokens == 3 for outcome in record.outcomes)
    assert len(record.outcomes) == len(load.asks)
    lessons = record.lessons
    assert lessons.versions and lessons.uses == 2 * len(engine.steps)
    assert lessons.training_tokens == sum(step.num_tokens for step in engine.steps)
    numbers = [version.number for version in lessons.versions]
    assert numbers == list(range(1, len(numbers) + 1))
    published = engine.steps[: lessons.versions[-1].updates]
    taught = {batch[0].tokens for step in published for batch in step.micro_batches}
    assert len(lessons.freshness_s) == len(taught) and min(lessons.freshness_s) > 0.0
    # Before its first step every pair was scored under the base model: the loss needs that.
    sequence = engine.steps[0].micro_batches[0][0]
    assert sequence.reference == score_of(sequence.tokens, sequence.prompt_tokens, None)
    for pair, feedback in zip(record.pairs, load.feedback, strict=True):
        version = serving(lessons.versions, feedback.at_s)
        assert pair.version == (0 if version is None else version.number)
        label = None if version is None else f"~measured@{version.number}"
        tokens = feedback.pair.prompt + feedback.pair.chosen
        assert pair.chosen == score_of(tokens, len(feedback.pair.prompt), label)
    assert engine.closed == [ADAPTER] and "~measured" not in engine.adapters
    assert msgspec.json.decode(msgspec.json.encode(record), type=RunRecord) == record


def test_without_retraining_nothing_is_trained(tmp_path: Path) -> None:
    engine = FakeEngine()
    record = virtually(
        run(engine, small_load(), replace(OPTIONS, policy="no_retrain"), tmp_path / "v")
    )
    assert not engine.steps and not engine.published
    assert {pair.version for pair in record.pairs} == {0}


def test_failure_of_the_learner_ends_the_run(tmp_path: Path) -> None:
    def refuse(step: object) -> str | None:
        raise InvalidRequest("too long")

    engine = FakeEngine(judge=refuse)
    with pytest.raises(InvalidRequest, match="too long"):
        virtually(run(engine, small_load(20), OPTIONS, tmp_path / "versions"))


def test_unapplied_steps_are_counted_and_not_repeated(tmp_path: Path) -> None:
    engine = FakeEngine(judge=lambda step: "not finite")
    record = virtually(run(engine, small_load(), OPTIONS, tmp_path / "versions"))
    assert 1 <= record.lessons.not_applied <= 3 and not record.lessons.versions


async def test_pairs_are_scored_under_versions_from_disk(tmp_path: Path) -> None:
    engine = FakeEngine()
    load = small_load(2)
    versions = [Published(0.0, 1, "hash", str(tmp_path), 1)]
    first, _ = await score_prequentially(engine, load.feedback, versions)
    assert first.version == 1
    assert engine.published[0].content_hash == "hash" and engine.published[0].path == str(tmp_path)
