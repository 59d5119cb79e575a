"""The use cases over a scripted engine: requests, stops, echo, usage, clean-up."""

from __future__ import annotations

import asyncio
import random
import threading
import zlib
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from fake_engine import INFO, FakeEngine, Script
from serving import demo_tokenizer, new_directory
from tandem.config import ServerConfig
from tandem.core.clock import VirtualClock
from tandem.core.errors import EngineDead, InvalidRequest, Overloaded
from tandem.core.lengths import Forecast
from tandem.core.request import Request
from tandem.core.sampling import SamplingParams
from tandem.core.sequence import FinishReason
from tandem.core.slo import Objectives, Slo, WorkClass
from tandem.services.answering.admission_control import AdmissionControl
from tandem.services.answering.answer import Answer, GenerationFailed, Tools
from tandem.services.answering.choice import Delta
from tandem.services.answering.generation import Generation, Options
from tandem.services.answering.models import Models
from tandem.services.answering.receipts import Receipts
from tandem.services.answering.tokenizer import Tokenizer
from tandem.services.lengths.forecasts import Lengths
from tandem.store import Store
from tandem.telemetry.lengths import LengthMetrics
from tandem.telemetry.metrics import ServerMetrics

HELLO = demo_tokenizer().encode("Hello, how are you today?", add_special_tokens=False)
TURNS = [{"role": "user", "content": "Hi"}]
Play = Callable[[Request, int], Script]


def hello(request: Request, index: int) -> Script:
    return Script(tokens=HELLO)


class Stage:
    """A generation service over a fake engine."""

    def __init__(
        self,
        play: Play = hello,
        max_waiting: int = 10,
        objectives: Objectives | None = None,
        lengths: Lengths | None = None,
    ) -> None:
        self.engine = FakeEngine(play=play)
        self.clock = VirtualClock()
        bounds = ServerConfig(max_waiting_requests=max_waiting, max_wait_factor=1.0)
        self.admission = AdmissionControl(bounds, self.clock)
        tools = Tools(
            client=self.engine,
            tokenizer=demo_tokenizer(),
            admission=self.admission,
            offline=AdmissionControl(bounds, self.clock),
            metrics=ServerMetrics(CollectorRegistry()),
            clock=self.clock,
            receipts=Receipts(Store.open(new_directory()), 0.0, lambda: 0.0),
            objectives=objectives or Objectives(),
            lengths=lengths,
        )
        models = Models(self.engine, "demo", created_s=0)
        self.service = Generation(
            tools, models, max_choices=8, rng=random.Random(5), priorities=True
        )


def options(**changes: object) -> Options:
    base = Options(model="demo", sampling=SamplingParams(), max_tokens=50)
    return replace(base, **changes)  # type: ignore[arg-type]


async def collect(answer: Answer) -> list[Delta]:
    return [delta async for delta in answer.deltas()]


def texts(deltas: list[Delta]) -> dict[int, str]:
    found: dict[int, str] = {}
    for delta in deltas:
        found[delta.index] = found.get(delta.index, "") + delta.text
    return found


async def test_choices_of_several_prompts_are_numbered_by_prompt_then_choice() -> None:
    def play(request: Request, index: int) -> Script:
        return Script(tokens=(*request.prompt, 48 + index))

    stage = Stage(play)
    answer = await stage.service.complete(["ab", "cd"], options(n=2))
    found = texts(await collect(answer))
    assert [found[k][:2] for k in range(4)] == ["ab", "ab", "cd", "cd"]
    assert found[0] != found[1]
    assert answer.usage.prompt_tokens == sum(len(r.prompt) for r in stage.engine.requests)
    assert not stage.engine.running and not stage.engine.aborted


async def test_seeds_are_random_unless_given() -> None:
    stage = Stage()
    for seed in (None, None, 7, -1):
        await collect(await stage.service.chat(TURNS, options(seed=seed)))
    seeds = [request.sampling.seed for request in stage.engine.requests]
    assert seeds[0] != seeds[1]
    assert seeds[2] == 7
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize(("given", "different"), [(None, 3), (7, 1)])
async def test_equal_prompts_of_a_request_are_drawn_apart_unless_a_seed_is_given(
    given: int | None, different: int
) -> None:
    stage = Stage()
    await collect(await stage.service.complete(["ab", "ab", "ab"], options(seed=given)))
    assert len({request.sampling.seed for request in stage.engine.requests}) == different


