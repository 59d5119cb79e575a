"""Who changes their mind about an answer: the later feedback counts, the earlier is withdrawn."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from feedback_client import ABOUT, UNPUBLISHED, complete, play, send, served

from fake_engine import FakeEngine
from serving import make_app


@pytest.fixture
def http() -> Iterator[httpx.Client]:
    with served(make_app(FakeEngine(play=play), learning=UNPUBLISHED)) as http:
        yield http


def look(http: httpx.Client, feedback: Any) -> Any:
    return http.get(f"/feedback/{feedback['id']}").json()


def counts(http: httpx.Client, *feedback: Any) -> list[bool]:
    """Whether each still counts."""
    found = [look(http, one) for one in feedback]
    for one in found:
        withdrawn = one["superseded_by"] is not None
        for sample in one["samples"]:
            problem = f"superseded by {one['superseded_by']}" if withdrawn else None
            assert (sample["state"] == "invalid", sample["problem"]) == (withdrawn, problem)
    return [one["superseded_by"] is None for one in found]


@pytest.mark.parametrize("by_id", [True, False])
def test_a_thumb_up_and_then_down(http: httpx.Client, by_id: bool) -> None:
    about: dict[str, Any] = {**ABOUT, "completion": "Fine."}
    if by_id:
        about = {"completion_id": complete(http)["id"], "adapter": "formal"}
    up = send(http, **about, rating=True)
    down = send(http, **about, rating=False)
    assert counts(http, up, down) == [False, True]
    assert look(http, up)["superseded_by"] == down["id"]
    neither = send(http, **about, rating=0.5)  # it says nothing, and nothing of it is learned
    assert neither["samples"] == [] and counts(http, down, neither) == [False, True]
    again = send(http, **about, rating=True)
    assert counts(http, up, down, neither, again) == [False, False, False, True]


def test_a_repeated_request_supersedes_nothing(http: httpx.Client) -> None:
    about = {**ABOUT, "completion": "Fine."}
    up = send(http, **about, rating=True, feedback_id="up")
    down = send(http, **about, rating=False)
    assert send(http, **about, rating=True, feedback_id="up")["superseded_by"] == down["id"]
    assert counts(http, up, down) == [False, True]


@pytest.mark.parametrize(
    "other",
    [
        {"user": "ann"},
        {"conversation": "another"},
        {"completion": "Well."},
        {"adapter": "casual"},
        {"messages": [{"role": "user", "content": "And you?"}]},
        {"rating": None, "signal": {"type": "skip"}},
        {"rating": None, "comment": "no"},
        {"rating": None, "demonstration": "Very well."},
    ],
)
def test_what_is_about_something_else_or_by_somebody_else_counts_beside(
    http: httpx.Client, other: dict[str, Any]
) -> None:
    about = {**ABOUT, "completion": "Fine.", "rating": False}
    first, second = send(http, **about), send(http, **{**about, **other})
    assert counts(http, first, second) == [True, True]


def test_choices_and_completions_are_told_apart(http: httpx.Client) -> None:
    two, one = complete(http, n=2)["id"], complete(http)["id"]
    about = {"adapter": "formal", "rating": True}
    sent = [
        send(http, **about, completion_id=two, choice=0),
        send(http, **about, completion_id=two, choice=1),
        send(http, **about, completion_id=one),
    ]
    assert counts(http, *sent) == [True, True, True]
    send(http, **{**about, "rating": False}, completion_id=two, choice=1)
    assert counts(http, *sent) == [True, False, True]


@pytest.mark.parametrize("by_id", [True, False])
def test_implicit_signals_supersede_their_own_type(http: httpx.Client, by_id: bool) -> None:
    about: dict[str, Any] = {**ABOUT, "completion": "Fine."}
    if by_id:
        about = {"completion_id": complete(http)["id"], "adapter": "formal"}
    up = send(http, **about, rating=True)
    for first, second in (
        ({"type": "dwell_time", "seconds": 0.01}, {"type": "dwell_time", "seconds": 60.0}),
        ({"type": "edit", "text": "Very well."}, {"type": "edit", "text": "Quite well."}),
        ({"type": "edit", "text": "Well."}, {"type": "edit", "text": "Fine."}),  # the same or not
        ({"type": "regenerate", "text": "Well."}, {"type": "regenerate"}),
    ):
        before, after = send(http, **about, signal=first), send(http, **about, signal=second)
        assert counts(http, up, before, after) == [True, False, True]


@pytest.mark.parametrize(
    "said",
    [
        {"preference": {"chosen": "Very well.", "rejected": "Fine, thank you."}},
        {"demonstration": "Very well."},
    ],
)
def test_what_is_said_twice_of_a_completion_counts_once(
    http: httpx.Client, said: dict[str, Any]
) -> None:
    about = {"completion_id": complete(http)["id"], "adapter": "formal"}
    first, second = send(http, **about, **said), send(http, **about, **said)
    assert counts(http, first, second) == [False, True]
    other = {name: str(value).replace("Very", "Quite") for name, value in said.items()}
    if "preference" in said:
        other = {"preference": {"chosen": "Quite well.", "rejected": "Fine, thank you."}}
    assert counts(http, second, send(http, **about, **other)) == [True, True]
    pair = {**ABOUT, "completion": "Fine.", **said}
    assert counts(http, send(http, **pair), send(http, **pair)) == [True, True]
