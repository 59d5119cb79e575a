"""Freshness: every sample once, at the first answer of a version that it is in."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from test_service_versions import learned, versions_over

from learning_world import World
from tandem.core.learning import VersionRecord, VersionState
from tandem.services.learning.freshness import Freshness
from tandem.telemetry.learning import LearningMetrics


def version(number: int, parent: int) -> VersionRecord:
    return VersionRecord("formal", number, "", "", 0.0, VersionState.PUBLISHED, parent)


def observed(metrics: LearningMetrics) -> tuple[int, float]:
    """How many samples of "formal", and the sum of their seconds."""
    values = {
        sample.name.rsplit("_", 1)[-1]: sample.value
        for family in metrics.freshness.collect()
        for sample in family.samples
    }
    return int(values.get("count", 0)), values.get("sum", 0.0)


def test_what_nobody_asked_for_is_seen_in_the_version_after_it() -> None:
    metrics, now = LearningMetrics(CollectorRegistry()), 100.0
    freshness = Freshness(metrics, lambda: now)
    freshness.published(version(1, 0), [90.0, 95.0])
    freshness.published(version(2, 1), [98.0])
    freshness.answered("formal@2")
    assert observed(metrics) == (3, 10.0 + 5.0 + 2.0)
    for label in ("formal@2", "formal@1", "formal@3"):
        freshness.answered(label)
    assert observed(metrics)[0] == 3


@pytest.mark.parametrize("first", ["formal@2", "formal@3"])
def test_a_version_without_feedback_of_its_own_has_that_of_its_parents(first: str) -> None:
    """As one that a fine-tuning job makes."""
    metrics = LearningMetrics(CollectorRegistry())
    freshness = Freshness(metrics, lambda: 100.0)
    freshness.published(version(1, 0), [90.0])
    freshness.published(version(2, 1), [])
    freshness.published(version(3, 2), [97.0])
    freshness.answered(first)
    assert observed(metrics) == ((1, 10.0) if first == "formal@2" else (2, 13.0))
    freshness.answered("formal@3")
    assert observed(metrics) == (2, 13.0)


def test_what_was_rolled_back_is_not_in_the_version_after_it() -> None:
    metrics = LearningMetrics(CollectorRegistry())
    freshness = Freshness(metrics, lambda: 100.0)
    freshness.published(version(1, 0), [90.0])
    freshness.published(version(2, 0), [97.0])
    freshness.answered("formal@2")
    assert observed(metrics) == (1, 3.0)
    freshness.answered("formal@1")  # and back again
    assert observed(metrics) == (2, 13.0)


@given(
    parents=st.lists(st.integers(0, 9), min_size=1, max_size=10),
    script=st.lists(st.integers(0, 10), max_size=30),
)
def test_each_sample_is_observed_once_in_whatever_contains_it(parents, script) -> None:
    """Version k has 2**k samples, so that the count tells which were seen. 0 publishes the next
    version, other numbers answer."""
    metrics = LearningMetrics(CollectorRegistry())
    freshness = Freshness(metrics, lambda: 0.0)
    ancestors: dict[int, set[int]] = {0: set()}
    seen: set[int] = set()
    for asked in script:
        number = len(ancestors)
        if asked == 0 and number <= len(parents):
            parent = parents[number - 1] % number
            ancestors[number] = ancestors[parent] | {number}
            freshness.published(version(number, parent), [0.0] * 2**number)
        else:
            freshness.answered(f"formal@{asked}")
            seen |= ancestors.get(asked, set())
        assert observed(metrics)[0] == sum(2**each for each in seen)


def answer(made: World, label: str) -> int:
    """An answer by a version; how many samples were observed by then."""
    made.tools.freshness.answered(label)
    return observed(made.tools.metrics)[0]


async def test_a_candidate_that_is_approved_by_hand_counts(tmp_path: Path) -> None:
    async with versions_over(tmp_path) as (made, versions):
        await learned(made, 1, "manual")
        assert answer(made, "formal@1") == 0  # not published yet
        await versions.publish("formal", 1)
        assert answer(made, "formal@1") == 4
        await versions.publish("formal", 1)  # pinned
        assert answer(made, "formal@1") == 4


async def test_a_refusal_that_is_overruled_counts_its_own_samples_only(tmp_path: Path) -> None:
    async with versions_over(tmp_path) as (made, versions):
        await learned(made, 1)
        assert answer(made, "formal@1") == 4
        await versions.create("formal", {"gate": "manual"})
        await learned(made, 2)  # which replays some of version 1's
        await versions.refuse("formal", 2)
        await versions.publish("formal", 2)
        assert answer(made, "formal@2") == 8
