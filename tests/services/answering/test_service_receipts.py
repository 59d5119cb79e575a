"""Receipts: durable before the end of the answer, swept when old, never in the way."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from fake_engine import FakeEngine, Script
from serving import demo_tokenizer
from tandem.config import ServerConfig
from tandem.core.clock import VirtualClock
from tandem.core.errors import NotFound
from tandem.core.learning import AnswerTokens, Ending, PromptTokens, Receipt, ReceiptChoice
from tandem.core.sampling import SamplingParams
from tandem.services.answering.admission_control import AdmissionControl
from tandem.services.answering.answer import Answer, Tools
from tandem.services.answering.choice import Delta
from tandem.services.answering.generation import Generation, Options
from tandem.services.answering.models import Models
from tandem.services.answering.receipts import Receipts
from tandem.services.auth import Caller
from tandem.store import Store
from tandem.telemetry.metrics import ServerMetrics

DAY_S = 86_400.0
HELLO = demo_tokenizer().encode("Hello you", add_special_tokens=False)
TURNS = [{"role": "user", "content": "Hi"}]


class Stage:
    def __init__(self, directory: Path, days: float = 1.0) -> None:
        self.now_s, self.ran_s = 100 * DAY_S, 0.0
        self.store = Store.open(directory)
        self.receipts = Receipts(self.store, days, lambda: self.now_s, lambda: self.ran_s)
        self.engine = FakeEngine(play=lambda request, index: Script(tokens=HELLO))
        tools = Tools(
            client=self.engine,
            tokenizer=demo_tokenizer(),
            admission=AdmissionControl(ServerConfig(), VirtualClock()),
            offline=AdmissionControl(ServerConfig(), VirtualClock()),
            metrics=ServerMetrics(CollectorRegistry()),
            clock=VirtualClock(),
            receipts=self.receipts,
        )
        models = Models(self.engine, "demo", created_s=0)
        self.service = Generation(tools, models, max_choices=8, rng=random.Random(5))


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path)
    yield made
    made.store.close()


def options(**changes: object) -> Options:
    base = Options(model="demo", sampling=SamplingParams(), max_tokens=50, caller=Caller("t"))
    return replace(base, **changes)  # type: ignore[arg-type]


async def collect(answer: Answer) -> list[Delta]:
    return [delta async for delta in answer.deltas()]


async def test_the_receipt_is_there_before_the_last_delta(stage: Stage) -> None:
    answer = await stage.service.chat(TURNS, options(n=2, seed=7, user="ann"))
    open_choices = {0, 1}
    async with aclosing(answer.deltas()) as deltas:
        async for delta in deltas:
            if delta.finish_reason is not None:
                open_choices.discard(delta.index)
            if not open_choices:
                receipt = await stage.receipts.find(answer.id, "t")
    tokens = AnswerTokens((*HELLO, 2), Ending.MODEL)
    assert receipt.choices == tuple(
        ReceiptChoice(k, "Hello you", "stop", tokens=tokens) for k in range(2)
    )
    prompt = demo_tokenizer().encode_chat(TURNS)
    assert receipt.prompt_tokens == PromptTokens(demo_tokenizer().identity, (prompt,))
    assert (receipt.version, receipt.adapter, receipt.user) == ("base", None, "ann")
    assert receipt.messages == tuple(TURNS) and receipt.sampling["seed"] == 7
    with pytest.raises(NotFound):
        await stage.receipts.find(answer.id, "other")


async def test_an_answer_that_was_left_has_no_receipt(stage: Stage) -> None:
    answer = await stage.service.chat(TURNS, options())
    async with aclosing(answer.deltas()) as deltas:
        await anext(deltas)
    with pytest.raises(NotFound):
        await stage.receipts.find(answer.id, "t")


async def test_each_prompt_keeps_its_text_without_echo(stage: Stage) -> None:
    prompts = ["One", demo_tokenizer().encode("Two", add_special_tokens=False)]
    answer = await stage.service.complete(prompts, options(echo=True))
    await collect(answer)
    receipt = await stage.receipts.find(answer.id, "t")
    assert [(choice.prompt, choice.text) for choice in receipt.choices] == [
        ("One", "Hello you"),
        ("Two", "Hello you"),
    ]
    single = await stage.service.complete(["One"], options())
    await collect(single)
    kept = await stage.receipts.find(single.id, "t")
    assert (kept.prompt, kept.choices[0].prompt) == ("One", "")


@pytest.mark.parametrize("logprobs", [None, 1])
async def test_token_ids_are_those_that_were_served(stage: Stage, logprobs: int | None) -> None:
    special = (2, *demo_tokenizer().encode("Two", add_special_tokens=False))
    sampling = SamplingParams(logprobs=logprobs)
    asked = options(echo=True, n=2, max_tokens=1, sampling=sampling)
    answer = await stage.service.complete(["One", special], asked)
    await collect(answer)
    receipt = await stage.receipts.find(answer.id, "t")
    assert receipt.prompt_tokens is not None
    assert receipt.prompt_tokens.ids == (demo_tokenizer().encode("One"), special)
    found = [(receipt.prompt_of(choice), choice.tokens) for choice in receipt.choices]
    cut = AnswerTokens(HELLO[:1], Ending.LENGTH)
    assert found == [(prompt, cut) for prompt in receipt.prompt_tokens.ids for _ in range(2)]


async def test_a_prompt_alone_and_an_unwanted_answer_have_no_receipt(stage: Stage) -> None:
    for answer in (
        await stage.service.complete(["One"], options(echo=True, max_tokens=0)),
        await stage.service.chat(TURNS, options(receipt=False)),
    ):
        await collect(answer)
        with pytest.raises(NotFound):
            await stage.receipts.find(answer.id, "t")


async def test_the_version_is_the_one_that_answered(stage: Stage) -> None:
    await stage.engine.load_adapter("formal", "formal")
    answer = await stage.service.chat(TURNS, options(model="demo:formal"))
    await collect(answer)
    receipt = await stage.receipts.find(answer.id, "t")
    assert (receipt.adapter, receipt.version) == ("formal", "formal@1")


async def test_a_store_that_fails_does_not_fail_the_answer(stage: Stage) -> None:
    answer = await stage.service.chat(TURNS, options())
    stage.store.close()
    assert (await collect(answer))[-1].finish_reason is not None


async def test_old_receipts_are_swept(stage: Stage) -> None:
    for age in range(600):
        plain = Receipt(f"c{age}", stage.now_s - age * 300, "t", None, "base", (), "p", ())
        await stage.receipts.keep(plain)
    assert await stage.receipts.sweep() == 600 - 289
    assert (await stage.receipts.find("c288", "t")).completion_id == "c288"
    stage.now_s += DAY_S
    stage.ran_s += DAY_S
    assert await stage.receipts.sweep() == 288
    await stage.receipts.start()
    await stage.receipts.stop()


def receipt(name: str, created_s: float) -> Receipt:
    return Receipt(name, created_s, "t", None, "base", (), "p", ())


async def test_a_clock_that_is_ahead_sweeps_nothing(tmp_path: Path) -> None:
    """Set wrong at the start, or while the server runs: what it makes then is no witness either."""
    before = Stage(tmp_path, days=30.0)
    await before.receipts.keep(receipt("old", before.now_s - 29 * DAY_S))
    await before.receipts.keep(receipt("new", before.now_s))
    before.store.close()
    stage = Stage(tmp_path, days=30.0)
    stage.now_s += 60 * DAY_S
    await stage.receipts.start()
    await stage.receipts.keep(receipt("ahead", stage.now_s))
    assert await stage.receipts.sweep() == 0
    stage.ran_s += 1.5 * DAY_S
    assert await stage.receipts.sweep() == 1, "what has run is believed"
    await stage.receipts.stop()
    assert [name for name in ("old", "new", "ahead") if await kept(stage, name)] == ["new", "ahead"]
    stage.store.close()


async def test_a_store_that_was_away_for_long_sweeps_as_it_runs(tmp_path: Path) -> None:
    """The price: days in which no server ran do not count."""
    before = Stage(tmp_path, days=30.0)
    await before.receipts.keep(receipt("old", before.now_s))
    before.store.close()
    stage = Stage(tmp_path, days=30.0)
    stage.now_s += 60 * DAY_S
    assert await stage.receipts.sweep() == 0
    stage.now_s += 30.5 * DAY_S
    stage.ran_s += 30.5 * DAY_S
    assert await stage.receipts.sweep() == 1
    stage.store.close()


async def kept(stage: Stage, name: str) -> bool:
    try:
        return bool(await stage.receipts.find(name, "t"))
    except NotFound:
        return False
