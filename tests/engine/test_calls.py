"""Whose an engine's answer is when its caller leaves."""

from __future__ import annotations

import asyncio

import pytest

from tandem.core.version import AdapterVersion
from tandem.engine.calls import Calls
from tandem.engine.messages import CallResult

LOADED = AdapterVersion("formal", 3, "hash", "/versions/3")


@pytest.mark.parametrize("first", ["answer", "cancel", "both"])
async def test_a_version_whose_caller_left_is_unclaimed_once(first: str) -> None:
    unclaimed: list[AdapterVersion] = []
    sent: list[int] = []
    calls = Calls(unclaimed.append)
    caller = asyncio.create_task(calls.result(AdapterVersion, sent.append))
    await asyncio.sleep(0)
    answer = CallResult(1, sent[0], result=LOADED)
    if first == "answer":  # and the caller is cancelled before it runs again
        calls.take(answer)
        caller.cancel()
    else:
        caller.cancel()
        if first == "cancel":
            await asyncio.sleep(0)
        calls.take(answer)
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert unclaimed == [LOADED]
    calls.take(answer)
    assert unclaimed == [LOADED]
