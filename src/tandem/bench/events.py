"""OpenAI's streamed answers, read for timing: which events had output, and the reported usage.

Takes body bytes in any division and the time at which they came. Knows nothing of HTTP. Invariant:
an event counts as output exactly if it has text or stands for a token without text.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec


class Usage(msgspec.Struct):
    """Token counts as the server reports them."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    @property
    def carries_output(self) -> bool:
        """Text, or an empty piece that is neither the opening role nor the closing reason.

        A token that ends within a character has no text of its own yet.
        """
        text, opens = self.text, False
        if self.delta is not None:
            text = self.delta.reasoning_content or self.delta.content
            opens = self.delta.role is not None
        if text:
            return True
        return text is not None and not opens and self.finish_reason is None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: Usage | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(_Event)


@dataclass(slots=True)
class StreamReader:
    """Collects the facts of one stream."""

    # arrival of every event with output (several per choice if `n > 1`)
    output_s: list[float] = field(default_factory=list)
    usage: Usage | None = None
    finished: int = 0  # choices with a finish reason
    ended: bool = False  # `[DONE]` came
    error: str | None = None  # the server's own message
    _buffer: bytes = b""

    def feed(self, data: bytes, now_s: float) -> None:
        """Take more of the body, received at `now_s`. Raises `msgspec.MsgspecError` on bad JSON."""
        text = (self._buffer + data).replace(b"\r\n", b"\n")
        *complete, self._buffer = text.split(b"\n\n")
        for event in complete:
            for line in event.split(b"\n"):
                if line.startswith(b"data:"):
                    self._payload(line[5:].strip(), now_s)

    def _payload(self, payload: bytes, now_s: float) -> None:
        if payload == b"[DONE]":
            self.ended = True
            return
        event = _decoder.decode(payload)
        if event.error is not None:
            self.error = message_of(event.error)
        for choice in event.choices:
            if choice.carries_output:
                self.output_s.append(now_s)
            if choice.finish_reason is not None:
                self.finished += 1
        if event.usage is not None:
            self.usage = event.usage


def message_of(error: Any) -> str:
    """The text of OpenAI's error object, or of what a server sent instead."""
    if isinstance(error, dict):
        return str(error.get("message", error))
    return str(error)
