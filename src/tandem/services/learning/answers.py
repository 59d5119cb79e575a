"""Greedy answers of a model to prompts, for those who judge models by what they say.

Knows the engine; what the answers mean is for `reading.py` and `gate.py`. Invariant: an answer has
at most the tokens that were allowed, its end token included.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import aclosing

from tandem.core.errors import TandemError
from tandem.core.ports import EngineClient
from tandem.core.request import Request
from tandem.core.sampling import SamplingParams
from tandem.core.sequence import FinishReason
from tandem.services.learning.references import Model, Scored
from tandem.services.learning.together import together

ANSWER_TOKENS = 48
_REMEMBERED = 4096


class Speechless(TandemError):
    """An answer ended in an error, such as output that is not finite."""


class Answers:
    """Asks models. What a model that never changes has said is remembered."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._numbers = itertools.count(1)
        self._known: dict[tuple[str, tuple[int, ...]], Scored] = {}

    async def of(self, model: Model, prompts: Sequence[tuple[int, ...]]) -> list[Scored]:
        """Greedy answers, all at once. Raises `Speechless`, and as the engine client does."""
        missing = [p for p in dict.fromkeys(prompts) if (model.content, p) not in self._known]
        said = await together(self._answer(prompt, model.adapter) for prompt in missing)
        found = {
            prompt: Scored(prompt + a, len(prompt)) for prompt, a in zip(missing, said, strict=True)
        }
        answers = [found.get(p) or self._known[model.content, p] for p in prompts]
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
        )
        tokens: list[int] = []
        async with aclosing(self._client.generate(request)) as events:
            async for event in events:
                if event.finish_reason is FinishReason.ERROR:
                    raise Speechless(f"a prompt got no answer: {event.error}")
                tokens.extend(event.tokens)
        return tuple(tokens)
