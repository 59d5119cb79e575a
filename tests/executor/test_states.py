"""The hidden state that a token is drawn from comes with it, where it is asked for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_executor import GREEDY, make_executor, run

import tiny_models
from devices import DEVICES
from tandem.core.plan import Draw, Span
from tandem.executor.forward import _MOST_HALF

PROMPTS = ([5, 6, 7, 8, 9, 10], [11, 12, 13], [14, 15])


def drawing(place: int, start: int, *wanted: bool) -> Span:
    prompt, table = PROMPTS[place], (2 * place, 2 * place + 1)
    draws = [Draw(10 * place + n, n, 0, GREEDY, state=each) for n, each in enumerate(wanted)]
    return Span(10 * place, start, tuple(prompt[start:]), (table,), draws=tuple(draws))


@pytest.mark.parametrize("device", DEVICES)
def test_a_prompt_brings_the_row_that_its_first_token_is_drawn_from(device) -> None:
    """In chunks, beside one that asks for none, and once for all choices."""
    executor = make_executor(tiny_models.make_model("llama").to(device))
    run(executor, Span(0, 0, tuple(PROMPTS[0][:4]), ((0, 1),)))
    result = run(executor, drawing(0, 4, True), drawing(1, 0, False), drawing(2, 0, True, True))
    assert result.failed == ()
    states = {draw.seq_id: draw.state for draw in result.draws}
    assert [key for key, state in states.items() if state] == [0, 20]
    reference = tiny_models.make_model("llama")
    for place in (0, 2):
        with torch.no_grad():
            wanted = reference.model(torch.tensor([PROMPTS[place]])).last_hidden_state[0, -1]
        found = np.frombuffer(states[10 * place], np.float16)
        assert found == pytest.approx(wanted.numpy(), abs=0.01)
        assert np.abs(found).max() > 0.1


def test_a_state_that_is_too_large_for_float16_stays_finite() -> None:
    model = tiny_models.make_model("llama")
    with torch.no_grad():
        model.model.norm.weight.mul_(1e6)
    result = run(make_executor(model), drawing(1, 0, True))
    found = np.frombuffer(result.draws[0].state, np.float16)
    assert np.isfinite(found).all() and np.abs(found).max() == _MOST_HALF
