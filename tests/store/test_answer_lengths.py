from __future__ import annotations

from dataclasses import replace

import pytest

from tandem.core.lengths import Asked
from tandem.store import Store, lengths

ASKED = Asked(
    "", "chat/completions", 512, 20, (0.0, 1.5, 0.0, 0.0, 2.0, 0.0), "batch-1", b"\x00\xff"
)


async def test_lengths_are_kept_by_model_in_order(store: Store) -> None:
    other = replace(ASKED, adapter="terse", scores=(), batch="")
    await store.write(lengths.add, "m", [(ASKED, 3), (other, 4)])
    await store.write(lengths.add, "m", [(ASKED, 5)])
    await store.write(lengths.add, "other", [(ASKED, 9)])
    await store.write(lengths.add, "m", [])
    assert await store.read(lengths.recent, "m") == [(ASKED, 3), (other, 4), (ASKED, 5)]


async def test_the_newest_of_each_adapter_are_kept(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lengths, "MOST_OF_AN_ADAPTER", 3)
    monkeypatch.setattr(lengths, "MOST_ROWS", 5)
    terse = replace(ASKED, adapter="terse")
    for number in range(5):
        await store.write(lengths.add, "m", [(ASKED, number), (terse, 10 + number)])
    kept = [tokens for _, tokens in await store.read(lengths.recent, "m")]
    assert kept == [12, 3, 13, 4, 14]


async def test_a_large_batch_takes_no_room_from_chats(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lengths, "MOST_OF_AN_ADAPTER", 3)
    chat = replace(ASKED, batch="")
    await store.write(lengths.add, "m", [(chat, 100)])
    await store.write(lengths.add, "m", [(ASKED, number) for number in range(50)])
    kept = [tokens for _, tokens in await store.read(lengths.recent, "m")]
    assert kept == [100, 47, 48, 49]
