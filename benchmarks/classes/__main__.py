"""Online requests alone, beside a batch without end, and beside a batch and training.

    python -m benchmarks classes --rate 1 --seconds 1200

One engine on this machine, three runs over the same recorded arrivals. The page has the online
requests' figures of each run, what the other classes got, and the tokens of each class over time.
Exit status 1 if beside the others the share inside both objectives falls by more than a point, a
99th percentile is neither inside its objective nor within a tenth of its value alone, a class got
nothing, or a block is lost.
"""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from benchmarks.planner.load import TRACE, loads, settings_of
from benchmarks.reporting.machine import describe, slug
from tandem.bench.fidelity import Account, Steps
from tandem.bench.figures import new_figure, save
from tandem.bench.measure import percentile, summarise
from tandem.bench.offline import endless
from tandem.bench.simulation import Training, arrivals_of, outcomes_of
from tandem.bench.workload import PlannedRequest
from tandem.build import build_executor, join_loop
from tandem.config import Settings
from tandem.core.clock import SleepingClock
from tandem.core.ports import Executor
from tandem.core.slo import Slo, WorkClass
from tandem.estimators.latency import LatencyModel
from tandem.profiler import measure
from tandem.sim.run import SimReport, Simulation

RESULTS = Path(__file__).parents[1] / "results"
RUNS = ("alone", "batch", "batch and training")
WORST_POINTS, WORST_RATIO = 0.01, 1.1
OFFLINE = (256, 32)  # tokens of a prompt and of its answer
SAMPLE_S = 5.0


@dataclass(frozen=True, slots=True)
class Moment:
    """Tokens so far: generated online and offline, and trained."""

    at_s: float
    online: int
    offline: int
    trained: int


@dataclass(slots=True)
class Found:
    """One run. Percentiles are the 99th; rates are tokens per second."""

    run: str
    requests: int
    attainment: float
    ttft_p99_s: float
    tpot_p99_s: float
    offline_tokens_s: float
    trained_tokens_s: float
    lost_blocks: int
    moments: list[Moment] = field(default_factory=list)


def faults(found: Sequence[Found], slo: Slo) -> list[str]:
    """What does not hold; the first run is that alone."""
    alone, *others = found
    wrong = [
        f"{each.run}: {each.lost_blocks} blocks are lost" for each in found if each.lost_blocks
    ]
    for each in others:
        if each.attainment < alone.attainment - WORST_POINTS:
            wrong.append(f"{each.run}: {each.attainment:.1%} inside, alone {alone.attainment:.1%}")
        for name, bound in (("ttft_p99_s", slo.ttft_s), ("tpot_p99_s", slo.tpot_s)):
            value, before = getattr(each, name), getattr(alone, name)
            if value > max(bound, WORST_RATIO * before):
                wrong.append(f"{each.run}: {name} is {value:.3f}, alone {before:.3f}")
        if not each.offline_tokens_s:
            wrong.append(f"{each.run}: no offline request went on")
    if not found[-1].trained_tokens_s:
        wrong.append(f"{found[-1].run}: nothing was trained")
    return wrong


@dataclass(frozen=True, slots=True)
class Study:
    """What all runs have in common."""

    executor: Executor
    settings: Settings
    load: Sequence[PlannedRequest]
    seconds: float
    slo: Slo
    steps: Steps

    def run(self, name: str, rates_of: LatencyModel) -> Found:
        """One run, with a new scheduler and an empty cache."""
        gc.collect()
        gc.freeze()
        clock, trains = SleepingClock(), name == RUNS[2]
        loop = join_loop(self.settings, self.executor, clock=clock, rates=rates_of.rates)
        account = Account(LatencyModel(rates_of.rates))
        loop.on_plan = account
        vocabulary = loop.info.vocab_size
        arrivals, _ = arrivals_of(self.load, Training(), vocabulary, 0)
        simulation = Simulation(
            loop,
            clock,
            arrivals,
            [self.steps.trainer] if trains else [],
            sample_s=SAMPLE_S,
            supply=self.steps.supply(vocabulary, 0) if trains else None,
            offline=None if name == RUNS[0] else endless(*OFFLINE, vocabulary, 0),
        )
        moments: list[Moment] = []

        def look(now: float) -> None:
            made = dict.fromkeys(WorkClass, 0)
            for outcome in simulation.report.outcomes.values():
                made[outcome.work_class] += outcome.output_tokens
            online, offline = made[WorkClass.ONLINE], made[WorkClass.OFFLINE]
            moments.append(Moment(now, online, offline, account.trained_rows))

        report = simulation.run(self.seconds, look)
        look(report.ended_s)
        for key in list(report.outcomes):
            loop.abort(key)
        if trains:
            loop.teaching.close_trainer(self.steps.trainer.name)
        loop.scheduler.cache.check()
        return self._found(name, report, moments, loop.scheduler.cache.held_blocks)

    def _found(self, name: str, report: SimReport, moments: list[Moment], lost: int) -> Found:
        due = [
            each
            for each in outcomes_of(report)
            if each.error != "unfinished" or self._was_due(each.index, report.ended_s)
        ]
        summary = summarise(due, self.slo)
        online = [each for each in report.outcomes.values() if each.work_class is WorkClass.ONLINE]
        waits = sorted(each.ttft_s for each in online if not math.isnan(each.ttft_s))
        paces = sorted(pace for each in online if (pace := each.tpot_s) is not None)
        last = moments[-1]
        return Found(
            name,
            len(due),
            summary.goodput_share or 0.0,
            percentile(waits, 0.99),
            percentile(paces, 0.99),
            last.offline / report.ended_s,
            last.trained / report.ended_s,
            lost,
            moments,
        )

    def _was_due(self, index: int, ended_s: float) -> bool:
        asked = self.load[index]
        answer_s = self.slo.ttft_s + asked.output_tokens * self.slo.tpot_s
        return asked.at_s + answer_s <= ended_s


