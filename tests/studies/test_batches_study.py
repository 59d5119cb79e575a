"""The study of batches finds what is missing, twice, or answered though it is to be refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from benchmarks.batches.__main__ import REFUSED, TOKENS, lines_of, wrong


def batch(status: str, lines: int, errors: dict[str, int]) -> dict[str, Any]:
    return {
        "status": status,
        "lines": lines,
        "output": lines - sum(errors.values()),
        "errors": errors,
        "missing": 0,
        "twice": 0,
        "answered though refused": 0,
        "counts agree": True,
    }


RIGHT = {
    "batch": batch("completed", 100, {"400": 2}),
    "beside": [
        batch("expired", 200, {"batch_expired": 150, "400": 2}),
        batch("cancelled", 200, {"batch_cancelled": 90, "400": 4}),
    ],
    "different": 0,
}


def test_one_line_of_fifty_is_to_be_refused():
    lines = lines_of(2 * REFUSED, "demo", 0)
    assert sum(line["body"]["max_tokens"] > TOKENS for line in lines) == 2
    assert len({line["custom_id"] for line in lines}) == 2 * REFUSED


def test_nothing_is_wrong_if_all_is_accounted_for():
    assert wrong(RIGHT) == []


@pytest.mark.parametrize(
    ("place", "change"),
    [
        ("batch", {"missing": 1}),
        ("batch", {"twice": 1}),
        ("batch", {"status": "failed"}),
        ("batch", {"errors": {"400": 1}}),
        ("batch", {"errors": {"400": 2, "500": 1}}),
        ("beside", {"counts agree": False}),
        ("beside", {"answered though refused": 1}),
        ("beside", {"status": "completed"}),
    ],
)
def test_each_fault_is_found(place: str, change: dict[str, Any]):
    found = copy.deepcopy(RIGHT)
    (found[place] if place == "batch" else found[place][1]).update(change)
    assert len(wrong(found)) == 1


def test_a_different_answer_is_found():
    assert wrong({**RIGHT, "different": 3}) == ["3 answers differ"]
