"""Deltas as OpenAI's JSON: whole answers, stream chunks, log-probabilities, usage.

Pure functions and two small encoders; knows shapes only. Plain dicts go through msgspec, because
a chunk is encoded for every token. Invariant: chat and completion answers differ only in what
their `Shape` says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import msgspec

from tandem.api.errors import Failure
from tandem.services.answering.answer import Usage
from tandem.services.answering.choice import CallPiece, Delta, TokenText

Json = dict[str, Any]


class Shape(Protocol):
    """What differs between chats and completions."""

    whole: str
    chunk: str
    opens: bool
    """Whether a choice begins with a chunk even if that has no text."""
    one_prompt: bool

    def choice(self, said: Said, logprobs: Json | None) -> Json:
        """What a whole choice says."""
        ...

    def change(self, delta: Delta | None, logprobs: Json | None, *, opening: bool) -> Json:
        """What a chunk adds (None: nothing); `opening` marks the first one of a choice."""
        ...

    def logprobs(self, tokens: Sequence[TokenText]) -> Json:
        """Log-probabilities of a whole choice or a chunk."""
        ...


class ChatShape:
    """OpenAI's `chat.completion`."""

    whole = "chat.completion"
    chunk = "chat.completion.chunk"
    opens = True
    one_prompt = True

    def choice(self, said: Said, logprobs: Json | None) -> Json:
        """A message of the assistant; its content is null if it only calls tools."""
        content = said.text if said.text or not said.calls else None
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        message |= _reasoning(said.reasoning)
        if said.calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in said.calls
            ]
        return {"message": message, "logprobs": logprobs}

    def change(self, delta: Delta | None, logprobs: Json | None, *, opening: bool) -> Json:
        """The first chunk names the role; a chunk without new text has no content."""
        added: Json = {"role": "assistant", "content": ""} if opening else {}
        if delta is not None:
            if delta.text:
                added["content"] = delta.text
            added |= _reasoning(delta.reasoning)
            if delta.call is not None:
                added["tool_calls"] = [_call_chunk(delta.call)]
        return {"delta": added, "logprobs": logprobs}

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
    opens = False
    one_prompt = False

    def choice(self, said: Said, logprobs: Json | None) -> Json:
        """The text."""
        return {"text": said.text, "logprobs": logprobs}

    def change(self, delta: Delta | None, logprobs: Json | None, *, opening: bool) -> Json:
        """The same for every chunk."""
        return {"text": "" if delta is None else delta.text, "logprobs": logprobs}

    def logprobs(self, tokens: Sequence[TokenText]) -> Json:
        """Parallel lists; the chosen token is always among its alternatives."""
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [_alternatives(token) for token in tokens],
            "text_offset": [token.offset for token in tokens],
        }


def _reasoning(text: str) -> Json:
    """Under vLLM's name, and under the one that most other servers use."""
    return {"reasoning": text, "reasoning_content": text} if text else {}


def _call_chunk(piece: CallPiece) -> Json:
    if not piece.id:
        return {"index": piece.index, "function": {"arguments": piece.arguments}}
    function = {"name": piece.name, "arguments": piece.arguments}
    return {"index": piece.index, "id": piece.id, "type": "function", "function": function}


def _entry(token: TokenText) -> Json:
    return {"token": token.text, "logprob": _finite(token.logprob), "bytes": list(token.raw)}


def _alternatives(token: TokenText) -> dict[str, float | None] | None:
    if token.logprob is None:
        return None
    found = {other.text: _finite(other.logprob) for other in token.top}
    return {**found, token.text: _finite(token.logprob)}


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
    """Fields that a whole answer and each chunk of a stream begin with; `prompts` in token ids,
    of which each has `n` choices. `tier` is the service tier (empty: none was asked for)."""

    id: str
    created_s: int
    model: str
    fingerprint: str
    prompts: Sequence[Sequence[int]] = ()
    n: int = 1
    tier: str = ""

    def prompt_of(self, index: int) -> Sequence[int]:
        """The prompt of a choice."""
        return self.prompts[index // self.n]

    def json(self, kind: str) -> Json:
        """A new object of that kind."""
        made = {
            "id": self.id,
            "object": kind,
            "created": self.created_s,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }
        return made | {"service_tier": self.tier} if self.tier else made


@dataclass(frozen=True, slots=True)
class Extras:
    """What a client wants beside the text: log-probabilities, token ids, and in a stream the usage
    at its end or in every chunk."""

    logprobs: bool = False
    token_ids: bool = False
    usage: bool = False
    running_usage: bool = False


NOTHING_MORE = Extras()


@dataclass(frozen=True, slots=True)
class Said:
    """What a whole choice says; pieces of its calls are joined."""

    text: str
    reasoning: str = ""
    calls: Sequence[CallPiece] = ()


@dataclass(slots=True)
class Gathered:
    """A choice while its deltas come."""

    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, list[CallPiece]] = field(default_factory=dict)
    tokens: list[TokenText] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    last: Delta | None = None

    def add(self, delta: Delta) -> None:
        """Add what it gained."""
        self.texts.append(delta.text)
        self.reasoning.append(delta.reasoning)
        self.tokens.extend(delta.tokens)
        self.ids.extend(delta.token_ids)
        self.last = delta
        if delta.call is not None:
            self.calls.setdefault(delta.call.index, []).append(delta.call)

    def said(self) -> Said:
        """All of it."""
        calls = [
            replace(pieces[0], arguments="".join(piece.arguments for piece in pieces))
            for pieces in self.calls.values()
        ]
        return Said("".join(self.texts), "".join(self.reasoning), calls)


