"""Admission by the predicted peak of KV memory, against reserving `max_tokens` and against none.

    python -m benchmarks lengths.pressure

A recorded trace over the real scheduler and a simulated device whose KV memory is short. The policy
is `unified` in all columns; what a request carries differs: a forecast of exactly `max_tokens`
(reserve), none (greedy: a prompt starts once it has a place), what the server's `history` has
learned from answers that ended before (predicted), or the length itself (known). Goodput counts
requests that met both objectives. Invariant: the columns of a row have the same requests.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated

import typer

from tandem.bench.arrivals import replay
from tandem.bench.measure import percentile
from tandem.bench.traces import read_trace
from tandem.bench.workload import Limits, PlannedRequest, Shape, plan
from tandem.build import build_simulation
from tandem.config import resolve
from tandem.core.clock import VirtualClock
from tandem.core.events import TokenEvent
from tandem.core.lengths import LEVELS, Asked, Forecast
from tandem.core.ports import Urgent, never
from tandem.core.request import Request
from tandem.core.sampling import SamplingParams
from tandem.core.slo import Slo
from tandem.engine.loop import EngineLoop
from tandem.estimators.datasheet import load_profile
from tandem.estimators.length_choice import LengthChoice, Predicted
from tandem.estimators.output_length import by_traffic
from tandem.estimators.profile import with_cache
from tandem.sim.executor import SimExecutor
from tandem.sim.run import Arrival, SimOutcome, Simulation

RESULTS = Path(__file__).parents[1] / "results"
TRACES = ("azure_llm_2023_conv.csv.gz",)
BLOCKS = (1000, 2000, 4000)
RATES = (4.0, 8.0, 12.0)
WAYS = ("reserve", "greedy", "predicted", "known")


@dataclass(frozen=True)
class Setting:
    """What is the same in all runs; of the arrivals the first `warm_up` seconds do not count."""

    profile: str
    data: Path
    seconds: float
    warm_up: float
    max_tokens: int
    slo: Slo


@dataclass(frozen=True)
class Found:
    """Of one run. `goodput` is requests/s, `held` the mean share of the KV blocks in use."""

    goodput: float
    attained: float
    preemptions: int
    preempted: float  # of 100 requests
    held: float
    ttft_s: float  # 95th percentile
    simulated_s: float


class Forecasts:
    """Stands before the loop as the server's services do: gives requests what is known of their
    lengths, and learns from those that end. Answers end at a stop token, as far below `max_tokens`
    as the trace says."""

    def __init__(self, loop: EngineLoop, executor: SimExecutor, way: str, limit: int) -> None:
        self._add, self._step = loop.add, loop.step
        self._executor, self._way, self._limit = executor, way, limit
        self._choice = LengthChoice((by_traffic(),))
        self._open: dict[str, tuple[Predicted, int]] = {}
        self._number = 0

    def add(self, request: Request) -> None:
        """In place of the loop's. `max_tokens` of the request is the length of its answer."""
        length = request.sampling.max_tokens
        stop = self._executor.token_of(self._number, length - 1)
        sampling = SamplingParams(max_tokens=self._limit, stop_token_ids=(stop,), ignore_eos=True)
        asked = Asked("", "chat/completions", self._limit, len(request.prompt))
        predicted = self._choice.predict(asked)
        known = {
            "reserve": Forecast((float(self._limit),) * len(LEVELS), self._limit, "reserve"),
            "greedy": None,
            "predicted": predicted.forecast,
            "known": Forecast((float(length),) * len(LEVELS), length, "known"),
        }
        self._add(replace(request, sampling=sampling, length=known[self._way]))
        self._number += 1
        self._open[request.request_id] = (predicted, length)

    def step(self, urgent: Urgent = never) -> list[TokenEvent]:
        """In place of the loop's."""
        events = self._step(urgent)
        for event in events:
            if event.finish_reason is not None:
                self._choice.observe(*self._open.pop(event.request_id))
        return events


def requests_of(setting: Setting, trace: str, rate: float, context: int) -> list[PlannedRequest]:
    """Those that fit with an answer of `max_tokens`, from the beginning of the trace."""
    records = [
        each
        for each in read_trace(setting.data / "traces" / trace)
        if each.prompt_tokens + setting.max_tokens <= context
    ][: round(rate * setting.seconds)]
    times_s = [record.at_s for record in records if record.at_s is not None]
    shapes = [Shape(each.prompt_tokens, each.output_tokens) for each in records]
    limits = Limits(max_output_tokens=setting.max_tokens)
    return plan(replay(times_s, rate=rate), shapes, limits, 1000, 0)


