"""Use from Python without a server: `LLM("demo").generate([...])` and `LLM("demo").learn(...)`.

The same loop, scheduler and executor as behind the server, stepped in this thread. Knows text only
as far as the model's tokenizer turns prompts into token ids and back; keeps nothing but the
adapters that it is told to write.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import count
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from tandem.adapters.files import inspect_adapter
from tandem.build import build_loop, resolve_model
from tandem.config import Settings, resolve
from tandem.core.errors import InvalidRequest, TandemError
from tandem.core.events import ModelInfo, TokenEvent
from tandem.core.learning import Sample, SampleKind
from tandem.core.plan import TokenLogprob
from tandem.core.request import Request
from tandem.core.sampling import SamplingParams
from tandem.core.sequence import FinishReason
from tandem.core.training import (
    Role,
    Score,
    ScoreRequest,
    StepOutcome,
    TrainerSpec,
    TrainingSequence,
    TrainingStep,
)
from tandem.core.version import AdapterVersion
from tandem.services.answering.tokenizer import Tokenizer
from tandem.services.learning.encode import Encoded, Encoder, Limits
from tandem.services.learning.families import micro_batches, sequences_of
from tandem.services.learning.settings import LearningSettings, defaults, resolve_settings
from tandem.services.learning.steps import cut_steps, evidence

Prompt = str | Sequence[int]
_Ended = TypeVar("_Ended", StepOutcome, Score)
_LONGEST_PAUSE_S = 0.05


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


@dataclass(frozen=True, slots=True)
class Example:
    """An answer to learn from: to a conversation, or to a plain prompt where it is a string.

    With `rejected` the better of two (DPO), with `desirable` a judged one (KTO), else one to
    imitate (SFT). Raises `InvalidRequest` for both.
    """

    messages: str | Sequence[dict[str, str]]
    answer: str
    rejected: str = ""
    desirable: bool | None = None
    weight: float = 1.0

    def __post_init__(self) -> None:
        if self.rejected and self.desirable is not None:
            raise InvalidRequest("send either 'rejected' or 'desirable'", param="desirable")

    @property
    def kind(self) -> SampleKind:
        """Which loss it is for."""
        if self.rejected:
            return SampleKind.DPO
        return SampleKind.SFT if self.desirable is None else SampleKind.KTO


@dataclass(frozen=True, slots=True)
class Lesson:
    """What `learn` did: the version that serves now, and the loss of each step before its update.

    A step whose loss was not finite changed nothing; it is counted in `left_out`.
    """

    version: AdapterVersion
    losses: tuple[float, ...]
    left_out: int = 0


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
            self._loop.adapters.load(name, path)

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
        return self._loop.adapters.load(name, path)

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
                self._loop.read_request(request)()
            except TandemError:
                self._abort(outputs)
                raise
            choices = [Completion(index, [], "", [], None) for index in range(n)]
            outputs[request_id] = GenerationOutput(tokens, choices, [], None)
        try:
            left = n * len(outputs)
            while left:
                self._pause()
                for event in self._loop.step():
                    _take(event, outputs[event.request_id])
                    left -= event.finish_reason is not None
            self._loop.land()
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

    def learn(
        self, adapter: str, examples: Sequence[Example], path: str, **settings: Any
    ) -> Lesson:
        """Train LoRA adapter `adapter` on `examples` of one kind, and serve it from then on.

        It goes on from the adapter of that name if there is one, and is written to the new
        directory `path`, as PEFT reads it. `settings` are those of `tandem.services.learning`
        (`epochs`, `learning_rate`, `beta`, `rank`, `batch_samples` ...); the reference is the base
        model. Raises `InvalidRequest` before anything runs if an example or a setting does not
        fit or `path` exists, `AdapterError` if the adapter cannot be trained or written,
        `TandemError` if the loss of no step was finite; then `adapter` is what it was.
        """
        chosen = resolve_settings(defaults(self._settings.learning), settings)
        if Path(path).exists():
            raise InvalidRequest(f"{path} exists already; name a new directory", param="path")
        encoded = self._encode(examples, chosen)
        current = self._loop.adapters.current.get(adapter)
        spec = TrainerSpec(
            adapter, chosen.lora, chosen.optimizer(), source=current.path if current else ""
        )
        self._loop.teaching.open_trainer(spec)
        try:
            outcomes = self._train(adapter, encoded, chosen)
            if not any(outcome.applied for outcome in outcomes):
                raise TandemError("nothing was learned: the loss of no step was finite")
            snapshot = self._loop.teaching.snapshot_trainer(adapter)
            snapshot.write(path)
            files = inspect_adapter(path)
            version = self._loop.adapters.adopt(
                snapshot, adapter, str(files.path), files.content_hash
            )
        finally:
            self._loop.teaching.close_trainer(adapter)
            self._loop.teaching.take_learned()
        losses = tuple(outcome.loss for outcome in outcomes)
        return Lesson(version, losses, sum(not outcome.applied for outcome in outcomes))

    def _encode(self, examples: Sequence[Example], settings: LearningSettings) -> list[Encoded]:
        kinds = {example.kind for example in examples}
        if len(kinds) != 1:
            raise InvalidRequest(
                f"learn from examples of one kind, not of {len(kinds)}", param="examples"
            )
        liked = sum(example.desirable is not False for example in examples)
        if liked * settings.batch_samples < len(examples):
            raise InvalidRequest(
                f"{liked} of {len(examples)} examples are liked: a step of dislikes alone breaks a "
                "model; add liked answers, or raise batch_samples",
                param="examples",
            )
        info = self.info
        limits = Limits(settings.max_sample_tokens, info.max_model_len, info.recording_tokens)
        encoder = Encoder(self._tokenizer, info.eos_token_ids, limits)
        return [encoder.encode(_sample(place, each)) for place, each in enumerate(examples)]

    def _train(
        self, adapter: str, encoded: Sequence[Encoded], settings: LearningSettings
    ) -> list[StepOutcome]:
        """All epochs, each in another order; references are scored once."""
        known: dict[TrainingSequence, float] = {}
        outcomes: list[StepOutcome] = []
        for epoch in range(settings.epochs):
            order = list(encoded)
            Random(epoch).shuffle(order)
            for part in cut_steps(order, settings.batch_samples, lambda each: each.desirable):
                batches = self._batches(part, settings)
                self._score([each for batch in batches for each in batch], known)
                filled = tuple(
                    tuple(replace(each, reference=known.get(each, 0.0)) for each in batch)
                    for batch in batches
                )
                step_id = f"llm-{next(self._ids)}"
                loss = settings.loss(encoded[0].kind)
                scale = evidence([each.weight for each in part], settings.batch_samples)
                self._loop.teaching.add_step(
                    TrainingStep(step_id, adapter, loss, filled, scale=scale)
                )
                outcomes += self._finish(1, StepOutcome)
        return outcomes

    def _batches(
        self, step: Sequence[Encoded], settings: LearningSettings
    ) -> list[tuple[TrainingSequence, ...]]:
        rows = self.info.recording_tokens
        cut = micro_batches(step, settings.micro_batch_samples, rows)
        partners = [step[-1], *(batch[-1] for batch in cut)]
        most = self.info.max_model_len
        return [sequences_of(batch, partners[place], most) for place, batch in enumerate(cut)]

    def _score(
        self, sequences: Sequence[TrainingSequence], known: dict[TrainingSequence, float]
    ) -> None:
        """Add what the base model gives to those that need a reference and are not known."""
        wanted = {
            f"llm-{next(self._ids)}": each
            for each in dict.fromkeys(sequences)
            if each.role is not Role.TARGET and each not in known
        }
        for request_id, each in wanted.items():
            self._loop.teaching.add_score(ScoreRequest(request_id, each.tokens, each.prompt_tokens))
        for score in self._finish(len(wanted), Score):
            known[wanted[score.request_id]] = score.logprob

    def _finish(self, number: int, kind: type[_Ended]) -> list[_Ended]:
        """Step until so many have ended. Raises `TandemError` if one failed or none will run."""
        ended: list[_Ended] = []
        while len(ended) < number:
            self._pause()
            self._loop.step()
            for each in self._loop.teaching.take_learned():
                if not isinstance(each, kind):
                    raise TandemError(f"learning failed: {each}")
                ended.append(each)
        return ended

    def _pause(self) -> None:
        """Wait while the policy lets everything wait. Raises `TandemError` if that is for ever."""
        pause_s = self._loop.pause_s
        if pause_s == float("inf"):
            policy = self._settings.scheduling.policy
            raise TandemError(f"the policy {policy} lets nothing be learned")
        if pause_s > 0.0:
            time.sleep(min(pause_s, _LONGEST_PAUSE_S))

    def _abort(self, outputs: dict[str, GenerationOutput]) -> None:
        for request_id in outputs:
            self._loop.abort(request_id)


def _sample(place: int, example: Example) -> Sample:
    given = example.messages
    messages, prompt = ((), given) if isinstance(given, str) else (given, "")
    return Sample(
        sample_id=str(place),
        feedback_id="",
        adapter="",
        kind=example.kind,
        created_s=0.0,
        messages=tuple(dict(turn) for turn in messages),
        prompt=prompt,
        chosen=example.answer,
        rejected=example.rejected,
        desirable=example.desirable is not False,
        weight=example.weight,
    )


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
