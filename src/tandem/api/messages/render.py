"""Answers in Anthropic's shape: a message of blocks, or its server-sent events.

Both are made by one list of blocks, so that a stream adds up to the whole message. Invariant: of a
stream's blocks one is open at a time, and each is closed before the next begins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from pydantic_core import from_json

from tandem.api.errors import MESSAGES, Failure
from tandem.api.parts import Parts
from tandem.api.render import Header, Json
from tandem.core.sequence import FinishReason
from tandem.services.answering.answer import Usage
from tandem.services.answering.choice import Delta

_FIELDS = {"text": "text", "thinking": "thinking", "tool_use": "input"}
_DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}


@dataclass(slots=True)
class _Block:
    """One block; `parts` are texts that join to its text, thinking or the JSON of its input."""

    kind: str
    id: str = ""
    name: str = ""
    parts: list[str] = field(default_factory=list)

    def begin(self) -> Json:
        """It, with nothing in it."""
        if self.kind == "tool_use":
            return {"type": self.kind, "id": self.id, "name": self.name, "input": {}}
        empty: Json = {"type": self.kind, _FIELDS[self.kind]: ""}
        return {**empty, "signature": ""} if self.kind == "thinking" else empty

    def whole(self) -> Json:
        """All of it; the input of a call that was cut or is no object is empty."""
        text = "".join(self.parts)
        return {**self.begin(), _FIELDS[self.kind]: self._input(text)}

    def _input(self, text: str) -> Any:
        if self.kind != "tool_use":
            return text
        try:
            decoded = from_json(text)
        except ValueError:
            return {}
        return decoded if isinstance(decoded, dict) else {}


def _blocks() -> Parts[_Block]:
    return Parts(("text", "thinking", "tool_use"), lambda _, kind, *call: _Block(kind, *call))


class WholeMessage:
    """Gathers deltas into one message."""

    def __init__(self) -> None:
        self._blocks = _blocks()
        self._last: Delta | None = None

    def add(self, delta: Delta) -> None:
        """Add what it gained."""
        self._blocks.take(delta)
        self._last = delta

    def encode(self, header: Header, usage: Usage) -> bytes:
        """The body of the answer."""
        assert self._last is not None
        message = {**_message(header, usage), **_ending(self._last)}
        message["content"] = [block.whole() for block in self._blocks.all]
        return msgspec.json.encode(message)


class MessageEvents:
    """Writes deltas as Anthropic's events."""

    def __init__(self) -> None:
        self._blocks = _blocks()
        self._begun = False
        self._open: int | None = None

    def delta(self, header: Header, delta: Delta, usage: Usage) -> bytes:
        """The events of one delta."""
        events = b""
        if not self._begun:
            self._begun = True
            events += _event("message_start", message=_message(header, usage)) + _event("ping")
        begins, gained = self._blocks.take(delta)
        if begins:
            events += self._close()
            self._open = len(self._blocks.all) - 1
            block = self._blocks.all[-1].begin()
            events += _event("content_block_start", index=self._open, content_block=block)
        if gained:
            kind, name = _DELTAS[self._blocks.all[-1].kind]
            change = {"type": kind, name: gained}
            events += _event("content_block_delta", index=self._open, delta=change)
        if delta.finish_reason is not None:
            events += self._close()
            events += _event("message_delta", delta=_ending(delta), usage=_usage(usage))
        return events

    def end(self, header: Header, usage: Usage) -> bytes:
        """The last event."""
        return _event("message_stop")

    def failed(self, told: Failure) -> bytes:
        """The error as an event."""
        return _event("error", **told.told_on(MESSAGES).body)

    def _close(self) -> bytes:
        """End the block that is open."""
        if self._open is None:
            return b""
        index, self._open = self._open, None
        return _event("content_block_stop", index=index)


class MessagesDialect:
    """/v1/messages."""

    def whole(self) -> WholeMessage:
        """For one answer."""
        return WholeMessage()

    def stream(self) -> MessageEvents:
        """For one answer."""
        return MessageEvents()


def _message(header: Header, usage: Usage) -> Json:
    return {
        "id": header.id,
        "type": "message",
        "role": "assistant",
        "model": header.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(usage),
    }


def _ending(last: Delta) -> Json:
    """Why it ended, in Anthropic's words."""
    stop = last.stop_reason if isinstance(last.stop_reason, str) else None
    reason = "end_turn"
    if last.finish_reason is FinishReason.LENGTH:
        reason = "max_tokens"
    elif last.called:
        reason = "tool_use"
    elif stop is not None:
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": stop}


def _usage(usage: Usage) -> Json:
    """Tokens; those of the prompt that were found in the cache are counted apart."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _event(kind: str, **body: Any) -> bytes:
    told: Mapping[str, Any] = {**body, "type": kind}
    return b"event: " + kind.encode() + b"\ndata: " + msgspec.json.encode(told) + b"\n\n"
