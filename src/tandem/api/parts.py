"""The parts of one answer while its deltas come: text, reasoning and calls, one after another.

For dialects whose answers are lists of such parts. Knows no shapes: a dialect makes its own parts
and names their kinds. Invariant: two neighbours are of different kinds, unless both are calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from tandem.services.answering.choice import Delta


class Part(Protocol):
    """One part; `parts` are the texts that it gained."""

    kind: str
    parts: list[str]


AnyPart = TypeVar("AnyPart", bound=Part)
Make = Callable[[int, str, str, str], AnyPart]
"""From a part's place, kind, and the id and name of a call."""


class Parts(Generic[AnyPart]):
    """`kinds` are the dialect's words for text, reasoning and a call."""

    def __init__(self, kinds: tuple[str, str, str], make: Make[AnyPart]) -> None:
        self.all: list[AnyPart] = []
        self._text, self._reasoning, self._call = kinds
        self._make = make

    def take(self, delta: Delta) -> tuple[bool, str]:
        """Add a delta; whether a new part begins, and what the last one gained."""
        call = delta.call
        if call is not None:
            begins, gained = bool(call.id), call.arguments
            if begins:
                self._add(self._call, call.id, call.name)
        else:
            gained = delta.text or delta.reasoning
            kind = self._text if delta.text else self._reasoning
            begins = bool(gained) and (not self.all or self.all[-1].kind != kind)
            if begins:
                self._add(kind)
        if gained:
            self.all[-1].parts.append(gained)
        return begins, gained

    def _add(self, kind: str, call_id: str = "", name: str = "") -> None:
        self.all.append(self._make(len(self.all), kind, call_id, name))
