"""When the thumbs of a version take it back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_watch import current, learn, rate, reached, rolled_back, told, watched

from tandem.core.learning import (
    Feedback,
    FeedbackKind,
    VersionRecord,
    VersionState,
)
from tandem.services.learning.settings import LearningSettings
from tandem.services.learning.watch import LOOKS, fallen
from tandem.store import adapters, feedback
from tandem.store.feedback import Thumb


async def test_a_version_whose_thumbs_fall_is_rolled_back(tmp_path: Path) -> None:
    async with watched(tmp_path) as (made, _):
        await rate(made, "formal@1", *[True] * 9, False)
        await rate(made, "formal@2", True, True, *[False] * 5)
        assert current(made) == 2  # seven say too little
        await rate(made, "formal@2", False)
        await reached(made, 1)
        assert (await told(made)).startswith(
            "version 2 rolled back by itself to 1: 2 of its first 8 ratings were thumbs up, of "
            "version 1's 9 of 10. "
        )


async def test_thumbs_as_before_are_no_reason(tmp_path: Path) -> None:
    async with watched(tmp_path) as (made, _):
        await rate(made, "formal@1", True, *[False] * 9)
        await rate(made, "formal@2", True, *[False] * 7)
        assert current(made) == 2


@pytest.mark.parametrize(
    "other",
    [{"signal": "skip"}, {"chosen": "x", "completion_id": "same"}, {"kind": FeedbackKind.COMMENT}],
    ids=str,
)
async def test_only_explicit_ratings_count_once_an_answer(
    tmp_path: Path, other: dict[str, Any]
) -> None:
    async with watched(tmp_path) as (made, _):
        for _ in range(8):
            said = replace(
                Feedback(f"f{next(made.numbers)}", 1.0, "formal", FeedbackKind.RATING, rating=0.0),
                version="formal@2",
                **{"completion_id": f"c{next(made.numbers)}", **other},
            )
            await made.store.write(feedback.add, said, [])
        await rate(made, "formal@2", False)
        assert (current(made) == 2) and rolled_back(made) == 0.0


@pytest.mark.parametrize(
    ("key_share", "others", "falls"),
    [(1.0, 0, True), (0.5, 0, False), (0.5, 3, False), (0.5, 4, True), (0.75, 2, True)],
)
def test_one_key_alone_takes_no_version_back(key_share: float, others: int, falls: bool) -> None:
    """As far as it may not teach one alone."""
    version = VersionRecord("formal", 2, "", "", 0.0, VersionState.PUBLISHED, parent=1)
    thumbs = [Thumb(False, "one")] * 20 + [Thumb(number < 1, "two") for number in range(others)]
    why = fallen(version, {"formal@2": thumbs}, key_share)
    assert (why is not None) == falls


def test_one_key_alone_makes_no_parent_look_better() -> None:
    version = VersionRecord("formal", 2, "", "", 0.0, VersionState.PUBLISHED, parent=1)
    new = [Thumb(number < 4, f"key {number}") for number in range(8)]
    old = [Thumb(True, "one")] * 20 + [Thumb(False, "two")]
    found = {"formal@2": new, "formal@1": old}
    assert fallen(version, found) is not None and fallen(version, found, 0.5) is None


async def test_a_thumb_that_was_taken_back_does_not_count(tmp_path: Path) -> None:
    async with watched(tmp_path) as (made, _):
        for rating in (0.0, 0.5):
            for number in range(8):
                said = replace(
                    Feedback(f"f{number}-{rating}", 1.0, "formal", FeedbackKind.RATING),
                    rating=rating,
                    version="formal@2",
                    completion_id=f"c{number}",
                )
                await made.store.write(feedback.add, said, [])
        await rate(made, "formal@2", False)
        assert current(made) == 2


async def test_what_a_roll_back_has_left_is_not_replayed(tmp_path: Path) -> None:
    """Half of each step is replay, and what version 2 learned first was used least."""
    settings = LearningSettings(
        batch_samples=4, steps_per_version=2, replay=0.5, epochs=1, version_wait_s=0.0
    )
    async with watched(tmp_path, settings=settings) as (made, service):
        gone = set(await made.store.read(adapters.trained_on, "formal", 2))
        first = set(await made.store.read(adapters.trained_on, "formal", 1))
        await service.roll_back("formal", 1)
        await learn(made, 3)
        third = set(await made.store.read(adapters.trained_on, "formal", 3))
        assert third & first and not third & (gone - first)


async def test_a_restart_forgets_no_thumbs(tmp_path: Path) -> None:
    async with watched(tmp_path) as (made, _):
        await rate(made, "formal@2", *[False] * 7)
        assert current(made) == 2
    async with watched(tmp_path, versions=0) as (made, _):
        made.numbers = iter(range(1000, 2000))  # type: ignore[assignment]
        assert current(made) == 2
        await rate(made, "formal@2", False)
        await reached(made, 1)


def test_the_tests_of_thumbs_are_the_books() -> None:
    version = VersionRecord("formal", 2, "", "", 0.0, VersionState.PUBLISHED, parent=1)

    def why(ups: int, of: int, ups_before: int = 0, before: int = 0, parent: int = 1) -> str | None:
        new = [Thumb(place < ups) for place in range(of)]
        old = [Thumb(place < ups_before) for place in range(before)]
        label = f"formal@{parent}" if parent else "base"
        return fallen(replace(version, parent=parent), {"formal@2": new, label: old})

    # P(at most 1 of 8) is 9/256 = 0.035, P(at most 2 of 8) is 0.145.
    assert why(1, 8) == "1 of its first 8 ratings were thumbs up" and why(2, 8) is None
    assert why(0, 7) is None and why(1, 8, 7, 7) is not None  # seven of before: as if unknown
    # Fisher, one-sided: [[3, 5], [15, 5]] gives 0.091, [[2, 6], [15, 5]] 0.022.
    assert why(3, 8, 15, 20) is None and why(2, 8, 15, 20) is not None
    assert "of the base model's 15 of 20" in (why(2, 8, 15, 20, parent=0) or "")
    # Only the first 8, 16, 32 ... are looked at: 8 up, then 7 down are not yet 16.
    assert why(8, 15) is None
    assert why(90, 256, 100, 200) is not None and LOOKS[-1] == 256
    assert why(0, 256, 2000, 2000) is not None
