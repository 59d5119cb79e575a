"""Token ids to text while they are generated, and stop strings in that text.

Knows one choice at a time. Invariants: the pieces that `Detokenizer` hands out join to the text
of all tokens; text that could still become a stop string is held back; the cost of a token does
not depend on how many came before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

_REPLACEMENT = "\ufffd"
# Tokens that decode differently at the start of a text (a dropped leading space) need neighbours.
_CONTEXT_TOKENS = 6
_CHARACTER_TOKENS = 4  # at most: a UTF-8 character has so many bytes
# So this many undecodable tokens are plainly not UTF-8.
_MAX_PENDING_TOKENS = 8


class Decoder(Protocol):
    """The part of a tokenizer that is needed here."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of `tokens`; incomplete UTF-8 becomes U+FFFD."""
        ...


class Detokenizer:
    """Turns the tokens of one choice into text, as soon as each character is certain.

    A window of a few tokens is decoded with and without the newest ones and the difference is
    new. `context` (the prompt's tokens) decides whether the first piece keeps its leading space.
    `begun` says whether it ends within a character; else a U+FFFD at its end is a character.
    """

    def __init__(
        self, decoder: Decoder, context: Sequence[int] = (), *, begun: bool = False
    ) -> None:
        self._decoder = decoder
        self._window = self._newest(context)
        self._settled = len(self._window)
        self._shown = self._begun() if begun else len(self._decode(self._window))

    def push(self, token: int) -> str:
        """Add one token; the text that is now certain (may be empty)."""
        self._window.append(token)
        text = self._decode(self._window)
        certain = text.rstrip(_REPLACEMENT)
        overdue = len(self._window) - self._settled > _MAX_PENDING_TOKENS
        if overdue:
            certain = text
        new = certain[self._shown :]
        self._shown = max(self._shown, len(certain))
        if len(certain) == len(text):
            self._slide()
        return new

    def finish(self, *, whole: bool = False) -> str:
        """The rest: characters that never became complete, as U+FFFD; with `whole`, not even so."""
        text = self._decode(self._window)
        if whole:
            text = text.rstrip(_REPLACEMENT)
        new = text[self._shown :]
        self._shown = max(self._shown, len(text))
        return new

    def _slide(self) -> None:
        """Everything is shown: keep only the newest tokens as context of the next."""
        if len(self._window) <= 2 * _CONTEXT_TOKENS:
            self._settled = len(self._window)
            return
        self._window = self._newest(self._window)
        self._settled = len(self._window)
        self._shown = len(self._decode(self._window))

    def _newest(self, tokens: Sequence[int]) -> list[int]:
        """The newest of `tokens`, from the beginning of a character: a decoder with byte fallback
        makes U+FFFD of a whole run of bytes that begins or ends within one."""
        for size in range(_CONTEXT_TOKENS, _CONTEXT_TOKENS + _CHARACTER_TOKENS):
            window = list(tokens[-size:])
            starts = (self._decode(window[:end]) for end in range(1, _CHARACTER_TOKENS + 1))
            if not all(start.startswith(_REPLACEMENT) for start in starts):
                return window
        return list(tokens[-_CONTEXT_TOKENS:])

    def _begun(self) -> int:
        """Characters of the window before the one that its last tokens begin."""
        ends = range(max(0, len(self._window) - _CHARACTER_TOKENS + 1), len(self._window) + 1)
        return max(len(self._decode(self._window[:end]).rstrip(_REPLACEMENT)) for end in ends)

    def _decode(self, tokens: list[int]) -> str:
        return self._decoder.decode(tokens) if tokens else ""


class StopFinder:
    """Looks for stop strings in text that arrives in pieces.

    `push` returns the text that may be shown. Once a stop string was found `stopped` is true,
    `stop` is that string, and the text before it has been handed out.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max((len(stop) for stop in self._stops), default=0)
        self._held = ""
        self._exempt = 0  # characters of what is held before which no stop string may end
        self.stopped = False
        self.stop: str | None = None

    def push(self, text: str, *, armed: bool = True) -> str:
        """Add text; what may be shown now. A stop string that ends in text that came while not
        `armed` is ordinary text; one that ends later counts, wherever it began."""
        if not self._stops:
            return text
        buffer = self._held + text
        if not armed:
            self._exempt = len(buffer)
        elif found := self._find(buffer):
            place, self.stop = min(found)
            self.stopped = True
            self._held = ""
            return buffer[:place]
        keep = self._possible_start(buffer)
        self._held = buffer[keep:]
        self._exempt = max(0, self._exempt - keep)
        return buffer[:keep]

    def _find(self, buffer: str) -> list[tuple[int, str]]:
        """Where each of the stop strings stands that ends in what may stop."""
        places = (
            (buffer.find(stop, max(0, self._exempt - len(stop) + 1)), stop) for stop in self._stops
        )
        return [(place, stop) for place, stop in places if place >= 0]

    def finish(self) -> str:
        """The choice ended by itself: what was held back is ordinary text."""
        held, self._held = self._held, ""
        return held

    def _possible_start(self, buffer: str) -> int:
        """The earliest place from which the buffer could grow into a stop string."""
        for start in range(max(0, len(buffer) - self._longest + 1), len(buffer)):
            tail = buffer[start:]
            if any(stop.startswith(tail) for stop in self._stops):
                return start
        return len(buffer)