async def test_objectives_are_the_requests_own_or_the_models() -> None:
    stage = Stage(objectives=Objectives(Slo(1.0, 0.1), {"base": Slo(0.5, 0.05)}))
    for own in ({}, {"tpot_slo": 0.02}, {"ttft_slo": 1.0, "tpot_slo": 0.1}):
        await collect(await stage.service.chat(TURNS, options(**own)))
    found = [request.slo for request in stage.engine.requests]
    assert found == [Slo(0.5, 0.05), Slo(0.5, 0.02), None]


async def test_a_stop_string_aborts_that_choice_only() -> None:
    def play(request: Request, index: int) -> Script:
        return Script(tokens=HELLO if index == 1 else HELLO[:3])

    stage = Stage(play)
    answer = await stage.service.chat(TURNS, options(n=2, stops=(" you",)))
    deltas = await collect(answer)
    assert texts(deltas)[1] == "Hello, how are"
    assert stage.engine.aborted == [(stage.engine.requests[0].request_id, 1)]
    assert {d.index: d.finish_reason for d in deltas if d.finish_reason} == {
        0: FinishReason.STOP,
        1: FinishReason.STOP,
    }


async def test_closing_the_deltas_aborts_in_the_engine_and_leaves_the_queue() -> None:
    stage = Stage()
    answer = await stage.service.complete(["ab", "cd"], options())
    async with aclosing(answer.deltas()) as deltas:
        await anext(deltas)
    aborted = {request_id for request_id, _ in stage.engine.aborted}
    assert aborted == {request.request_id for request in stage.engine.requests}
    assert not stage.engine.running
    assert stage.admission.waiting_requests == 0


async def test_the_queue_bound_is_checked_before_the_engine_hears_of_it() -> None:
    stage = Stage(max_waiting=1)
    stage.admission.admit([1])
    answer = await stage.service.chat(TURNS, options())
    with pytest.raises(Overloaded):
        await collect(answer)
    assert not stage.engine.requests
    assert stage.admission.waiting_requests == 1


async def test_prompts_of_a_request_leave_the_queue_one_by_one() -> None:
    def play(request: Request, index: int) -> Script:
        return Script(delay_s=0.0 if len(request.prompt) == 1 else 3600.0)

    stage = Stage(play)
    answer = await stage.service.complete(["a", "bcd"], options())
    deltas = answer.deltas()
    assert (await anext(deltas)).index == 0
    assert (stage.admission.waiting_requests, stage.admission.waiting_tokens) == (1, 3)
    await deltas.aclose()
    assert stage.admission.waiting_requests == 0


async def test_a_long_text_of_a_batch_is_not_refused_for_the_online_queue() -> None:
    stage = Stage(max_waiting=1)
    stage.admission.admit([1])
    long = "word " * 10_000
    with pytest.raises(Overloaded):
        await stage.service.complete([long], options())
    with pytest.raises(InvalidRequest, match="context"):
        await stage.service.complete([long], options(work_class=WorkClass.OFFLINE))


async def test_a_wait_is_too_long_by_the_requests_own_objective_unless_it_is_urgent() -> None:
    stage = Stage(objectives=Objectives(Slo(1.0, 0.1)))
    tickets = stage.admission.admit([1] * 10)
    for ticket in tickets[:9]:
        stage.clock.advance(3.0)
        ticket.started()
    for own in ({}, {"ttft_slo": 2.0}):
        with pytest.raises(Overloaded, match="the server is behind"):
            await collect(await stage.service.chat(TURNS, options(**own)))
    assert not stage.engine.requests
    for own in ({"ttft_slo": 60.0}, {"priority": -1}):
        await collect(await stage.service.chat(TURNS, options(**own)))
    assert len(stage.engine.requests) == 2


async def test_a_clients_max_tokens_do_not_change_who_is_refused() -> None:
    """The last that waits says that its answer is short, and those before it were long."""

    begins = [threading.Event() for _ in range(11)]

    def play(request: Request, index: int) -> Script:
        return Script(tokens=HELLO, gate=begins[len(stage.engine.requests) - 1])

    stage = Stage(play, max_waiting=11, objectives=Objectives(Slo(1.0, 0.1)))
    most = [*[200] * 9, 1]
    answers = [await stage.service.chat(TURNS, options(max_tokens=each)) for each in most]
    streams = [answer.deltas() for answer in answers]
    first = [asyncio.create_task(anext(stream)) for stream in streams]
    await asyncio.sleep(0)
    for task, begin in zip(first[:9], begins, strict=False):
        stage.clock.advance(3.0)
        begin.set()
        await task
    assert stage.admission.waiting_requests == 1
    with pytest.raises(Overloaded, match="the server is behind"):
        await collect(await stage.service.chat(TURNS, options()))
    first[9].cancel()
    await asyncio.gather(*first, return_exceptions=True)
    for stream in streams:
        await stream.aclose()


