"""Micro-benchmarks through the executor's interface: plans of many shapes, timed.

Decodes, prompts, both together, training forwards beside them, slices and updates: at random sizes
(`Prober`) or at a few usual ones (`rough_rates`). A matrix library compiles a kernel for each new
number of rows. So the first pass of a new size is not counted (of a backward: its first layer), and
sizes close to a known one are rounded to it. `estimators/calibrate` interprets the times.
Invariant: the executor is left without trainers and recordings. Its KV is garbage, so profile
before serving.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate, count, pairwise
from random import Random

from tandem.config import SchedulingConfig
from tandem.core.plan import (
    DEVICE_LANE,
    BackwardSlice,
    BlockCopy,
    Discard,
    Draw,
    LanePlan,
    OpenMicroBatch,
    RecordTarget,
    Span,
    StepResult,
    Update,
    working_key,
)
from tandem.core.ports import Executor
from tandem.core.sampling import SamplingParams
from tandem.core.training import LoraSpec, OptimizerSpec, TrainerSpec
from tandem.estimators.calibrate import Samples, TimedPass, rough
from tandem.estimators.latency import Rates
from tandem.estimators.work import BackwardWork, PassWork

_TRAINER = "tandem-profile"
_GREEDY = SamplingParams(temperature=0.0)
# Longest context to try. Longer ones take long to read and seldom occur beside others.
_LONGEST = 4096
# Contexts in `rough_rates` are shorter, since long ones would cost memory at the start.
_USUAL_CONTEXT = 256
# Passes that warm up caches, kernels and the allocator, and are not counted.
_WARM_UP = 7
# Number of kinds of passes. Each is counted at least once, however little time there is.
_KINDS = 6
# Sizes that differ by at most this share count as equal.
_NEAR = 0.06
# What `rough_rates` runs, as (decodes, rows of a prompt). The first shapes only warm up.
_FIRST_SHAPES = ((1, 0), (8, 64))
_USUAL_SHAPES = ((1, 0), (8, 0), (0, 64), (32, 0), (0, 128), (8, 256), (0, 512))
# Sequences of a micro-batch, and the fewest rows of all of them.
_SEQUENCES = (1, 2, 2, 4, 8)
_LEAST_ROWS = 8
# Blocks that one plan writes.
_BLOCKS_AT_ONCE = 256
# Runs other work on the executor, adds its samples, and returns the seconds of its last pass.
Between = Callable[[Samples], float]


@dataclass(frozen=True, slots=True)
class ProbeLimits:
    """Most rows and sequences of a pass, as in the server that is profiled, and the rank of the
    adapter that is trained."""

    max_batch_tokens: int
    max_sequences: int
    rank: int = 16


@dataclass(slots=True)
class _Pass:
    """A plan under construction. Blocks are handed out from 0 on, each at most once."""

    spans: list[Span] = field(default_factory=list)
    opens: list[OpenMicroBatch] = field(default_factory=list)
    rows: int = 0
    blocks: int = 0

    def copy(self) -> _Pass:
        """A copy that can be extended separately."""
        return replace(self, spans=[*self.spans], opens=[*self.opens])


def rough_rates(executor: Executor, scheduling: SchedulingConfig) -> Rates:
    """Rates that are guessed from the device and corrected by a few usual passes. No pass begins
    after `accustom_s` seconds. Trains nothing, so a server that never trains pays no memory for
    it."""
    limits = ProbeLimits(scheduling.max_batch_tokens, scheduling.max_sequences)
    prober = Prober(executor, limits)
    ends_s = time.monotonic() + scheduling.accustom_s
    for _ in prober.run_usual():
        if time.monotonic() >= ends_s:
            break
    return rough(prober.samples, Rates.guess_for(executor.info))


class Prober:
    """Runs passes of many sizes and collects timed `samples`; may run several times."""

    def __init__(
        self, executor: Executor, limits: ProbeLimits, between: Between | None = None, seed: int = 0
    ) -> None:
        """`between`: called once per round, after each kind of pass."""
        self.samples = Samples()
        self._executor, self._limits, self._rng = executor, limits, Random(seed)
        self._between, self._warm = between, False
        self._steps, self._numbers = count(), count()
        self._revision, self._written = -1, 0
        self._before_s = math.inf  # seconds of the last pass
        # Numbers of rows that have occurred in a pass, and in a micro-batch.
        self._met: set[int] = set()
        self._learned: set[int] = set()
        info = executor.info
        self._trains = info.recording_tokens > 0
        self._most_rows = min(limits.max_batch_tokens, info.max_model_len - 1)

    def run(self, seconds: float, on_progress: Callable[[float], None] = lambda done: None) -> None:
        """Run passes for about `seconds`. `on_progress` gets the share that is done."""
        least = _KINDS if self._warm else _WARM_UP + _KINDS
        began = time.monotonic()
        self._before_s = math.inf
        try:
            for number, _ in enumerate(self._run_all()):
                if number == _WARM_UP and not self._warm:
                    self.samples, self._warm = Samples(), True
                done = (time.monotonic() - began) / seconds
                on_progress(min(1.0, done))
                if done >= 1.0 and number >= least:
                    break
        finally:
            if self._trains:
                self._executor.close_trainer(_TRAINER)

    def _run_all(self) -> Iterator[None]:
        """Every kind in turn, without end."""
        if self._trains:
            spec = TrainerSpec(_TRAINER, LoraSpec(rank=self._limits.rank), OptimizerSpec())
            self._revision = self._executor.open_trainer(spec).revision
        for turn in count():
            self._pass(decodes=self._sequences())
            yield
            self._pass(decodes=self._sequences(), even=True)
            yield
            self._pass(prompt=self._rows())
            yield
            self._mixed(again=turn % 2 == 1)
            yield
            if self._trains:
                beside = self._sequences() if self._rng.random() < 0.5 else 0
                self._step(beside)
                yield
            if self._between is not None:
                self._before_s = self._between(self.samples)
                yield

    def run_usual(self) -> Iterator[None]:
        """A few usual shapes, small ones first, after some that are not counted."""
        for decodes, prompt in _FIRST_SHAPES:
            self._pass(decodes, prompt, _USUAL_CONTEXT)
            self.samples = Samples()
            yield
        for decodes, prompt in _USUAL_SHAPES:
            self._pass(decodes, prompt, _USUAL_CONTEXT)
            yield

    # ------------------------------------------------------------------ sizes

    def _sequences(self) -> int:
        return self._about(min(self._limits.max_sequences, self._limits.max_batch_tokens))

    def _rows(self) -> int:
        return max(2, self._about(self._most_rows))

    def _about(self, most: int, least: int = 1) -> int:
        """A number from `least` to `most`; every order of magnitude is equally likely."""
        drawn = self._rng.uniform(math.log(least), math.log(most + 0.49))
        return max(least, min(most, round(math.exp(drawn))))

    def _near(self, rows: int, met: set[int]) -> int:
        """The nearest number in `met` if it is near `rows`; else `rows`."""
        nearest = min(met, key=lambda each: abs(each - rows), default=rows)
        return nearest if abs(nearest - rows) <= _NEAR * rows else rows

    def _lengths(self, total: int) -> list[int]:
        """Rows of each sequence of a micro-batch of `total` rows: one, a pair, or several."""
        sequences = min(self._rng.choice(_SEQUENCES), self._limits.max_sequences)
        ends = list(accumulate(self._rng.uniform(0.6, 1.4) for _ in range(sequences)))
        cuts = [0, *(round(total * end / ends[-1]) for end in ends)]
        return [hi - lo for lo, hi in pairwise(cuts) if hi > lo]

    # ------------------------------------------------------------------ passes

    def _pass(
        self, decodes: int = 0, prompt: int = 0, longest: int = _LONGEST, *, even: bool = False
    ) -> None:
        made = _Pass()
        self._add_decodes(made, decodes, longest, even=even)
        if prompt:
            self._add_prompt(made, prompt, longest)
        if made.spans:
            self._execute(made)

    def _mixed(self, *, again: bool) -> None:
        """Decodes and a prompt. With `again` three times: the first is counted, the others show how
        well one pass predicts the same pass again."""
        made = _Pass()
        self._add_decodes(made, self._sequences())
        self._add_prompt(made, self._rows())
        if not made.spans:
            return
        results = [self._execute(made, counted=place == 0) for place in range(3 if again else 1)]
        if again and not any(result.failed for result in results):
            self.samples.repeats.append((results[1].forward_s, results[2].forward_s))

    def _step(self, beside: int) -> None:
        """A micro-batch: recorded in one pass, backward in slices, and an update."""
        made = _Pass()
        self._add_decodes(made, min(beside, self._limits.max_sequences - max(_SEQUENCES)))
        most = min(self._most_rows, self._limits.max_batch_tokens - made.rows)
        most = min(max(1, most), self._executor.info.recording_tokens)
        total = self._near(self._about(most, min(_LEAST_ROWS, most)), self._learned)
        total = min(total, most)
        lengths = self._lengths(total)
        block_size, num_blocks = self._executor.info.block_size, self._executor.info.num_blocks
        if made.blocks + sum([-(-rows // block_size) for rows in lengths]) > num_blocks:
            made = _Pass()  # alone, since decodes do not fit as well
        if total not in self._learned or made.rows + total not in self._met:
            self._learn(made.copy(), lengths, counted=False)
        self._learn(made, lengths, counted=True)

    def _learn(self, made: _Pass, lengths: list[int], *, counted: bool) -> None:
        number = next(self._numbers)
        made.opens.append(OpenMicroBatch(number, _TRAINER, self._revision, tuple(lengths)))
        for place, rows in enumerate(lengths):
            if not self._add_span(made, 0, rows, record=RecordTarget(number, place)):
                return
        result = self._execute(made, counted=counted)
        self._met.add(made.rows)
        self._learned.add(sum(lengths))
        if result.failed:
            self._discard(number)
            return
        samples = self.samples if counted else Samples()
        backward = BackwardWork.of(lengths)
        for kept in result.kept:
            backward = backward.with_kept(kept)
            samples.kept.append((len(made.spans) == len(lengths), kept))
        hi = self._executor.info.num_layers
        while hi > 0:
            lo = max(0, hi - (self._about(self._executor.info.num_layers) if counted else 1))
            piece = BackwardSlice(number, hi, lo, (1e-3,) * len(lengths))
            result = self._submit(LanePlan(next(self._steps), DEVICE_LANE, (), slices=(piece,)))
            found = result.slices[0]
            if found.problem is not None:
                self._discard(number)
                return
            samples.slices.append((backward, hi - lo, found.elapsed_s))
            backward = backward.after_slice()
            hi = lo
            if not counted:  # the other layers take the same kernels
                self._discard(number)
                return
        update = Update(_TRAINER, self._revision)
        made_update = self._submit(LanePlan(next(self._steps), DEVICE_LANE, (), updates=(update,)))
        self._revision = made_update.updates[0].revision
        samples.updates.append(made_update.updates[0].elapsed_s)

    def _discard(self, micro_batch: int) -> None:
        discard = Discard(_TRAINER, (micro_batch,))
        self._submit(LanePlan(next(self._steps), DEVICE_LANE, (), discards=(discard,)))

    def _add_prompt(self, made: _Pass, rows: int, longest: int = _LONGEST) -> None:
        rows = max(2, self._near(made.rows + rows, self._met) - made.rows)
        self._add_span(made, self._rng.choice((0, 0, self._about(longest))), rows, draws=True)

    def _add_decodes(
        self, made: _Pass, sequences: int, longest: int = _LONGEST, *, even: bool = False
    ) -> None:
        """Contexts around a random one: of any order of magnitude, or of any length (`even`)."""
        usual = self._rng.randint(1, longest) if even else self._about(longest)
        for _ in range(sequences):
            context = max(1, round(usual * self._rng.uniform(0.3, 1.7)))
            if not self._add_span(made, context, 1, draws=True):
                break

    def _add_span(
        self,
        made: _Pass,
        start: int,
        rows: int,
        *,
        draws: bool = False,
        record: RecordTarget | None = None,
    ) -> bool:
        """Add a span if rows and blocks are left. Its KV is what `_write` left in the blocks."""
        info = self._executor.info
        rows = min(rows, self._limits.max_batch_tokens - made.rows)
        start = min(start, info.max_model_len - rows - 1)
        blocks = -(-(start + rows) // info.block_size)
        full = len(made.spans) >= self._limits.max_sequences
        if full or rows <= 0 or start < 0 or made.blocks + blocks > info.num_blocks:
            return False
        seq_id = len(made.spans)
        tokens = tuple(self._rng.randrange(info.vocab_size) for _ in range(rows))
        made.spans.append(
            Span(
                seq_id,
                start,
                tokens,
                (tuple(range(made.blocks, made.blocks + blocks)),),
                working_key(_TRAINER) if record is not None else None,
                (Draw(seq_id, 0, 0, _GREEDY),) if draws else (),
                tokens if record is not None else (),
                None if record is not None else 0,
                record,
            )
        )
        made.rows += rows
        made.blocks += blocks
        return True

    def _write(self, blocks: int) -> None:
        """Make sure that the first `blocks` blocks have their own memory. Blocks that were never
        written may share one page of zeros, which is read faster than any real cache."""
        while self._written < blocks:
            targets = range(self._written, min(blocks, self._written + _BLOCKS_AT_ONCE))
            copies = tuple(BlockCopy(0, 0, target) for target in targets)
            self._submit(LanePlan(next(self._steps), DEVICE_LANE, (), copies=copies))
            self._written = targets.stop

    def _execute(self, made: _Pass, *, counted: bool = True) -> StepResult:
        self._write(made.blocks)
        lane = LanePlan(next(self._steps), DEVICE_LANE, tuple(made.spans), opens=tuple(made.opens))
        if made.rows not in self._met and not made.opens:  # training passes run twice anyway
            self._met.add(made.rows)
            self._submit(lane)
        before_s, result = self._before_s, self._submit(lane)
        if counted and not result.failed:
            self.samples.passes.append(TimedPass(PassWork.of(lane), result.forward_s, before_s))
        return result

    def _submit(self, lane: LanePlan) -> StepResult:
        self._executor.submit(lane)
        result = self._executor.poll()[0]
        if lane.spans:
            self._before_s = result.forward_s
        return result
