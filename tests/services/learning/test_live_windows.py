"""Which live answers of a version are counted, and when so many are broken that it is looked at."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from test_watch import SOUND, written

from tandem.core.learning import Feedback, FeedbackKind
from tandem.services.learning.live import LiveAnswers


@pytest.mark.parametrize(
    "oddity",
    [
        {"sampling": {"temperature": 1.5}},
        {"sampling": {"logit_bias": {7: 100.0}}},
        {"sampling": {"ignore_eos": True}},
        {"sampling": {"min_tokens": 30}},
        {"tokens": 8},
        {"label": None},
        {"label": "~checkpoint-of/formal/x@2"},
        {"text": SOUND},
    ],
    ids=str,
)
async def test_what_clients_ask_for_does_not_count(oddity: dict[str, Any]) -> None:
    live = LiveAnswers()
    for _ in range(30):
        live.finished(written(**{"label": "formal@2", **oddity}))
    assert live.window("formal@2").broken == []
    for _ in range(5):
        live.finished(written("formal@2", tokens=1, text="", ended=True))
    assert [each.fault for each in live.window("formal@2").broken] == ["empty"] * 5


async def test_windows_are_bounded() -> None:
    live = LiveAnswers()
    for number in range(1000):
        live.finished(written(f"formal@{number}"))
    assert len(live.window("formal@0")) == 0 and len(live.window("formal@999")) == 1


async def suspected(live: LiveAnswers) -> bool:
    try:
        async with asyncio.timeout(0.05):
            await live.suspect()
    except TimeoutError:
        return False
    return True


async def test_one_prompt_again_and_again_counts_once() -> None:
    """A health check, or somebody who has found a prompt that breaks the version."""
    live = LiveAnswers()
    for _ in range(40):
        live.finished(written("formal@2", prompt=(1, 2, 3)))
    assert len(live.window("formal@2")) == 1 and not await suspected(live)
    for _ in range(5):
        live.finished(written("formal@2"))
    assert await suspected(live)


@pytest.mark.parametrize(
    ("of_others", "blamed"),
    [([], True), ([SOUND] * 4, True), ([SOUND] * 5, False), ([SOUND] * 3 + [""] * 3, True)],
    ids=["nobody else", "too few to tell", "sound for others", "broken for others"],
)
async def test_what_is_broken_for_one_tenant_alone_is_theirs(
    of_others: list[str], blamed: bool
) -> None:
    live = LiveAnswers()
    for text in of_others:
        live.finished(written("formal@2", text, tenant="another", ended=True))
    for _ in range(20):
        live.finished(written("formal@2", tenant="one"))
    assert await suspected(live) is blamed


async def test_with_the_setting_off_nothing_is_read() -> None:
    live = LiveAnswers(on=False)
    for _ in range(30):
        live.finished(written("formal@2"))
    live.rated(Feedback("f", 0.0, "formal", FeedbackKind.RATING, rating=0.0, version="formal@2"))
    assert len(live.window("formal@2")) == 0
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await live.suspect()