async def test_a_death_and_a_failure_reach_the_caller_and_leave_nothing_behind() -> None:
    stage = Stage(lambda r, i: Script(tokens=HELLO, dies_after=2))
    with pytest.raises(EngineDead):
        await collect(await stage.service.chat(TURNS, options()))
    stage = Stage(lambda r, i: Script(finish=FinishReason.ERROR, error="non-finite logits"))
    with pytest.raises(GenerationFailed, match="non-finite"):
        await collect(await stage.service.chat(TURNS, options()))
    assert stage.admission.waiting_requests == 0


async def test_echo_with_scores_precedes_every_choice() -> None:
    stage = Stage()
    sampling = SamplingParams(logprobs=1)
    ask = options(n=2, echo=True, sampling=sampling, max_tokens=2)
    deltas = await collect(await stage.service.complete(["Hello there"], ask))
    for index in range(2):
        mine = [delta for delta in deltas if delta.index == index]
        assert mine[0].text == "Hello there"
        assert "".join(entry.text for entry in mine[0].tokens) == "Hello there"
        generated = [entry for delta in mine[1:] for entry in delta.tokens]
        assert generated[0].offset == len("Hello there")
    assert stage.engine.requests[0].sampling.prompt_logprobs == 1


async def test_zero_tokens_with_echo_give_the_prompt_alone() -> None:
    stage = Stage()
    ask = options(echo=True, max_tokens=0)
    answer = await stage.service.complete(["Hello there"], ask)
    deltas = await collect(answer)
    assert texts(deltas) == {0: "Hello there"}
    assert deltas[-1].finish_reason is FinishReason.LENGTH
    assert answer.usage.completion_tokens == 0


