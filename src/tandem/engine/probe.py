"""What passes take in a whole engine loop, where deciding, collecting and applying come between.

A part of a profile (`executor/profile` has the others): decodes in a row, prompts after these, and
what an iteration takes beside its work. Invariant: the loop is idle before and after each turn.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from random import Random
from statistics import median
from typing import NamedTuple

from tandem.core.plan import LanePlan, StepResult
from tandem.core.request import Request
from tandem.core.sampling import SamplingParams
from tandem.engine.loop import EngineLoop
from tandem.estimators.calibrate import Samples, TimedPass
from tandem.estimators.work import PassWork

# Answers that are decoded together, and how many times in a row.
_DECODES = (1, 2, 4, 8)
_STREAK = 10
# Tokens of an answer: some of them may come before all answers have begun.
_ANSWER_TOKENS = 2 * _STREAK
# Tokens of their prompts, and of those that come afterwards, at most.
_PROMPT_TOKENS = 64
_LONGEST_TOKENS = 512
# What a sleep costs does not depend on its length from here on.
_SLEEP_S = 0.03


class _Step(NamedTuple):
    """A pass, and what its iteration took beside it."""

    passed: TimedPass
    host_s: float


class LoopProbe:
    """Adds to samples, a streak a turn. The loop has to be idle; its `on_plan` is replaced."""

    def __init__(
        self, loop: EngineLoop, sleep: Callable[[float], None] = time.sleep, seed: int = 0
    ) -> None:
        self._loop, self._sleep, self._rng = loop, sleep, Random(seed)
        self._executed: list[tuple[LanePlan, StepResult]] = []
        loop.on_plan = lambda plan, result: self._executed.append((plan, result))
        self._host_s: list[float] = []
        self._before_s = math.inf
        self._requests = 0

    @property
    def host_s(self) -> float:
        """Median seconds of an iteration of decodes outside of the executor's own account; 0 where
        there was no room for any."""
        return median(self._host_s) if self._host_s else 0.0

    def turn(self, samples: Samples) -> float:
        """A prompt that does not count, a few decodes many times in a row, until the caches hold
        what they need, a prompt, and one more after a sleep, in which other processes had the
        caches. Returns the seconds of the last pass (infinite: there was none)."""
        self._before_s = math.inf
        info, cache = self._loop.info, self._loop.scheduler.cache
        most = min(info.max_model_len, cache.num_blocks * cache.block_size) - 1
        # A prompt of one token is computed as a decode is.
        rows = round(math.exp(self._rng.uniform(math.log(2.0), math.log(_LONGEST_TOKENS))))
        rows = min(rows, most)
        self._prompt(rows)
        budgets = self._loop.scheduler.budgets
        at_once = min(budgets.max_sequences, budgets.max_batch_tokens)
        if streak := self._streak(min(self._rng.choice(_DECODES), at_once)):
            samples.streaks.append(tuple([each.passed for each in streak]))
            self._host_s += [each.host_s for each in streak[1:]]
            samples.warm_prompts += self._prompt(rows)
        self._sleep(_SLEEP_S)
        self._before_s = math.inf
        samples.resumes += self._prompt(rows)
        return self._before_s

    def _streak(self, decodes: int) -> list[_Step]:
        """Passes of just so many decodes, one right after the other; none if these do not fit,
        or begin too far apart."""
        info, cache = self._loop.info, self._loop.scheduler.cache
        room = min(info.max_model_len, cache.num_blocks // decodes * cache.block_size)
        longest = min(_PROMPT_TOKENS, room - _ANSWER_TOKENS)
        if longest < 1:
            return []
        tokens = self._rng.randint(1, longest)
        names = [self._add(tokens, _ANSWER_TOKENS) for _ in range(decodes)]
        found: list[_Step] = []
        while self._loop.has_work and len(found) < _STREAK:
            step = self._step()
            if step is None or step.passed.work.rows or step.passed.work.decodes != decodes:
                found.clear()
            else:
                found.append(step)
        for name in names:
            self._loop.abort(name)
        return found if len(found) == _STREAK else []

    def _prompt(self, tokens: int) -> list[TimedPass]:
        """The first pass of a prompt; none if it failed."""
        name, found = self._add(tokens, 1), None
        while self._loop.has_work and found is None:
            found = self._step()
        self._loop.abort(name)
        return [] if found is None else [found.passed]

    def _add(self, tokens: int, answer_tokens: int) -> str:
        name = f"probe-{self._requests}"
        self._requests += 1
        prompt = tuple([self._rng.randrange(self._loop.info.vocab_size) for _ in range(tokens)])
        sampling = SamplingParams(max_tokens=answer_tokens, ignore_eos=True)
        self._loop.add(Request(name, prompt, sampling))
        return name

    def _step(self) -> _Step | None:
        """One iteration; None if it had no pass."""
        began_s = time.perf_counter()
        self._loop.step()
        host_s = time.perf_counter() - began_s - sum(each.elapsed_s for _, each in self._executed)
        found = None
        for plan, result in self._executed:
            if plan.spans and not result.failed:
                timed = TimedPass(PassWork.of(plan), result.forward_s, self._before_s)
                found, self._before_s = _Step(timed, host_s), result.forward_s
        self._executed.clear()
        return found
