"""Which pairs a learning run's next step trains on: two rules, one for the baselines, one for MACE.

Pure bookkeeping over the numbers of pairs; knows no engine. Invariant: a pair is in at most one
step at a time, and every pair is used once before any is used again.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Protocol

UNSCORED_LOSS = math.log(2.0)


class Rule(Protocol):
    """Chooses the pairs of the next step."""

    def add(self, pair: int, now_s: float) -> None:
        """A pair has arrived."""
        ...

    def take(self, now_s: float, in_engine: int) -> tuple[int, ...]:
        """Pairs of a step to submit now, while the engine has `in_engine` steps; () for none."""
        ...

    def learnt(self, losses: dict[int, float]) -> None:
        """A step has ended: the losses of its pairs before the update."""
        ...


class InOrder:
    """Every pair once, in order of arrival, a step for each `batch` of them.

    What Ekya's windows and AdaInf's queue are given: as many retraining jobs as feedback makes.
    """

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self._waiting: deque[int] = deque()

    def add(self, pair: int, now_s: float) -> None:
        """See `Rule`."""
        self._waiting.append(pair)

    def take(self, now_s: float, in_engine: int) -> tuple[int, ...]:
        """See `Rule`: however many steps are in the engine, which queues them."""
        if len(self._waiting) < self._batch:
            return ()
        return tuple(self._waiting.popleft() for _ in range(self._batch))

    def learnt(self, losses: dict[int, float]) -> None:
        """See `Rule`; a pair is never used again."""


@dataclass(slots=True)
class _Lesson:
    pair: int
    arrived_s: float
    loss: float = UNSCORED_LOSS
    uses: int = 0
    busy: bool = False


@dataclass(frozen=True, slots=True)
class PriorityOptions:
    """MACE 4.1 for samples. A pair is trained on again until its loss is under `threshold` or it
    was used `most_uses` times. Priority is `gamma` x loss + age / `patience_s`; the engine has
    `ahead` steps at most, so that each is chosen late."""

    batch: int = 8
    threshold: float = 0.5
    most_uses: int = 4
    gamma: float = 1.0
    patience_s: float = 600.0
    ahead: int = 2


class ByPriority:
    """New pairs first, then those of fewest uses, the worse aligned and older ones before others.

    Steps go on for as long as there are pairs to repeat: they only get the time that is left.
    """

    def __init__(self, options: PriorityOptions) -> None:
        self._options = options
        self._lessons: dict[int, _Lesson] = {}

    def add(self, pair: int, now_s: float) -> None:
        """See `Rule`."""
        self._lessons[pair] = _Lesson(pair, now_s)

    def take(self, now_s: float, in_engine: int) -> tuple[int, ...]:
        """See `Rule`: nothing while `ahead` steps are in the engine."""
        options = self._options
        if in_engine >= options.ahead:
            return ()
        ready = [lesson for lesson in self._lessons.values() if not lesson.busy]

        def rank(lesson: _Lesson) -> tuple[int, float, int]:
            age = (now_s - lesson.arrived_s) / options.patience_s
            return (lesson.uses, -(options.gamma * lesson.loss + age), lesson.pair)

        chosen = sorted(ready, key=rank)[: options.batch]
        if len(chosen) < options.batch:
            return ()
        for lesson in chosen:
            lesson.busy = True
        return tuple(lesson.pair for lesson in chosen)

    def learnt(self, losses: dict[int, float]) -> None:
        """See `Rule`."""
        for pair, loss in losses.items():
            lesson = self._lessons[pair]
            lesson.busy, lesson.loss, lesson.uses = False, loss, lesson.uses + 1
            if loss < self._options.threshold or lesson.uses >= self._options.most_uses:
                del self._lessons[pair]
