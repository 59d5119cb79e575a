"""Single passes through the executor: decode, prompts, and decode with adapters.

A plan is run again and again as it is: the same rows at the same positions. Invariant: the time of
a pass is from before `submit` until `poll` has its result, tokens included.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from random import Random
from statistics import median

from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.ceilings import Ceilings
from benchmarks.gpu.engine import Engine
from benchmarks.gpu.options import Options
from tandem.core.plan import DEVICE_LANE, Draw, LanePlan, Span
from tandem.core.sampling import SamplingParams
from tandem.core.training import LoraSpec, TrainerSpec
from tandem.executor.executor import DeviceExecutor

Row = dict[str, object]
GREEDY = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
RANK = 16
MOST_KERNELS, NAME_CHARS = 14, 60
LONGEST_S = 2.0  # of the repeats of one plan
_TRAINER = "bench-adapters"


def decode(engine: Engine, ceilings: Ceilings, options: Options) -> Iterator[Row]:
    """A row a sequence, at each number of sequences."""
    passes = Passes(engine, options)
    for rows in options.batches:
        plan = passes.decode([None] * rows)
        context = sum(span.end for span in plan.spans)
        seconds = median(passes.times([plan])[0])
        with_kv = engine.pass_bytes + context * engine.kv_token_bytes
        yield {
            "model": engine.name,
            "sequences": rows,
            "context_tokens": context / rows,
            "ms": 1e3 * seconds,
            "weights_share": engine.pass_bytes / seconds / ceilings.bytes_per_s,
            "stream_share": with_kv / seconds / ceilings.bytes_per_s,
            "tokens_per_s": rows / seconds,
        }


def prefill(engine: Engine, ceilings: Ceilings, options: Options) -> Iterator[Row]:
    """One prompt in one pass, of each length."""
    passes = Passes(engine, options)
    for tokens in options.prefill_tokens:
        seconds = median(passes.times([passes.prompt(tokens)])[0])
        yield {
            "model": engine.name,
            "prompt_tokens": tokens,
            "ms": 1e3 * seconds,
            "tokens_per_s": tokens / seconds,
            "matrix_share": engine.prompt_flops(tokens) / seconds / ceilings.flops,
        }


@contextmanager
def loaded_adapters(executor: DeviceExecutor, number: int) -> Iterator[list[str]]:
    """The keys of so many adapters on all linear layers, loaded inside."""
    executor.open_trainer(TrainerSpec(_TRAINER, LoraSpec(rank=RANK)))
    snapshot = executor.snapshot_trainer(_TRAINER)
    executor.close_trainer(_TRAINER)
    keys = [f"bench-{place}" for place in range(number)]
    for key in keys:
        executor.adopt(snapshot, key)
    try:
        yield keys
    finally:
        for key in keys:
            executor.drop_adapter(key)


def adapters(engine: Engine, _: Ceilings, options: Options) -> Iterator[Row]:
    """The same decode rows with no adapter, one and many; the kinds take turns."""
    rows, passes = options.adapter_rows, Passes(engine, options)
    with loaded_adapters(engine.executor, rows) as keys:
        kinds: dict[str, list[str | None]] = {
            "none": [None] * rows,
            "one, on one row": [keys[0], *[None] * (rows - 1)],
            "one, on all rows": [keys[0]] * rows,
            f"{rows}, one a row": [*keys],
        }
        found = passes.times([passes.decode(each) for each in kinds.values()])
    alone = median(found[0])
    for kind, times in zip(kinds, found, strict=True):
        yield {
            "model": engine.name,
            "sequences": rows,
            "adapters": kind,
            "ms": 1e3 * median(times),
            "ratio": median(times) / alone,
        }


def kernels(engine: Engine, _: Ceilings, options: Options) -> Iterator[Row]:
    """Where the time of a pass of decode goes: what ran longest, by torch's profiler."""
    passes = Passes(engine, options)
    on_device = options.device == "cuda"
    kind = ProfilerActivity.CUDA if on_device else ProfilerActivity.CPU
    for rows in (min(options.batches), options.adapter_rows):
        plan = passes.decode([None] * rows)
        passes.times([plan])
        with profile(activities=[kind]) as profiler:
            repeats = len(passes.times([plan])[0]) + options.warm_up
        found = {
            each.key: (each.device_time_total if on_device else each.cpu_time_total, each.count)
            for each in profiler.key_averages()
        }
        longest = sorted(found.items(), key=lambda item: item[1][0], reverse=True)[:MOST_KERNELS]
        for name, (spent_us, calls) in longest:
            yield {
                "model": engine.name,
                "sequences": rows,
                "kernel": name[:NAME_CHARS],
                "calls": round(calls / repeats, 1),
                "us": spent_us / repeats,
            }


class Passes:
    """Makes plans and runs them; blocks are handed out from 0 on in every plan."""

    def __init__(self, engine: Engine, options: Options) -> None:
        self._executor, self._options = engine.executor, options
        self._rng, self._steps = Random(options.seed), count()

    def decode(self, adapters: Sequence[str | None]) -> LanePlan:
        """One row a sequence, each after a context of its own around the usual one."""
        spans: list[Span] = []
        blocks = 0
        for place, adapter in enumerate(adapters):
            usual = self._options.context_tokens
            start = self._rng.randint(usual * 7 // 8, usual * 9 // 8) - 1
            spans.append(self._span(place, start, 1, blocks, adapter))
            blocks += len(spans[-1].block_tables[0])
        return LanePlan(0, DEVICE_LANE, tuple(spans))

    def prompt(self, tokens: int) -> LanePlan:
        """A prompt that draws its first token."""
        return LanePlan(0, DEVICE_LANE, (self._span(0, 0, tokens, 0, None),))

    def times(self, plans: Sequence[LanePlan]) -> list[list[float]]:
        """Seconds of every repeat of each plan, taken in turns."""
        found: list[list[float]] = [[] for _ in plans]
        for _ in range(self._options.warm_up):
            for plan in plans:
                self._run(plan)
        ends_s = time.perf_counter() + LONGEST_S * len(plans)
        for turn in range(self._options.rounds):
            if turn and time.perf_counter() > ends_s:
                break
            for plan, times in zip(plans, found, strict=True):
                times.append(self._run(plan))
        return found

    def _run(self, plan: LanePlan) -> float:
        plan = replace(plan, step=next(self._steps))
        began = time.perf_counter()
        self._executor.submit(plan)
        (result,) = self._executor.poll()
        seconds = time.perf_counter() - began
        if result.failed:
            raise RuntimeError(f"the pass failed: {result.failed[0][1]}")
        assert len(result.draws) == len(plan.spans)
        return seconds

    def _span(self, place: int, start: int, rows: int, block: int, adapter: str | None) -> Span:
        info = self._executor.info
        blocks = -(-(start + rows) // info.block_size)
        assert block + blocks <= info.num_blocks, "the cache is too small for this plan"
        tokens = tuple(self._rng.choices(range(info.vocab_size), k=rows))
        table = tuple(range(block, block + blocks))
        draw = Draw(place, 0, 0, GREEDY)
        return Span(place, start, tokens, (table,), adapter, draws=(draw,))
