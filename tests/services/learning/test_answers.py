"""The answers by which models are judged."""

from __future__ import annotations

import pytest

from fake_engine import FakeEngine, Script
from tandem.core.errors import NoMemory
from tandem.core.plan import NO_MEMORY
from tandem.core.sequence import FinishReason
from tandem.core.slo import WorkClass
from tandem.services.learning.answers import ANSWER_TOKENS, Answers, Speechless
from tandem.services.learning.references import Model

BASE = Model(None, "base")
PROMPTS = [(5, 6), (7, 8), (5, 6)]


async def test_they_are_asked_in_the_slack_and_once() -> None:
    engine = FakeEngine()
    await engine.start()
    answers = Answers(engine)
    first = await answers.of(BASE, PROMPTS)
    said = (10, 11, 12, 2)
    assert [each.tokens for each in first] == [(*prompt, *said) for prompt in PROMPTS]
    assert await answers.of(BASE, PROMPTS) == first
    assert len(engine.requests) == 2
    for request in engine.requests:
        assert request.work_class is WorkClass.OFFLINE
        assert request.sampling.temperature == 0.0
        assert request.sampling.max_tokens == ANSWER_TOKENS


@pytest.mark.parametrize(
    ("error", "raised"),
    [(NO_MEMORY, NoMemory), ("logits are not finite", Speechless)],
)
async def test_a_shortage_of_memory_says_nothing_of_the_model(
    error: str, raised: type[Exception]
) -> None:
    script = Script(tokens=(), finish=FinishReason.ERROR, stop_token=None, error=error)
    engine = FakeEngine(play=lambda request, index: script)
    await engine.start()
    with pytest.raises(raised):
        await Answers(engine).of(BASE, PROMPTS)
