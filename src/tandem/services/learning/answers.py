"""Greedy answers of a model, for those who judge models by what they say.

Knows the engine; what the answers mean is for `answer_faults.py` and `gate.py`. Invariant: an
answer has at most the tokens that were allowed, its end token included.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from contextlib import aclosing

from tandem.core.errors import NoMemory, TandemError
from tandem.core.plan import NO_MEMORY
from tandem.core.ports import ServingEngine
from tandem.core.request import Request
from tandem.core.sampling import SamplingParams
from tandem.core.sequence import FinishReason
from tandem.core.slo import WorkClass
from tandem.services.learning.references import Model, Scored
from tandem.services.tasks import together

ANSWER_TOKENS = 96
COMPARED_TOKENS = 48  # of an answer, by which log-probabilities, words and lengths are compared
_REMEMBERED = 4096


class Speechless(TandemError):
    """An answer ended in an error, such as output that is not finite."""


class Answers:
    """Asks models. What a model that never changes has said is remembered."""

    def __init__(self, client: ServingEngine) -> None:
        self._client = client
        self._numbers = itertools.count(1)
        self._known: dict[tuple[str, tuple[int, ...]], Scored] = {}

    async def of(self, model: Model, prompts: Sequence[tuple[int, ...]]) -> list[Scored]:
        """Greedy answers, all at once. Raises as `spoken` does."""
        keys = {prompt: (model.content, prompt) for prompt in prompts}
        had = {p: self._known[key] for p, key in keys.items() if key in self._known}
        missing = [prompt for prompt in keys if prompt not in had]
        said = await together(self._answer(prompt, model.adapter) for prompt in missing)
        found = {
            prompt: Scored(prompt + a, len(prompt)) for prompt, a in zip(missing, said, strict=True)
        }
        both = had | found
        answers = [both[prompt] for prompt in prompts]
        self._known |= {(model.content, prompt): answer for prompt, answer in found.items()}
        while len(self._known) > _REMEMBERED:
            del self._known[next(iter(self._known))]
        return answers

    async def _answer(self, prompt: tuple[int, ...], adapter: str | None) -> tuple[int, ...]:
        request = Request(
            request_id=f"reading-{next(self._numbers)}",
            prompt=prompt,
            sampling=SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS),
            adapter=adapter,
            work_class=WorkClass.OFFLINE,
        )
        return await spoken(self._client, request)


def beginnings(answers: Iterable[Scored]) -> list[Scored]:
    """What is compared of answers. A loop often begins later: faults are looked for in all of
    them."""
    return [
        Scored(each.tokens[: each.prompt_tokens + COMPARED_TOKENS], each.prompt_tokens)
        for each in answers
    ]


async def spoken(client: ServingEngine, request: Request) -> tuple[int, ...]:
    """The whole answer to a request for one choice. Raises `Speechless`, `NoMemory` where the
    engine is short of it, and as the engine client does."""
    tokens: list[int] = []
    async with aclosing(client.generate(request)) as events:
        async for event in events:
            if event.error == NO_MEMORY:
                raise NoMemory(NO_MEMORY)
            if event.finish_reason is FinishReason.ERROR:
                raise Speechless(f"a prompt got no answer: {event.error}")
            tokens.extend(event.tokens)
    return tuple(tokens)
