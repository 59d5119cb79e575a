"""The canary set: trusted prompts and answers on which no candidate may leave the base far behind.

A line of the file is `{"messages": [...]}` or `{"prompt": ...}`, with `answer` where the operator
wrote one; otherwise the base model's own greedy answer is trusted, made once and kept. Answers to
lines with `"compared": false` are only read, to see whether they are broken. Invariant:
the answers depend on the file and the base model alone. A file that cannot be used is refused
before anything is learned, and the error names the line.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from codecs import BOM_UTF8
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tandem.core.errors import InvalidRequest
from tandem.core.ports import EngineClient
from tandem.services.durable import replace_text
from tandem.services.learning.answers import (
    ANSWER_TOKENS,
    COMPARED_TOKENS,
    Answers,
    Speechless,
    beginnings,
)
from tandem.services.learning.encode import Encoder
from tandem.services.learning.gate import CanaryMeasures
from tandem.services.learning.references import Model, NotFinite, References, Scored

DEFAULT_FILE = Path(__file__).parent / "canary.jsonl"


class CanaryLine(msgspec.Struct, forbid_unknown_fields=True):
    """One line of the file."""

    messages: list[dict[str, str]] = []
    prompt: str = ""
    answer: str = ""
    compared: bool = True


@dataclass(frozen=True, slots=True)
class CanarySet:
    """The lines of a canary file; `digest` identifies its content.

    `numbers` are those of the lines in `file`, which is the one that is `shipped` or an operator's.
    """

    lines: tuple[CanaryLine, ...]
    digest: str
    numbers: tuple[int, ...]
    file: Path
    shipped: bool

    @property
    def compared(self) -> tuple[CanaryLine, ...]:
        """Lines whose answers are compared with the trusted ones."""
        return tuple(line for line in self.lines if line.compared)

    def problem(self, place: int, what: str) -> InvalidRequest:
        """The error that says what is wrong with a line."""
        return _unusable(self.file, f"line {self.numbers[place]}: {what}")


def read_canary(path: str, *, chats: bool = True) -> CanarySet:
    """The set at `path`; empty: the one that is shipped, as plain prompts for a model that `chats`
    not. Raises `InvalidRequest`."""
    file = Path(path) if path else DEFAULT_FILE
    try:
        raw = file.read_bytes().removeprefix(BOM_UTF8)
    except OSError as error:
        raise _unusable(file, str(error)) from error
    numbered = [(n, line) for n, line in enumerate(raw.splitlines(), start=1) if line.strip()]
    if not numbered:
        raise _unusable(file, "it has no lines")
    lines = tuple(_line(file, number, line) for number, line in numbered)
    if not any(line.compared for line in lines):
        raise _unusable(file, "all its lines have 'compared': false")
    digest = hashlib.sha256(raw).hexdigest()[:16]
    if not path and not chats:
        lines = tuple(
            CanaryLine(prompt=line.messages[-1]["content"], compared=line.compared)
            for line in lines
        )
        digest = f"{digest}-plain"
    return CanarySet(lines, digest, tuple(number for number, _ in numbered), file, not path)


def _line(file: Path, number: int, raw: bytes) -> CanaryLine:
    """One line. Raises `InvalidRequest` that names it."""
    try:
        line = msgspec.json.decode(raw, type=CanaryLine)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _unusable(file, f"line {number}: {error}") from error
    if bool(line.messages) == bool(line.prompt):
        raise _unusable(file, f"line {number}: give either 'messages' or 'prompt'")
    if line.answer and not line.compared:
        raise _unusable(file, f"line {number}: its 'answer' is not 'compared'")
    for turn in line.messages:
        if missing := {"role", "content"} - turn.keys():
            what = f"a message has no '{min(missing, key='role content'.find)}'"
            raise _unusable(file, f"line {number}: {what}")
    return line


def _unusable(file: Path, why: str) -> InvalidRequest:
    return InvalidRequest(f"learning.canary_file: cannot use {file}: {why}")


@dataclass(frozen=True, slots=True)
class Examined:
    """`measures`, and the answers to the canary prompts that they were taken from: the base
    model's own and the candidate's (none if it could not speak)."""

    measures: CanaryMeasures
    own: tuple[Scored, ...] = ()
    said: tuple[Scored, ...] = ()


class Canary:
    """Measures candidates on a canary set; `directory` keeps the base model's answers."""

    def __init__(
        self,
        canary: CanarySet,
        client: EngineClient,
        references: References,
        answers: Answers,
        directory: Path,
    ) -> None:
        self._set = canary
        self._client = client
        self._references = references
        self._answers = answers
        self._directory = directory

    def check(self, encoder: Encoder) -> None:
        """Whether the served model can be measured on the set. Raises `InvalidRequest` that names
        the line, of the set that is shipped as well; `EngineDead` before the engine was ready.
        """
        info = self._client.info
        most = min(info.max_model_len, info.num_blocks * info.block_size)
        for place, line in enumerate(self._set.lines):
            try:
                prompt = len(encoder.prompt(line.messages, line.prompt))
                answer = ANSWER_TOKENS
                if line.answer:
                    written = encoder.completion(line.messages, line.prompt, line.answer)
                    answer = max(answer, len(written))
            except InvalidRequest as error:
                raise self._set.problem(place, str(error)) from error
            if prompt + answer > most:
                what = (
                    f"a prompt of {prompt} tokens and an answer of up to {answer} are more than "
                    f"the model's context, {most}"
                )
                raise self._set.problem(place, what)

    @property
    def shipped(self) -> bool:
        """Whether nobody chose the set for this model."""
        return self._set.shipped

    async def measure(self, candidate: Model, encoder: Encoder) -> Examined:
        """Compare a loaded candidate with the base model.

        A candidate whose output is not finite has measures that are not numbers. Raises
        `NotFinite` of the base model, and as the engine client does.
        """
        prompts = self._prompts(encoder)
        trusted = await self._trusted(prompts, encoder)
        before = await self._base_scores(trusted)
        after = await self._references.scores(candidate, trusted)
        drop = (math.fsum(before) - math.fsum(after)) / _tokens(trusted)
        try:
            spoken = await self._answers.of(candidate, prompts)
        except Speechless:
            return Examined(CanaryMeasures(len(trusted), drop, math.nan))
        base, begun = self._references.base, beginnings(spoken)
        own = await self._answers.of(base, prompts)
        under_base = await self._references.scores(base, begun)
        longer = sum(
            max(said.completion_tokens, mine.completion_tokens)
            for said, mine in zip(begun, beginnings(own), strict=True)
        )
        # Against the base's own answers: what is trusted somebody may have written.
        divergence = await self.usual(encoder) - math.fsum(under_base) / longer
        measures = CanaryMeasures(len(trusted), drop, divergence)
        return Examined(measures, tuple(own), tuple(spoken))

    def read_only(self, encoder: Encoder) -> list[tuple[int, ...]]:
        """Prompts whose answers are compared with none."""
        lines = [line for line in self._set.lines if not line.compared]
        return [encoder.prompt(line.messages, line.prompt) for line in lines]

    async def usual(self, encoder: Encoder) -> float:
        """How likely the base finds its own answers, in nats a token (below 0). Raises `Speechless`
        and `NotFinite` of the base, and as the engine client does."""
        own = beginnings(await self._answers.of(self._references.base, self._prompts(encoder)))
        return math.fsum(await self._base_scores(own)) / _tokens(own)

    async def drop_under(self, trainer: str, encoder: Encoder) -> float:
        """How much log-probability the trusted answers have lost under the working parameters of
        `trainer`, against the base, in nats a token: an estimate of the KL divergence of the base
        from it on neutral prompts. Raises as the engine client does."""
        trusted = await self._trusted(self._prompts(encoder), encoder)
        before = await self._base_scores(trusted)
        after = await self._references.under_trainer(trainer, trusted)
        return (math.fsum(before) - math.fsum(after)) / _tokens(trusted)

    async def _base_scores(self, answers: Sequence[Scored]) -> list[float]:
        before = await self._references.scores(self._references.base, answers)
        if not math.isfinite(math.fsum(before)):
            raise NotFinite("the base model gives the canary answers no finite log-probability")
        return before

    def _prompts(self, encoder: Encoder) -> list[tuple[int, ...]]:
        return [encoder.prompt(line.messages, line.prompt) for line in self._set.compared]

    async def _trusted(self, prompts: Sequence[tuple[int, ...]], encoder: Encoder) -> list[Scored]:
        given = [
            encoder.completion(line.messages, line.prompt, line.answer) if line.answer else ()
            for line in self._set.compared
        ]
        if all(given):
            return [_scored(p, a) for p, a in zip(prompts, given, strict=True)]
        base = self._references.base
        asked = f"{base.content}:{COMPARED_TOKENS}:{prompts}"
        digest = hashlib.sha256(asked.encode()).hexdigest()[:16]
        file = self._directory / f"{self._set.digest}-{digest}.json"
        made = await asyncio.to_thread(_read_answers, file)
        if made is None or len(made) != len(prompts):
            said = beginnings(await self._answers.of(base, prompts))
            made = [item.tokens[item.prompt_tokens :] for item in said]
            await asyncio.to_thread(_write_answers, file, made)
        return [
            _scored(prompt, own or base_answer)
            for prompt, own, base_answer in zip(prompts, given, made, strict=True)
        ]


def _scored(prompt: tuple[int, ...], answer: tuple[int, ...]) -> Scored:
    return Scored(prompt + answer, len(prompt))


def _tokens(answers: Sequence[Scored]) -> int:
    return sum(answer.completion_tokens for answer in answers)


def _read_answers(file: Path) -> list[tuple[int, ...]] | None:
    try:
        return [tuple(answer) for answer in json.loads(file.read_text(encoding="utf-8"))]
    except (OSError, ValueError):
        return None


def _write_answers(file: Path, answers: Sequence[tuple[int, ...]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_text(file, json.dumps(answers))