async def test_the_output_budget_is_what_is_left_of_the_context() -> None:
    stage = Stage()
    await stage.service.chat(TURNS, options(max_tokens=None))
    prompt = demo_tokenizer().encode_chat(TURNS)
    answer = await stage.service.chat(TURNS, options(max_tokens=None))
    await collect(answer)
    assert stage.engine.requests[0].sampling.max_tokens == INFO.max_model_len - len(prompt)
    with pytest.raises(InvalidRequest, match=r"requested 257 tokens \(250 in the prompt, 7"):
        await stage.service.complete([(5,) * 250], options(max_tokens=7))
    await stage.service.complete([(5,) * 250], options(max_tokens=6))
    with pytest.raises(InvalidRequest, match="maximum context length is 256 tokens") as caught:
        await stage.service.complete([(5,) * 256], options(max_tokens=None))
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(
        InvalidRequest, match="maximum context length is 256 tokens"
    ):  # before ids are looked at
        await stage.service.complete([(-1,) * 300], options(max_tokens=None))


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"n": 9}, "n"),
        ({"sampling": SamplingParams(stop_token_ids=(2048,))}, "stop_token_ids"),
        ({"sampling": SamplingParams(logit_bias={9999: 1.0})}, "logit_bias"),
    ],
)
async def test_limits_that_need_the_model(change: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await Stage().service.complete(["x"], options(**change))
    assert caught.value.param == param


async def test_prompt_ids_outside_of_the_vocabulary_and_empty_prompts_are_refused() -> None:
    service = Stage().service
    with pytest.raises(InvalidRequest, match="2048"):
        await service.complete([(1, 2048)], options())
    with pytest.raises(InvalidRequest, match="no tokens"):
        await service.complete([""], options())
    with pytest.raises(InvalidRequest, match="choices"):
        await service.complete(["x"] * 5, options(n=2))


async def test_long_texts_are_encoded_the_same_beside_the_event_loop() -> None:
    text = "Hello there. " * 2500
    tokens = await Stage().service.encode(text, add_special_tokens=True)
    assert tokens == demo_tokenizer().encode(text)


async def test_a_long_prompt_is_not_tokenised_for_a_full_queue() -> None:
    stage = Stage(max_waiting=1)
    [ticket] = stage.admission.admit([1])
    text = "word " * 10_000
    with patch.object(Tokenizer, "encode", side_effect=AssertionError("tokenised")):
        with pytest.raises(Overloaded, match="1 requests are waiting"):
            await stage.service.complete([text], options())
        with pytest.raises(Overloaded, match="1 requests are waiting"):
            await stage.service.chat([{"role": "user", "content": text}], options())
    ticket.close()
    with pytest.raises(InvalidRequest, match="maximum context length"):
        await stage.service.complete([text], options())


async def test_long_thoughts_are_long_turns() -> None:
    """They are counted, but do not make a conversation too long: a template may leave them out."""
    stage = Stage(max_waiting=1)
    turn = {"role": "assistant", "content": "x", "reasoning_content": "word " * 10_000}
    threads: list[int] = []

    def encode_chat(self: Tokenizer, *_: object, **__: object) -> tuple[int, ...]:
        threads.append(threading.get_ident())
        return (1,)

    with patch.object(Tokenizer, "encode_chat", encode_chat):
        await stage.service.chat([*TURNS, turn], options())
        [ticket] = stage.admission.admit([1])
        with pytest.raises(Overloaded, match="1 requests are waiting"):
            await stage.service.chat([*TURNS, turn], options())
    ticket.close()
    [thread] = threads
    assert thread != threading.get_ident()


async def test_very_long_texts_are_encoded_one_at_a_time_whoever_leaves() -> None:
    service, text = Stage().service, "x" * 1_000_000
    begun, goes_on = threading.Semaphore(0), threading.Event()

    def encode(*_: object, **__: object) -> tuple[int, ...]:
        begun.release()
        assert goes_on.wait(30)
        return (1,)

    with patch.object(Tokenizer, "encode", encode):
        first = asyncio.create_task(service.encode(text, add_special_tokens=True))
        await asyncio.to_thread(begun.acquire)
        first.cancel()
        second = asyncio.create_task(service.encode(text, add_special_tokens=True))
        assert not await asyncio.to_thread(begun.acquire, timeout=0.2)
        goes_on.set()
        assert await second == (1,)
        with pytest.raises(asyncio.CancelledError):
            await first


async def test_requests_carry_what_earlier_answers_say_of_their_length() -> None:
    stage = Stage(lengths=Lengths(LengthMetrics(CollectorRegistry())))
    for _ in range(16):
        await collect(await stage.service.chat(TURNS, options()))
    await collect(await stage.service.chat(TURNS, options(n=2)))
    await collect(await stage.service.complete(["Hi"], options(batch="batch-1")))
    *before, chat, line = stage.engine.requests
    assert [request.length for request in before] == [None] * 16
    tokens = len(HELLO) + 1  # with the one that ends it
    assert chat.length == Forecast((float(tokens),) * 5, 50, "history")
    assert line.length is not None and line.length.quantile(0.5) == tokens


async def test_an_answer_that_is_left_teaches_no_length() -> None:
    lengths = Lengths(LengthMetrics(CollectorRegistry()))
    stage = Stage(lengths=lengths)
    with patch.object(lengths, "ended") as ended:
        async with aclosing((await stage.service.chat(TURNS, options())).deltas()) as deltas:
            await anext(deltas)
        ended.assert_not_called()
        await collect(await stage.service.complete(["Hi", "You"], options()))
    assert [call.args[1] for call in ended.call_args_list] == [len(HELLO) + 1] * 2


async def test_a_prompt_that_is_computed_says_more_of_its_answer() -> None:
    """Prompts look alike, and their states tell short answers from long ones."""
    lengths = Lengths(LengthMetrics(CollectorRegistry()))
    ends = {False: 3, True: 40}

    def play(request: Request, index: int) -> Script:
        return Script(tokens=HELLO[:1] * ends[_is_long(request)])

    stage = Stage(play, lengths=lengths)
    stage.engine.state_of = lambda request: np.full(8, _is_long(request), np.float16).tobytes()
    for _ in range(320):
        await collect(await stage.service.complete(["Hi"], options()))
        await lengths.learn()
    (_, said), (_, then) = stage.engine.foreseen[-2:]
    assert said.source == then.source == "hidden"
    for request, (request_id, length) in zip(
        stage.engine.requests[-20:], stage.engine.foreseen[-20:], strict=True
    ):
        assert request.request_id == request_id and request.wants_state
        assert request.length is not None and request.length.source != "hidden"
        assert length.quantile(0.5) == pytest.approx(ends[_is_long(request)] + 1, rel=0.5)


def _is_long(request: Request) -> bool:
    return zlib.crc32(request.request_id.encode()) % 2 == 0
