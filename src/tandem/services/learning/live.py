"""Live answers as they end: which of a version's last ones are broken, and who is to be looked at.

Reads every answer once and keeps a bounded window for each version, in memory; what follows from
it is decided in `watch.py`. Invariant: reading an answer takes a bounded time, whatever its length,
and neither waits nor fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.core.learning import Feedback, FeedbackKind
from tandem.core.request import Request
from tandem.core.version import INTERNAL
from tandem.services.feedback.signals import EXPLICIT
from tandem.services.learning.answer_faults import AnswerText, fault_alone

LAST_ANSWERS = 30
LEAST_BROKEN = 5
_BROKEN_SHARE = 1 / 3
_LEAST_TOKENS = 16
_READ_CHARS = 2000
_WINDOWS = 256


@dataclass(frozen=True, slots=True)
class Written:
    """The first choice of a request, written by the version of this label (None: the base model).

    `ended` says that the model ended it; it may also have met a limit or a stop text, or its client
    has left.
    """

    label: str | None
    request: Request
    text: str
    tokens: int
    ended: bool


@dataclass(eq=False, slots=True)
class Broken:
    """A broken answer; `confirmed` says that the base model's own answer to the same is sound."""

    fault: str
    request: Request
    tokens: int
    confirmed: bool = False


class Window:
    """The last answers of a version, of each tenant's prompt the last one alone: nobody makes many
    of one by asking again. A sound one is kept as None."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, int], Broken | None] = {}  # by tenant and the prompt's hash

    def __len__(self) -> int:
        return len(self._last)

    def add(self, request: Request, found: Broken | None) -> None:
        """One more answer; the oldest one may fall out."""
        asked = request.tenant, hash(request.prompt)
        self._last.pop(asked, None)
        self._last[asked] = found
        if len(self._last) > LAST_ANSWERS:
            del self._last[next(iter(self._last))]

    def copy(self) -> Window:
        """The same answers, whatever is added later."""
        found = Window()
        found._last.update(self._last)
        return found

    def excuse(self, broken: Broken) -> None:
        """Count an answer as sound."""
        self._last.update({asked: None for asked, each in self._last.items() if each is broken})

    @property
    def broken(self) -> list[Broken]:
        """The broken answers, oldest first."""
        return [each for each in self._last.values() if each is not None]

    def too_many(self, broken: Sequence[Broken]) -> bool:
        """Whether so many of these answers are broken that the version is to blame. What one tenant
        gets counts only if others' answers, where there are some, are as bad."""
        if len(broken) < max(LEAST_BROKEN, _BROKEN_SHARE * len(self._last)):
            return False
        for tenant in {each.request.tenant for each in broken}:
            others = sum(name != tenant for name, _ in self._last)
            theirs = sum(each.request.tenant != tenant for each in broken)
            if others >= LEAST_BROKEN and theirs < _BROKEN_SHARE * others:
                return False
        return True


class LiveAnswers:
    """The windows of all versions, and the labels of those that are to be looked at.

    With `on` False it takes no notice of anything.
    """

    def __init__(self, *, on: bool = True) -> None:
        self._on = on
        self._windows: dict[str, Window] = {}
        self._suspects: dict[str, None] = {}
        self._wake = asyncio.Event()

    def finished(self, written: Written) -> None:
        """An answer has come to its end."""
        label = written.label
        if not self._on or label is None or label.startswith(INTERNAL) or not _tells(written):
            return
        window = self._windows.pop(label, None) or Window()
        self._windows[label] = window
        while len(self._windows) > _WINDOWS:  # the one that answered least recently
            del self._windows[next(iter(self._windows))]
        answer = AnswerText(written.text[-_READ_CHARS:], written.tokens, written.ended)
        fault = fault_alone(answer)
        request = written.request
        window.add(request, None if fault is None else Broken(fault, request, written.tokens))
        if fault is not None and window.too_many(window.broken):
            self._suspect(label)

    def rated(self, feedback: Feedback) -> None:
        """Feedback was stored; ratings of a version's answers are a reason to look at it."""
        explicit = feedback.kind is FeedbackKind.RATING and feedback.signal == EXPLICIT
        if self._on and explicit and feedback.version.startswith(f"{feedback.adapter}@"):
            self._suspect(feedback.version)

    def window(self, label: str) -> Window:
        """What a version's last answers were like."""
        return self._windows.get(label) or Window()

    def forget(self, label: str) -> None:
        """Begin a version's window anew."""
        self._windows.pop(label, None)

    async def suspect(self) -> str:
        """The label of a version that is to be looked at; waits for one."""
        while not self._suspects:
            self._wake.clear()
            await self._wake.wait()
        label = next(iter(self._suspects))
        del self._suspects[label]
        return label

    def _suspect(self, label: str) -> None:
        self._suspects[label] = None
        self._wake.set()


def _tells(written: Written) -> bool:
    """Whether an answer shows what the model is like, and not what its client asked for."""
    sampling = written.request.sampling
    forced = sampling.logit_bias or sampling.ignore_eos or sampling.min_tokens
    long_enough = written.ended or written.tokens >= _LEAST_TOKENS
    return sampling.temperature <= 1.0 and not forced and long_enough
