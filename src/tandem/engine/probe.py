"""Times passes in a whole engine loop, with deciding, collecting and applying between them.

A part of a profile; `executor/profile` has the others. It measures successive decodes, prompts
after these, and the time of an iteration beside its work. Invariant: the loop is idle before and
after each turn.
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

# Answers that are decoded together, and the number of successive passes.
_DECODES = (1, 2, 4, 8)
_STREAK = 10
# Tokens of an answer: some of them may come before all answers have begun.
_ANSWER_TOKENS = 2 * _STREAK
# Most tokens of their prompts, and of the prompts that come afterwards.
_PROMPT_TOKENS = 64
_LONGEST_TOKENS = 512
# From this length on, a longer sleep costs no more.
_SLEEP_S = 0.03


class _Step(NamedTuple):
    """A pass, and the seconds that its iteration took beside it."""

    passed: TimedPass
    host_s: float


class LoopProbe:
    """Adds samples, one streak per turn. The loop has to be idle. Its `on_plan` is replaced, and no
    plan follows another: each has its time on an idle device."""

    def __init__(
        self, loop: EngineLoop, sleep: Callable[[float], None] = time.sleep, seed: int = 0
    ) -> None:
        self._loop, self._sleep, self._rng = loop, sleep, Random(seed)
        self._executed: list[tuple[LanePlan, StepResult]] = []
        loop.runs_ahead = False
        loop.on_plan = lambda plan, result: self._executed.append((plan, result))
        self._host_s: list[float] = []
        self._before_s = math.inf
        self._requests = 0

    @property
    def host_s(self) -> float:
        """Median seconds of an iteration of decodes outside of the executor; 0 without any."""
        return median(self._host_s) if self._host_s else 0.0

    def turn(self, samples: Samples) -> float:
        """One turn: a prompt that does not count; successive passes of a few decodes, until the
        caches hold what they need; a prompt; and a prompt after a sleep in which other processes
        used the caches. Returns the seconds of the last pass (infinite if there was none)."""
        self._before_s = math.inf
        info, cache = self._loop.info, self._loop.scheduler.cache
        most = min(info.max_model_len, cache.num_blocks * cache.block_size) - 1
        # A prompt of one token would be computed like a decode.
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
        """Successive passes of exactly this many decodes; empty if they do not fit or have gaps."""
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
        """The first pass of a prompt. Empty if it failed."""
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
