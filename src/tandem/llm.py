"""Use from Python without a server: `LLM("demo").generate([...])`.

The same loop, scheduler and executor as behind the server, stepped in this thread. Knows text only
as far as the model's tokenizer turns prompts into token ids and back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import count
from typing import Any

from tandem.build import build_loop, resolve_model
from tandem.config import Settings, resolve
from tandem.core.errors import TandemError
from tandem.core.events import ModelInfo, TokenEvent
from tandem.core.plan import TokenLogprob
from tandem.core.request import Request
from tandem.core.sampling import SamplingParams
from tandem.core.sequence import FinishReason
from tandem.core.version import AdapterVersion
from tandem.services.tokenizer import Tokenizer

Prompt = str | Sequence[int]


@dataclass(slots=True)
class Completion:
    """One choice: token ids, their text, and log-probabilities if they were asked for."""

    index: int
    tokens: list[int]
    text: str
    logprobs: list[TokenLogprob]
    finish_reason: FinishReason | None


@dataclass(slots=True)
class GenerationOutput:
    """All choices of one prompt, with the prompt's log-probabilities if they were asked for."""

    prompt: tuple[int, ...]
    choices: list[Completion]
    prompt_logprobs: list[TokenLogprob]
    adapter: str | None


class LLM:
    """A model in this process.

    `settings` are fields of the configuration's sections, e.g. `LLM("demo", dtype="float32",
    block_size=8)`; see `tandem.config`. Raises what loading raises.
    """

    def __init__(self, model: str = "demo", **settings: Any) -> None:
        flags = _sections({"model": model, **settings})
        self._settings = resolve_model(resolve(flags))
        self._loop = build_loop(self._settings)
        self._tokenizer = Tokenizer.load(self._settings.model.model)
        self._ids = count()
        for name, path in self._settings.adapters.preload.items():
            self._loop.load_adapter(name, path)

    @property
    def info(self) -> ModelInfo:
        """What was loaded."""
        return self._loop.info

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._tokenizer

    def load_adapter(self, name: str, path: str) -> AdapterVersion:
        """Make a PEFT directory the current version of `name`. Raises `AdapterError`."""
        return self._loop.load_adapter(name, path)

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | None = None,
        *,
        n: int = 1,
        adapter: str | None = None,
    ) -> list[GenerationOutput]:
        """Complete every prompt, all of them in one continuous batch; outputs in their order.

        Prompt `i` uses the seed `sampling.seed + i`. Raises `InvalidRequest` before anything runs
        if a prompt or a sampling parameter does not fit, `TandemError` if the model fails on one.
        """
        sampling = sampling or SamplingParams()
        sampling.check(self.info.vocab_size)
        outputs: dict[str, GenerationOutput] = {}
        for place, prompt in enumerate(prompts):
            tokens = self._tokenizer.encode(prompt) if isinstance(prompt, str) else tuple(prompt)
            request_id = f"llm-{next(self._ids)}"
            seeded = replace(sampling, seed=sampling.seed + place)
            request = Request(request_id, tokens, seeded, n=n, adapter=adapter)
            try:
                self._loop.add(request)
            except TandemError:
                self._abort(outputs)
                raise
            choices = [Completion(index, [], "", [], None) for index in range(n)]
            outputs[request_id] = GenerationOutput(tokens, choices, [], None)
        try:
            while self._loop.has_work:
                for event in self._loop.step():
                    _take(event, outputs[event.request_id])
        except BaseException:
            self._abort(outputs)
            raise
        for output in outputs.values():
            for choice in output.choices:
                choice.text = self._tokenizer.decode(choice.tokens)
        return list(outputs.values())

    def chat(
        self,
        messages: Sequence[dict[str, str]],
        sampling: SamplingParams | None = None,
        *,
        adapter: str | None = None,
    ) -> str:
        """The model's answer to a conversation, rendered with its chat template."""
        prompt = self._tokenizer.encode_chat(messages)
        sampling = sampling or SamplingParams(max_tokens=256, temperature=0.0)
        return self.generate([prompt], sampling, adapter=adapter)[0].choices[0].text

    def _abort(self, outputs: dict[str, GenerationOutput]) -> None:
        for request_id in outputs:
            self._loop.abort(request_id)


def _take(event: TokenEvent, output: GenerationOutput) -> None:
    if event.error is not None:
        raise TandemError(event.error)
    choice = output.choices[event.index]
    choice.tokens.extend(event.tokens)
    choice.logprobs.extend(event.logprobs)
    choice.finish_reason = event.finish_reason
    output.prompt_logprobs.extend(event.prompt_logprobs)
    output.adapter = event.adapter


def _sections(settings: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Sort flat settings into the configuration's sections; `resolve` reports unknown ones."""
    known = {
        item.name: section.name
        for section in fields(Settings)
        for item in fields(getattr(Settings(), section.name))
    }
    flags: dict[str, dict[str, Any]] = {}
    for name, value in settings.items():
        flags.setdefault(known.get(name, "model"), {})[name] = value
    return flags