def page(title: str, found: Sequence[Found], wrong: Sequence[str], picture: str) -> str:
    """The result as Markdown."""
    head = "| | " + " | ".join(each.run for each in found) + " |"
    rows = [title, "", head, "|---|" + "---:|" * len(found)]
    shown = [
        ("online requests", lambda each: f"{each.requests}"),
        ("inside both objectives", lambda each: f"{each.attainment:.1%}"),
        ("TTFT, 99th percentile, s", lambda each: f"{each.ttft_p99_s:.2f}"),
        ("TPOT, 99th percentile, ms", lambda each: f"{1e3 * each.tpot_p99_s:.0f}"),
        ("offline output tokens/s", lambda each: f"{each.offline_tokens_s:.1f}"),
        ("trained tokens/s", lambda each: f"{each.trained_tokens_s:.1f}"),
        ("lost blocks", lambda each: f"{each.lost_blocks}"),
    ]
    rows += [f"| {name} | " + " | ".join(map(tell, found)) + " |" for name, tell in shown]
    verdict = "Everything holds." if not wrong else "Does not hold: " + "; ".join(wrong) + "."
    return "\n".join([*rows, "", verdict, "", f"![Tokens of each class over time]({picture})", ""])


def draw(found: Found, folder: Path, stem: str) -> None:
    """Tokens per second of each class over time, of one run."""
    picture = new_figure(8.0, 3.5)
    axes = picture.subplots()
    pairs = list(zip(found.moments, found.moments[1:], strict=False))
    for name in ("online", "offline", "trained"):
        rates = [
            (getattr(after, name) - getattr(before, name)) / max(after.at_s - before.at_s, 1e-9)
            for before, after in pairs
        ]
        axes.plot([after.at_s for _, after in pairs], rates, label=name)
    axes.set_xlabel("seconds")
    axes.set_ylabel("tokens/s")
    axes.legend()
    save(picture, folder, stem)


def main(
    model: Annotated[str, typer.Option(help="What is served.")] = "smollm2",
    trace: Annotated[Path, typer.Option(help="Recorded requests.")] = TRACE,
    rate: Annotated[float, typer.Option(help="Online requests/s.")] = 0.5,
    seconds: Annotated[float, typer.Option(help="Of each run.")] = 1200.0,
    context: Annotated[int, typer.Option(help="Tokens an online request may have.")] = 1024,
    ttft_slo: Annotated[float, typer.Option(help="Seconds to the first token.")] = 2.0,
    tpot_slo: Annotated[float, typer.Option(help="Seconds a token after that.")] = 0.15,
    policy: Annotated[str, typer.Option(help="As of `tandem serve`.")] = "unified",
    profile_seconds: Annotated[float, typer.Option(help="Of the profile.")] = 60.0,
    out: Annotated[Path, typer.Option(help="Folder of the result.")] = RESULTS,
) -> None:
    """Measure the three runs."""
    settings = settings_of(model, ttft_slo, tpot_slo, policy)
    slo, console = Slo(ttft_slo, tpot_slo), Console(stderr=True)
    executor = build_executor(settings, lambda stage, done: None)
    profile = measure(executor, settings, profile_seconds, lambda done: None)
    load = loads(trace, seconds, context, executor.info.vocab_size)(rate)
    steps = Steps(rank=settings.learning.rank)
    study = Study(executor, settings, load, seconds, slo, steps)
    found = []
    for name in RUNS:
        found.append(study.run(name, LatencyModel(profile.rates)))
        console.print(f"{name}: {found[-1].attainment:.1%} inside")
    wrong, machine = faults(found, slo), describe("cpu", len(os.sched_getaffinity(0)))
    out.mkdir(parents=True, exist_ok=True)
    stem = f"classes-{slug(machine)}"
    content = {
        "machine": machine,
        "model": model,
        "trace": trace.name,
        "rate": rate,
        "seconds": seconds,
        "slo": asdict(slo),
        "policy": policy,
        "faults": wrong,
        "runs": [asdict(each) for each in found],
    }
    text = msgspec.json.format(msgspec.json.encode(content), indent=1)
    (out / f"{stem}.json").write_bytes(text + b"\n")
    draw(found[-1], out, stem)
    title = (
        f"{model}, {policy}, {rate:g} requests/s of {trace.name} for {seconds:g} s; "
        f"TTFT {ttft_slo:g} s, TPOT {tpot_slo:g} s; {stem.removeprefix('classes-')}."
    )
    shown = page(title, found, wrong, f"{stem}.png")
    (out / f"{stem}.md").write_text(shown)
    print(shown)
    raise typer.Exit(1 if wrong else 0)


if __name__ == "__main__":
    typer.run(main)