def simulate(setting: Setting, trace: str, kv_blocks: int, rate: float, way: str) -> Found:
    """One run, to the end of its last request, with `kv_blocks` in place of the profile's."""
    profile, clock = with_cache(load_profile(setting.profile), kv_blocks), VirtualClock()
    planned = requests_of(setting, trace, rate, profile.info.max_model_len)
    scheduling = {
        "max_sequences": 256,
        "ttft_slo": setting.slo.ttft_s,
        "tpot_slo": setting.slo.tpot_s,
    }
    loop, executor = build_simulation(
        resolve({"scheduling": scheduling}), profile, clock, noise=False
    )
    before = Forecasts(loop, executor, way, setting.max_tokens)
    loop.add, loop.step = before.add, before.step  # type: ignore[method-assign]
    arrivals = [
        Arrival(
            each.at_s,
            Request(str(each.index), each.prompt, SamplingParams(max_tokens=each.output_tokens)),
        )
        for each in planned
    ]
    report = Simulation(loop, clock, arrivals).run()
    counted = [each for each in report.outcomes.values() if each.arrival_s >= setting.warm_up]
    met = sum([_met(each, setting.slo) for each in counted])
    window_s = planned[-1].at_s - setting.warm_up
    blocks = [each.kv_blocks for each in report.occupancy if each.at_s < planned[-1].at_s]
    preemptions = loop.scheduler.preemptions
    return Found(
        met / window_s,
        100.0 * met / len(counted),
        preemptions,
        100.0 * preemptions / len(planned),
        sum(blocks) / len(blocks) / profile.info.num_blocks,
        percentile(sorted([each.ttft_s for each in counted]), 0.95),
        clock.now(),
    )


def _met(outcome: SimOutcome, slo: Slo) -> bool:
    return outcome.finished and slo.met(outcome.ttft_s, outcome.tpot_s or 0.0) == "both"


def rows(found: dict[tuple[str, int, float, str], Found]) -> Iterator[str]:
    """A Markdown table: goodput (and its multiple of reserving), attainment, preemptions of 100
    requests, KV in use."""
    yield "| trace | KV blocks | requests/s | " + " | ".join(WAYS) + " |"
    yield "|---|---:|---:" + "|---:" * len(WAYS) + "|"
    for trace, blocks, rate in dict.fromkeys(key[:3] for key in found):
        base = found[trace, blocks, rate, WAYS[0]].goodput
        cells = []
        for way in WAYS:
            each = found[trace, blocks, rate, way]
            times = f"{each.goodput / base:.2f}x" if base else "-"
            cells.append(
                f"{each.goodput:.2f} ({times}), {each.attained:.0f}%, "
                f"{each.preempted:.1f}, {each.held:.0%}"
            )
        name = trace.split(".")[0]
        yield f"| {name} | {blocks:,} | {rate:g} | {' | '.join(cells)} |"


def main(
    profile: Annotated[str, typer.Option(help="As of tandem simulate.")] = "h100:llama-3-8b",
    kv_blocks: Annotated[list[int] | None, typer.Option(help="KV blocks of 16 tokens.")] = None,
    trace: Annotated[list[str] | None, typer.Option(help="Files of the traces.")] = None,
    rate: Annotated[list[float] | None, typer.Option(help="Requests/s.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Of every request.")] = 1024,
    seconds: Annotated[float, typer.Option(help="Of arrivals.")] = 100.0,
    warm_up: Annotated[float, typer.Option(help="Seconds that do not count.")] = 10.0,
    ttft_slo: float = 2.0,
    tpot_slo: float = 0.1,
    data: Annotated[Path, typer.Option(help="The shared data's folder.")] = Path("../shared/data"),
) -> None:
    """Run every trace, rate and way; write benchmarks/results/pressure-MAX_TOKENS.json and .md."""
    if not (data / "traces").is_dir():
        raise SystemExit(f"skipped: no shared data at {data}")
    setting = Setting(profile, data, seconds, warm_up, max_tokens, Slo(ttft_slo, tpot_slo))
    runs = list(product(trace or TRACES, kv_blocks or BLOCKS, rate or RATES, WAYS))
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        outcomes = pool.map(partial(simulate, setting), *zip(*runs, strict=True))
        found = dict(zip(runs, outcomes, strict=True))
    told = [
        {"trace": trace, "kv_blocks": blocks, "rate": rate, "way": way, **asdict(each)}
        for (trace, blocks, rate, way), each in found.items()
    ]
    given = asdict(setting) | {"data": "", "runs": told}
    stem = f"pressure-{max_tokens}"
    (RESULTS / f"{stem}.json").write_text(json.dumps(given, indent=1) + "\n")
    heading = (
        f"# Admission by the predicted peak of KV memory\n\n`{profile}`,"
        f" `max_tokens` {max_tokens}, {seconds:g} s of arrivals, the first {warm_up:g} s apart."
        f" Objectives: TTFT {ttft_slo:g} s, TPOT {tpot_slo:g} s. Each cell: goodput in requests/s"
        " (its multiple of reserving), share of the requests that met both objectives, preemptions"
        " of 100 requests, mean share of the KV blocks in use.\n"
    )
    page = "\n".join([heading, *rows(found)]) + "\n"
    (RESULTS / f"{stem}.md").write_text(page)
    typer.echo(page)


if __name__ == "__main__":
    typer.run(main)
