"""Counts the ways in which a regular expression may match, to refuse those that take too long.

Uploaded configurations name layers by regular expressions, which Python matches by backtracking:
`(a+)+!` may take longer than any client waits. This reads a subset in which ways can be counted:
characters, classes, groups, alternatives, and repetitions of a single character. Matches nothing
itself. Invariant: a pattern that passes was counted and compiles.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from tandem.core.errors import AdapterError

_MOST_CHARS = 2000
_MOST_DEPTH = 20
_MOST_CHOICES = 256  # each costs more than a repetition's end
_NAME_CHARS = 40  # about the length of a layer's name: a repetition may end at any character
_COUNTED = re.compile(r"\{(\d+)(,?)(\d*)\}")
_ESCAPES = frozenset("dDwWsSbB")
_REFUSED_IN_CLASSES = ("[", "--", "&&", "~~", "||")  # Python may change their meaning


@dataclass(frozen=True, slots=True)
class Ways:
    """Ways of a part: `loops` repetitions, each of which may end anywhere, times `choices`."""

    loops: int = 0
    choices: float = 1.0

    def __mul__(self, other: Ways) -> Ways:
        """One part followed by the other."""
        return Ways(self.loops + other.loops, self.choices * other.choices)

    @staticmethod
    def either(branches: Sequence[Ways]) -> Ways:
        """One of the branches, tried in order."""
        loops = max(branch.loops for branch in branches)
        number = sum(branch.number for branch in branches)
        return Ways(loops, number / Ways(loops).number)

    @property
    def number(self) -> float:
        """Number of ways to match a layer's name."""
        return self.choices * math.comb(_NAME_CHARS + self.loops, self.loops)


def count_ways(pattern: str) -> Ways:
    """The ways of a pattern. Raises `AdapterError` if it is no regular expression of the subset."""
    if len(pattern) > _MOST_CHARS:
        raise _refused(pattern, f"it has more than {_MOST_CHARS} characters")
    reader = _Reader(pattern)
    ways = reader.alternatives(0)
    if not reader.at_end:
        raise _refused(pattern, "a bracket is missing")
    if ways.choices > _MOST_CHOICES:
        raise _refused(pattern, "it has too many alternatives or optional parts")
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise _refused(pattern, str(error)) from error
    return ways


class _Reader:
    """Reads one pattern from left to right."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0

    @property
    def at_end(self) -> bool:
        return self._at >= len(self._pattern)

    def alternatives(self, depth: int) -> Ways:
        """Read to the end of the group or of the pattern."""
        if depth > _MOST_DEPTH:
            raise _refused(self._pattern, "its groups are nested too deeply")
        begin, branches = self._at, [self._sequence(depth)]
        while self._next() == "|":
            self._at += 1
            branches.append(self._sequence(depth))
        text = self._pattern[begin : self._at]
        plain = re.fullmatch(r"[\w|-]*", text) is not None
        if len(branches) == 1 or (plain and _tells_apart(text.split("|"))):
            return branches[0]
        return Ways.either(branches)

    def _sequence(self, depth: int) -> Ways:
        ways = Ways()
        while self._next() not in ("", "|", ")"):
            if self._next() == "(":
                ways *= self._group(depth)
            else:
                self._character()
                ways *= self._repeated()
        return ways

    def _group(self, depth: int) -> Ways:
        opening = re.compile(r"\((\?:|\?P<\w+>)?(?!\?)").match(self._pattern, self._at)
        if opening is None:
            raise _refused(self._pattern, "only (...), (?:...) and (?P<name>...) are taken")
        self._at = opening.end()
        ways = self.alternatives(depth + 1)
        if self._next() != ")":
            raise _refused(self._pattern, "a bracket is missing")
        self._at += 1
        if self._next() == "?":
            self._at += 1
            self._skip_mode()
            return ways * Ways(0, 2)
        if self._next() in ("*", "+", "{"):
            raise _refused(self._pattern, "a repeated group may never end")
        return ways

    def _character(self) -> None:
        """Read one character, class or escape, or an element of no width."""
        character = self._next()
        if character == "[":
            found = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]").match(self._pattern, self._at)
            inside = found[0][1:-1] if found else ""
            if found is None or any(refused in inside for refused in _REFUSED_IN_CLASSES):
                raise _refused(self._pattern, "a class in it cannot be read")
            self._at = found.end()
        elif character == "\\":
            escaped = self._pattern[self._at + 1 : self._at + 2]
            if escaped.isalnum() and escaped not in _ESCAPES:
                raise _refused(self._pattern, f"\\{escaped} is not taken")
            self._at += 2
        else:
            self._at += 1

    def _repeated(self) -> Ways:
        """Read what may follow a character."""
        sign = self._next()
        if sign in ("*", "+"):
            self._at += 1
            self._skip_mode()
            return Ways(1)
        if sign == "?":
            self._at += 1
            self._skip_mode()
            return Ways(0, 2)
        if sign == "{":
            found = _COUNTED.match(self._pattern, self._at)
            if found is None or max(len(found[1]), len(found[3])) > 3:
                raise _refused(self._pattern, "write {n}, {n,} or {n,m}")
            self._at = found.end()
            self._skip_mode()
            return Ways(1) if found[2] else Ways()
        return Ways()

    def _skip_mode(self) -> None:
        """Skip a lazy or possessive mark. A repetition cannot be repeated."""
        if self._next() in ("?", "+"):
            self._at += 1

    def _next(self) -> str:
        return self._pattern[self._at : self._at + 1]


def _tells_apart(words: list[str]) -> bool:
    """Whether no word is a prefix of another one, so that at most one matches."""
    return not any(second.startswith(first) for first, second in pairwise(sorted(words)))


def _refused(pattern: str, reason: str) -> AdapterError:
    return AdapterError(f"the pattern {pattern[:100]!r} is not taken: {reason}")
