"""Samples as token sequences for training and scoring.

A served answer keeps its token ids. It keeps its end token only if the model produced it.
Everything else is tokenised here: prompt and completion apart, as TRL does, and the completion ends
as the chat template ends an assistant's turn. Knows no store and no engine. Invariant: nothing is
ever truncated; a sample that does not fit is refused with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tandem.core.errors import InvalidRequest
from tandem.core.learning import AnswerTokens, Ending, Sample, SampleKind, ServedTokens
from tandem.services.answering.tokenizer import Tokenizer

_WRITTEN = ServedTokens("", ())
"""Nothing of it was served."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The longest sample: `sample_tokens` by configuration, `model_tokens` of one sequence,
    `recording_tokens` of all sequences of one micro-batch (0: not known)."""

    sample_tokens: int
    model_tokens: int
    recording_tokens: int = 0

    @property
    def named(self) -> tuple[tuple[int, str], ...]:
        """What bounds a prompt and an answer together, with the name of each."""
        return (
            (self.sample_tokens, "learning.max_sample_tokens"),
            (self.model_tokens, "the model's context"),
        )


@dataclass(frozen=True, slots=True)
class Encoded:
    """One sample in tokens. `chosen` and `rejected` are completions of `prompt`."""

    sample_id: str
    kind: SampleKind
    prompt: tuple[int, ...]
    chosen: tuple[int, ...]
    rejected: tuple[int, ...] = ()
    desirable: bool = True
    weight: float = 1.0

    @property
    def rows(self) -> int:
        """Rows that a step forwards for it, a mismatched partner not counted."""
        rows = len(self.prompt) + len(self.chosen) - 1
        return rows + (len(self.prompt) + len(self.rejected) - 1 if self.rejected else 0)


class Encoder:
    """Encodes samples for one model; the first of `end_tokens` ends a completion without an end."""

    def __init__(self, tokenizer: Tokenizer, end_tokens: Sequence[int], limits: Limits) -> None:
        self._tokenizer = tokenizer
        self._end_tokens = frozenset(end_tokens)
        self._default_end = tuple(end_tokens[:1])
        self._limits = limits

    @property
    def most_tokens(self) -> int:
        """Longest sequence that the model accepts, in tokens."""
        return self._limits.model_tokens

    def encode(self, sample: Sample) -> Encoded:
        """Tokens of a sample. Raises `InvalidRequest` that says why it cannot be trained on."""
        served = sample.served or _WRITTEN
        if self._knows(served):
            prompt = served.prompt
        else:
            turns = "".join(message["content"] for message in sample.messages)
            self._refuse_long(turns or sample.prompt)
            prompt = self._prompt(sample.messages, sample.prompt)
        chosen = self._answer(sample, sample.chosen, served.chosen, "the answer")
        rejected: tuple[int, ...] = ()
        if sample.kind is SampleKind.DPO:
            what = "the rejected answer"
            rejected = self._answer(sample, sample.rejected, served.rejected, what)
            if rejected == chosen:
                raise InvalidRequest("the preferred and the rejected answer are the same")
        encoded = Encoded(
            sample.sample_id,
            sample.kind,
            prompt,
            chosen,
            rejected,
            sample.desirable,
            sample.weight,
        )
        self._check(encoded)
        return encoded

    def completion(
        self, messages: Sequence[Mapping[str, str]], prompt: str, answer: str
    ) -> tuple[int, ...]:
        """Tokens of an answer to `messages` (or to a plain `prompt`), its end included."""
        text = answer
        if messages:
            opened = self._tokenizer.render_chat(messages)
            turn = {"role": "assistant", "content": answer}
            whole = self._tokenizer.render_chat([*messages, turn], add_generation_prompt=False)
            # A template that rewrites earlier turns, or opens reasoning that a finished turn does
            # not show, leaves no common beginning.
            begins = whole.startswith(opened)
            text = whole.removeprefix(opened) if begins else self._thought(opened, answer) + answer
        tokens = self._tokenizer.encode(text, add_special_tokens=False)
        ends = [place for place, token in enumerate(tokens) if token in self._end_tokens]
        return tokens[: ends[-1] + 1] if ends else tokens + self._default_end

    def _thought(self, opened: str, answer: str) -> str:
        """What ends the reasoning that `opened` has begun, unless the answer ends it itself."""
        tokenizer, before = self._tokenizer, self._tokenizer.opening
        if tokenizer.format.shipped is not None:
            before = tokenizer.markers.decode(tokenizer.encode(opened, add_special_tokens=False))
        try:
            end = "".join(tokenizer.format.thought_ends(before))
        except ValueError as error:
            raise InvalidRequest(
                "the prompt of this model begins its reasoning, and the tokenizer's response "
                f"template does not say how it ends: {error}"
            ) from error
        return "" if end.strip() in answer else end

    def prompt(self, messages: Sequence[Mapping[str, str]], prompt: str) -> tuple[int, ...]:
        """Tokens in front of an answer, as a request for it would have them."""
        return self._prompt(messages, prompt)

    def text(self, tokens: Sequence[int]) -> str:
        """An answer as its reader sees it."""
        return self._tokenizer.decode(tokens).strip()

    def ends(self, tokens: Sequence[int]) -> bool:
        """Whether the model has ended this answer."""
        return bool(tokens) and tokens[-1] in self._end_tokens

    def _prompt(self, messages: Sequence[Mapping[str, str]], prompt: str) -> tuple[int, ...]:
        if messages:
            tokens = self._tokenizer.encode_chat(messages)
        else:
            tokens = self._tokenizer.encode(prompt)
        if not tokens:
            raise InvalidRequest("the prompt is empty")
        return tokens

    def _answer(
        self, sample: Sample, answer: str, served: AnswerTokens | None, what: str
    ) -> tuple[int, ...]:
        if not answer.strip():
            raise InvalidRequest(f"{what} is empty")
        if served is not None and self._knows(sample.served or _WRITTEN):
            return served.ids
        self._refuse_long(answer)
        tokens = self.completion(sample.messages, sample.prompt, answer)
        if served is not None and served.ending is not Ending.MODEL:
            return tokens[:-1] if tokens[-1] in self._end_tokens else tokens
        return tokens

    def _knows(self, served: ServedTokens) -> bool:
        """Whether these are ids of this model's tokenizer, which may have changed since."""
        return served.tokenizer == self._tokenizer.identity

    def _refuse_long(self, text: str) -> None:
        """Refuse before tokenising: tokens need a hundred times the memory of the text."""
        limit, name = min(self._limits.named)
        if self._tokenizer.exceeds(text, limit):
            told = f"the tokens of {len(text)} characters"
            raise InvalidRequest(f"{told} are more than {name} allows ({limit})")

    def _check(self, encoded: Encoded) -> None:
        longest = len(encoded.prompt) + max(len(encoded.chosen), len(encoded.rejected))
        for limit, name in self._limits.named:
            if longest > limit:
                raise InvalidRequest(f"{longest} tokens are more than {name} allows ({limit})")
        room = self._limits.recording_tokens
        if room and encoded.rows > room:
            raise InvalidRequest(f"{encoded.rows} rows do not fit into {room} recorded rows")
