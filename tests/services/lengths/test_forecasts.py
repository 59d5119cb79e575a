"""Forecasts of a server: learned from its answers, kept, and never in the way."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from tandem.core.errors import StoreError
from tandem.core.lengths import Asked
from tandem.estimators.length_choice import Predicted
from tandem.services.lengths.forecasts import Lengths
from tandem.store import Store
from tandem.store import lengths as rows
from tandem.telemetry.lengths import LengthMetrics


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store.open(tmp_path)
    yield opened
    opened.close()


def made(store: Store | None = None) -> tuple[Lengths, CollectorRegistry]:
    registry = CollectorRegistry()
    return Lengths(LengthMetrics(registry), store), registry


def asked(lengths: Lengths, text: str) -> Asked:
    return Asked("", "chat/completions", 512, len(text) // 4, lengths.scores(text))


WIDE = "Explain the causes and consequences of the war, and compare both sides."
NARROW = "Who invented telescopes?"


async def test_a_server_that_starts_again_knows_what_it_knew(store: Store) -> None:
    first, _ = made(store)
    await first.start("weights")
    for _ in range(150):
        for text, tokens in ((WIDE, 300), (NARROW, 12)):
            first.ended(first.predict(asked(first, text)), tokens)
    await first.stop()
    second, registry = made(store)
    await second.start("weights")
    await second.learn()
    for text, tokens in ((WIDE, 300), (NARROW, 12)) * 20:
        second.ended(second.predict(asked(second, text)), tokens)
    wide = second.predict(asked(second, WIDE)).forecast
    narrow = second.predict(asked(second, NARROW)).forecast
    assert wide is not None and narrow is not None
    assert wide.source == narrow.source == "lexical"
    assert wide.quantile(0.5) > 200.0 and narrow.quantile(0.5) < 20.0
    await second.stop()
    text = generate_latest(registry).decode()
    assert 'tandem_output_length_forecasts_total{predictor="lexical"}' in text


async def test_another_model_begins_anew(store: Store) -> None:
    first, _ = made(store)
    await first.start("weights")
    for _ in range(20):
        first.ended(first.predict(asked(first, WIDE)), 300)
    await first.stop()
    other, _ = made(store)
    await other.start("other weights")
    assert other.predict(asked(other, WIDE)).forecast is None
    await other.stop()


async def test_a_store_that_is_closed_fails_nothing(store: Store) -> None:
    lengths, _ = made(store)
    await lengths.start("weights")
    lengths.ended(lengths.predict(asked(lengths, WIDE)), 300)
    store.close()
    await lengths.keep()
    await lengths.stop()


async def test_what_could_not_be_written_is_written_later(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths, _ = made(store)
    await lengths.start("weights")
    lengths.ended(lengths.predict(asked(lengths, WIDE)), 300)
    with monkeypatch.context() as patch:
        patch.setattr(store, "write", _full)
        await lengths.keep()
    await lengths.stop()
    assert len(await store.read(rows.recent, "weights")) == 1


async def test_a_server_that_stops_while_it_writes_loses_nothing(store: Store) -> None:
    lengths, _ = made(store)
    lengths.ended(lengths.predict(asked(lengths, WIDE)), 300)
    await lengths.start("weights")
    await asyncio.sleep(0)  # the write has begun
    await lengths.stop()
    assert await store.read(rows.recent, "weights")


async def _full(*_: object) -> None:
    raise StoreError("the disk is full")


async def test_rows_that_cannot_be_read_stop_no_server(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths, _ = made(store)
    with monkeypatch.context() as patch:
        patch.setattr(store, "read", _full)
        await lengths.start("weights")
    assert lengths.predict(asked(lengths, WIDE)).forecast is None
    await lengths.stop()


async def test_errors_become_metrics() -> None:
    lengths, registry = made()
    for _ in range(40):
        lengths.ended(lengths.predict(asked(lengths, WIDE)), 300)
    lengths.measure()
    text = generate_latest(registry).decode()
    assert 'tandem_output_length_pinball_tokens{predictor="history"} 0.0' in text
    assert 'tandem_output_length_coverage{level="0.9",predictor="history"} 1.0' in text


async def test_what_states_say_outlives_the_server(store: Store) -> None:
    """Texts are alike; the state of a prompt, of 300 numbers, tells two lengths apart."""
    rng = np.random.default_rng(0)
    kinds = rng.standard_normal((2, 300)).astype(np.float16)

    def state(kind: int) -> bytes:
        return (kinds[kind] + 0.3 * rng.standard_normal(300)).astype(np.float16).tobytes()

    def answer(lengths: Lengths, kind: int) -> Predicted:
        predicted = lengths.refine(lengths.predict(asked(lengths, WIDE)), state(kind))
        lengths.ended(predicted, (300, 12)[kind])
        return predicted

    first, _ = made(store)
    await first.start("weights")
    for number in range(300):
        answer(first, number % 2)
    await first.stop()
    second, registry = made(store)
    await second.start("weights")
    for _ in range(500):  # the server makes the network by itself
        if "hidden" in second.refine(second.predict(asked(second, WIDE)), state(0)).quantiles:
            break
        await asyncio.sleep(0.02)
    found = [answer(second, number % 2) for number in range(60)][-2:]
    await second.stop()
    told = [each.forecast for each in found]
    assert [each.source for each in told if each] == ["hidden", "hidden"]
    assert told[0].quantile(0.5) > 200.0 and told[1].quantile(0.5) < 20.0
    text = generate_latest(registry).decode()
    assert 'tandem_output_length_forecasts_total{predictor="hidden"}' in text
    kept = (await store.read(rows.recent, "weights"))[-1][0].state
    assert len(kept) == 128, "64 numbers of a state are kept, whatever its width"
