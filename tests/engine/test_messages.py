"""Errors and messages survive the wire."""

from __future__ import annotations

import msgspec
import pytest
from learning_bench import dpo_step

from tandem.core.errors import (
    AdapterError,
    EngineDead,
    InvalidRequest,
    NotFound,
    TandemError,
    TrainingCancelled,
)
from tandem.core.events import TokenEvent
from tandem.core.lengths import Forecast
from tandem.core.plan import TokenLogprob
from tandem.core.request import Request
from tandem.core.sampling import SamplingParams
from tandem.core.sequence import FinishReason
from tandem.core.training import LoraSpec, StepOutcome, TrainerSpec
from tandem.engine.messages import (
    AddRequest,
    CallResult,
    Command,
    Foresee,
    Message,
    OpenTrainer,
    Tokens,
    Train,
    failure_of,
    to_exception,
)


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequest("a", param="p", code="c"),
        NotFound("b", param="model", code="model_not_found"),
        AdapterError("c", param="path"),
        EngineDead("d"),
        TandemError("e"),
        TrainingCancelled("f"),
    ],
)
def test_our_errors_come_back_as_they_were(error):
    back = to_exception(
        msgspec.convert(msgspec.to_builtins(failure_of(error)), type(failure_of(error)))
    )
    assert type(back) is type(error) and str(back) == str(error)
    if isinstance(error, InvalidRequest):
        assert (back.param, back.code) == (error.param, error.code)


def test_any_text_of_an_error_can_be_sent():
    """It may be that of a client's file; what cannot be sent would end the engine."""
    for error in (TandemError("key \ud800"), InvalidRequest("key \ud800"), KeyError("\ud800")):
        assert (
            "\\ud800"
            in msgspec.msgpack.decode(
                msgspec.msgpack.encode(failure_of(error)), type=type(failure_of(error))
            ).message
        )


def test_foreign_errors_keep_their_text():
    assert str(to_exception(failure_of(KeyError("x")))) == "KeyError: 'x'"


def test_round_trips():
    sampling = SamplingParams(logit_bias={5: -1.5}, stop_token_ids=(1, 2), logprobs=2)
    command = AddRequest(Request("r", (1, 2, 3), sampling, n=2, adapter="a", tenant="t"))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(command), type=Command) == command
    command = Foresee("r", Forecast((1.0, 2.0, 3.0, 4.0, 5.0), 9, "hidden"))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(command), type=Command) == command
    event = TokenEvent(
        "r", 0, (5,), (TokenLogprob(5, -0.5, 1, ((5, -0.5),)),), finish_reason=FinishReason.STOP
    )
    command = Train(4, dpo_step("s", "t", [5, 6]))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(command), type=Command) == command
    command = OpenTrainer(5, TrainerSpec("t", LoraSpec(targets=("q_proj",))))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(command), type=Command) == command
    outcome = StepOutcome("s", "t", 1, True, 0.5, 1.0, 1e-4, ((-1.0,), (-2.0, -3.0)), 0.0, 1.0, 2.0)
    sent = msgspec.msgpack.encode(CallResult(3, 4, result=outcome))
    message = msgspec.msgpack.decode(sent, type=Message)
    assert isinstance(message, CallResult)
    assert msgspec.convert(message.result, StepOutcome) == outcome
    message = Tokens(3, [event])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=Message) == message
