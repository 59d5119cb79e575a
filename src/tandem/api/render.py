"""Deltas as OpenAI's JSON: whole answers, stream chunks, log-probabilities, usage.

Pure functions and two small encoders; knows shapes only. Plain dicts go through msgspec, because
a chunk is encoded for every token. Invariant: chat and completion answers differ only in what
their `Shape` says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from tandem.core.sequence import FinishReason
from tandem.services.answer import Usage
from tandem.services.choice import Delta, TokenText

Json = dict[str, Any]


class Shape(Protocol):
    """What differs between chats and completions."""

    whole: str
    chunk: str

    def choice(self, text: str, logprobs: Json | None) -> Json:
        """The text of a whole choice."""
        ...

    def change(self, text: str, logprobs: Json | None, *, opening: bool) -> Json:
        """The text of a chunk; `opening` marks the first one of a choice."""
        ...

    def logprobs(self, tokens: Sequence[TokenText]) -> Json:
        """Log-probabilities of a whole choice or a chunk."""
        ...


class ChatShape:
    """OpenAI's `chat.completion`."""

    whole = "chat.completion"
    chunk = "chat.completion.chunk"

    def choice(self, text: str, logprobs: Json | None) -> Json:
        """A message of the assistant."""
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"message": message, "logprobs": logprobs}

    def change(self, text: str, logprobs: Json | None, *, opening: bool) -> Json:
        """The first chunk names the role; a chunk without new text has no content."""
        delta: Json = {"role": "assistant", "content": text} if opening else {}
        if text:
            delta["content"] = text
        return {"delta": delta, "logprobs": logprobs}

    def logprobs(self, tokens: Sequence[TokenText]) -> Json:
        """Entries of token, log-probability, bytes and alternatives."""
        return {
            "content": [
                {**_entry(token), "top_logprobs": [_entry(other) for other in token.top]}
                for token in tokens
            ],
            "refusal": None,
        }


class CompletionShape:
    """OpenAI's older `text_completion`."""

    whole = "text_completion"
    chunk = "text_completion"

    def choice(self, text: str, logprobs: Json | None) -> Json:
        """The text."""
        return {"text": text, "logprobs": logprobs}

    def change(self, text: str, logprobs: Json | None, *, opening: bool) -> Json:
        """The same for every chunk."""
        return {"text": text, "logprobs": logprobs}

    def logprobs(self, tokens: Sequence[TokenText]) -> Json:
        """Parallel lists; the chosen token is always among its alternatives."""
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [_alternatives(token) for token in tokens],
            "text_offset": [token.offset for token in tokens],
        }


def _entry(token: TokenText) -> Json:
    return {"token": token.text, "logprob": _finite(token.logprob), "bytes": list(token.raw)}


def _alternatives(token: TokenText) -> dict[str, float | None] | None:
    if token.logprob is None:
        return None
    found = {other.text: _finite(other.logprob) for other in token.top}
    return {**found, token.text: _finite(token.logprob)} if token.top else found


def _finite(logprob: float | None) -> float | None:
    """JSON has no infinity; OpenAI writes -9999.0 for a token that cannot occur."""
    return None if logprob is None else max(logprob, -9999.0)


def usage_json(usage: Usage) -> Json:
    """OpenAI's `usage`."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


@dataclass(frozen=True, slots=True)
class Header:
    """Fields that a whole answer and each chunk of a stream begin with."""

    id: str
    created_s: int
    model: str
    fingerprint: str

    def json(self, kind: str) -> Json:
        """A new object of that kind."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created_s,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


@dataclass(slots=True)
class _Gathered:
    texts: list[str] = field(default_factory=list)
    tokens: list[TokenText] = field(default_factory=list)
    finish_reason: FinishReason | None = None


class WholeAnswer:
    """Gathers deltas into one JSON answer."""

    def __init__(self, shape: Shape, *, logprobs: bool) -> None:
        self._shape = shape
        self._logprobs = logprobs
        self._choices: dict[int, _Gathered] = {}

    def add(self, delta: Delta) -> None:
        """Add what one choice gained."""
        choice = self._choices.setdefault(delta.index, _Gathered())
        choice.texts.append(delta.text)
        choice.tokens.extend(delta.tokens)
        choice.finish_reason = delta.finish_reason

    def encode(self, header: Header, usage: Usage) -> bytes:
        """The body of the answer."""
        choices = [self._choice(index) for index in sorted(self._choices)]
        body = {**header.json(self._shape.whole), "choices": choices, "usage": usage_json(usage)}
        return msgspec.json.encode(body)

    def _choice(self, index: int) -> Json:
        choice = self._choices[index]
        logprobs = self._shape.logprobs(choice.tokens) if self._logprobs else None
        content = self._shape.choice("".join(choice.texts), logprobs)
        return {"index": index, **content, "finish_reason": choice.finish_reason}


class ChunkEncoder:
    """Makes each delta one server-sent event."""

    def __init__(self, shape: Shape, *, logprobs: bool, include_usage: bool) -> None:
        self._shape = shape
        self._logprobs = logprobs
        self._usage: Json = {"usage": None} if include_usage else {}
        self._opened: set[int] = set()

    def delta(self, header: Header, delta: Delta) -> bytes:
        """The event of one delta; nothing if it would tell the client nothing."""
        opening = delta.index not in self._opened
        if not (opening or delta.text or delta.tokens or delta.finish_reason):
            return b""
        self._opened.add(delta.index)
        logprobs = self._shape.logprobs(delta.tokens) if self._logprobs and delta.tokens else None
        change = self._shape.change(delta.text, logprobs, opening=opening)
        choice = {"index": delta.index, **change, "finish_reason": delta.finish_reason}
        chunk = {**header.json(self._shape.chunk), "choices": [choice], **self._usage}
        return event(chunk)

    def usage(self, header: Header, usage: Usage) -> bytes:
        """The last event before the end, when the client asked for usage."""
        body = {**header.json(self._shape.chunk), "choices": [], "usage": usage_json(usage)}
        return event(body)


def event(body: Json) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


DONE = b"data: [DONE]\n\n"