class WholeAnswer:
    """Gathers deltas into one JSON answer."""

    def __init__(self, shape: Shape, wants: Extras) -> None:
        self._shape = shape
        self._wants = wants
        self._choices: dict[int, Gathered] = {}

    def add(self, delta: Delta) -> None:
        """Add what one choice gained."""
        self._choices.setdefault(delta.index, Gathered()).add(delta)

    def encode(self, header: Header, usage: Usage) -> bytes:
        """The body of the answer."""
        choices = [self._choice(header, index) for index in sorted(self._choices)]
        body = {**header.json(self._shape.whole), "choices": choices, "usage": usage_json(usage)}
        if self._wants.token_ids and self._shape.one_prompt:
            body["prompt_token_ids"] = header.prompts[0]
        return msgspec.json.encode(body)

    def _choice(self, header: Header, index: int) -> Json:
        choice = self._choices[index]
        logprobs = self._shape.logprobs(choice.tokens) if self._wants.logprobs else None
        content = self._shape.choice(choice.said(), logprobs)
        found = {"index": index, **content, **_ending(choice.last)}
        if self._wants.token_ids:
            found["token_ids"] = choice.ids
            if not self._shape.one_prompt:
                found["prompt_token_ids"] = header.prompt_of(index)
        return found


class ChunkEncoder:
    """Makes each delta one server-sent event, and the end of a choice an event of its own."""

    def __init__(self, shape: Shape, wants: Extras) -> None:
        self._shape = shape
        self._wants = wants
        self._opened: set[int] = set()
        self._told_prompt = False

    def delta(self, header: Header, delta: Delta, usage: Usage) -> bytes:
        """The events of one delta; nothing if it would tell the client nothing."""
        opening, events = delta.index not in self._opened, b""
        self._opened.add(delta.index)
        told = bool(delta.text or delta.reasoning or delta.call or delta.tokens)
        told = told or (self._wants.token_ids and bool(delta.token_ids))
        if told or (opening and self._shape.opens):
            logprobs = None
            if self._wants.logprobs and delta.tokens:
                logprobs = self._shape.logprobs(delta.tokens)
            choice = {
                "index": delta.index,
                **self._shape.change(delta, logprobs, opening=opening),
                "finish_reason": None,
            }
            if self._wants.token_ids:
                choice["token_ids"] = list(delta.token_ids)
                if opening and not self._shape.one_prompt:
                    choice["prompt_token_ids"] = header.prompt_of(delta.index)
            events = self._chunk(header, choice, usage)
        if delta.finish_reason is not None:
            # OpenAI's streams end a choice with a chunk that adds nothing to it.
            choice = {
                "index": delta.index,
                **self._shape.change(None, None, opening=False),
                **_ending(delta),
            }
            events += self._chunk(header, choice, usage)
        return events

    def _chunk(self, header: Header, choice: Json, usage: Usage) -> bytes:
        chunk = {**header.json(self._shape.chunk), "choices": [choice]}
        if self._wants.token_ids and self._shape.one_prompt and not self._told_prompt:
            self._told_prompt = True
            chunk["prompt_token_ids"] = header.prompts[0]
        if self._wants.running_usage:
            chunk["usage"] = usage_json(usage)
        elif self._wants.usage:
            chunk["usage"] = None
        return event(chunk)

    def end(self, header: Header, usage: Usage) -> bytes:
        """The usage, when the client asked for it, and OpenAI's mark."""
        if not self._wants.usage:
            return DONE
        body = {**header.json(self._shape.chunk), "choices": [], "usage": usage_json(usage)}
        return event(body) + DONE

    def failed(self, told: Failure) -> bytes:
        """The error, and OpenAI's mark."""
        return event(told.body) + DONE


@dataclass(frozen=True, slots=True)
class OpenAIDialect:
    """Chats and completions, as `shape` says, with what the client `wants` beside the text."""

    shape: Shape
    wants: Extras

    def whole(self) -> WholeAnswer:
        """For one answer."""
        return WholeAnswer(self.shape, self.wants)

    def stream(self) -> ChunkEncoder:
        """For one answer."""
        return ChunkEncoder(self.shape, self.wants)


def _ending(last: Delta | None) -> Json:
    if last is None:
        return {"finish_reason": None, "stop_reason": None}
    reason = "tool_calls" if last.called else last.finish_reason
    return {"finish_reason": reason, "stop_reason": last.stop_reason}


def event(body: Json) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


DONE = b"data: [DONE]\n\n"
