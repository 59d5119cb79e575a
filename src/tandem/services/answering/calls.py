"""Tool calls out of the text that a model writes for them, while it comes.

Takes JSON objects with a name and arguments, alone or in a list, and Mistral's names that stand
before their arguments. The arguments are handed on as the model writes them, unless an object puts
them before its name; so they are JSON exactly if the model wrote JSON. Knows neither markers around
the text nor ids. Invariant: the pieces depend on the text, not on how it was cut.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

# An object up to the brace of its arguments, where its name comes first.
_HEAD = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*\{'
)
_BETWEEN = frozenset("[],; \t\r\n")
_NO_ARGUMENTS = "{}"


@dataclass(frozen=True, slots=True)
class Piece:
    """A new call of this `name`, or more of the `arguments` of the last one."""

    name: str = ""
    arguments: str = ""


class CallScanner:
    """Finds the calls of functions called `names` in one stretch of text; `found` counts them."""

    def __init__(self, names: Collection[str]) -> None:
        self.found = 0
        self._names = names
        self._before = ""  # a name that stands before its arguments
        self._object: list[str] = []
        self._depth = 0
        self._quoted = self._escaped = False
        self._streams_at = 0  # the depth inside the arguments' brace, while they are handed on
        self._headed = False  # the head was read, for better or worse
        self._known = False  # nothing that an object's end could tell is missing

    @property
    def open(self) -> bool:
        """Whether what came last is half an object, or a name without its arguments."""
        return self._depth > 0 or bool(self._before)

    def push(self, text: str) -> list[Piece]:
        """The pieces in more text."""
        made: list[Piece] = []
        run: list[str] = []
        for character in text:
            if self._depth == 0 and character != "{":
                if self._before or character not in _BETWEEN:
                    self._before += character
                continue
            if self._depth == 0:
                made += self._begin()
            self._count(character)
            if self._streams_at:
                run.append(character)
                if self._depth < self._streams_at:
                    self._streams_at = 0
                    made.append(Piece(arguments="".join(run)))
                    run.clear()
                continue
            if not self._known:
                self._object.append(character)
            if self._depth == 2 and character == "{" and not (self._headed or self._quoted):
                made += self._read_head()
                run += "{" if self._streams_at else ""
            elif self._depth == 0:
                made += self._end()
        return [*made, Piece(arguments="".join(run))] if run else made

    def _begin(self) -> list[Piece]:
        """An object begins: a call, or the arguments of the name before it."""
        name, self._before = self._before.partition("[")[0].strip(), ""
        self._object = []
        self._headed = self._known = bool(name)
        return self._called(name, 1) if name else []

    def _read_head(self) -> list[Piece]:
        self._headed = True
        head = _HEAD.fullmatch("".join(self._object))
        if head is None:
            return []
        self._known = True
        return self._called(_decoded(head[1]), 2)

    def _called(self, name: Any, depth: int) -> list[Piece]:
        if name not in self._names:
            return []
        self._streams_at = depth
        self.found += 1
        return [Piece(name)]

    def _end(self) -> list[Piece]:
        """An object is complete; if its head was of another form, it is read now."""
        if self._known:
            return []
        called = _decoded("".join(self._object))
        if isinstance(called, dict) and isinstance(called.get("function"), dict):
            called = called["function"]
        found = call_of(called, self._names) if isinstance(called, dict) else None
        if found is None:
            return []
        self.found += 1
        return [Piece(found[0]), Piece(arguments=found[1])]

    def _count(self, character: str) -> None:
        if self._escaped:
            self._escaped = False
        elif self._quoted:
            self._escaped = character == "\\"
            self._quoted = character != '"'
        elif character == '"':
            self._quoted = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1


def call_of(called: dict[str, Any], names: Collection[str]) -> tuple[str, str] | None:
    """Name and arguments of a call that was read as a whole; None if it is none."""
    name = called.get("name")
    if not isinstance(name, str) or name not in names:
        return None
    arguments = called.get("arguments", called.get("parameters"))
    if arguments is None or arguments == "":
        return name, _NO_ARGUMENTS
    if isinstance(arguments, str):
        return name, arguments
    return name, json.dumps(arguments, ensure_ascii=False)


def _decoded(text: str) -> Any:
    """None for what is not JSON."""
    try:
        return from_json(text)
    except ValueError:
        return None
