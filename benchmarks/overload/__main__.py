"""What becomes of objectives under overload: with and without shedding by predicted wait, first
come, first served (`fcfs`) and those in time first (`unified`).

The real scheduler and the API's admission over a simulated device; no request is sent twice. Loads
are multiples of what the device serves while it always has a queue. With `--answers` the lengths
are those of real answers, and each row is run without and with their forecasts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.lengths.rows import kept
from benchmarks.rtlm.load import tasks_of
from tandem.bench.answers import Answer, arrivals
from tandem.bench.lengths import parse_lengths
from tandem.bench.measure import percentile
from tandem.bench.options import Arrivals, WorkloadOptions, build_workload
from tandem.bench.simulation import Training, arrivals_of
from tandem.bench.workload import Limits
from tandem.build import build_simulation
from tandem.config import ServerConfig, resolve
from tandem.core.clock import VirtualClock
from tandem.core.errors import InvalidRequest, Overloaded
from tandem.core.events import TokenEvent
from tandem.core.ports import Urgent, never
from tandem.core.request import Request
from tandem.core.slo import Slo
from tandem.core.training import TrainingStep
from tandem.engine.loop import EngineLoop
from tandem.estimators.datasheet import load_profile
from tandem.services.answering.admission_control import AdmissionControl, Ticket
from tandem.sim.run import Arrival, SimOutcome, Simulation


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that arrive at random, and their objective."""

    profile: str
    prompts: str
    outputs: str
    slo: Slo
    seconds: float
    seed: int
    answers: Sequence[Answer] = ()  # in place of `prompts` and `outputs`, with forecasts

    def arrivals(self, rate: float) -> list[Arrival]:
        """Poisson, so many a second."""
        if self.answers:
            rng, at_s = Random(self.seed), [0.0]
            while at_s[-1] < self.seconds:
                at_s.append(at_s[-1] + rng.expovariate(rate))
            return arrivals(self.answers, at_s[1:-1], rng)
        vocabulary = load_profile(self.profile).info.vocab_size
        planned = build_workload(
            WorkloadOptions(
                Arrivals.POISSON,
                parse_lengths(self.prompts),
                parse_lengths(self.outputs),
                Limits(None, self.seconds, None, None),
                rate=rate,
                vocabulary=vocabulary,
                seed=self.seed,
            )
        )
        return arrivals_of(planned, Training(), vocabulary, self.seed)[0]


@dataclass(frozen=True, slots=True)
class Result:
    """Outcomes of all requests (those that were refused have no times), and for each that got its
    first token too late the wait that was predicted and the real one, in seconds."""

    outcomes: list[SimOutcome]
    waits: list[tuple[float, float]]


class Door:
    """Asks the admission before a request reaches the loop, as the API does; what is refused ends
    as an outcome with an error."""

    def __init__(self, loop: EngineLoop, admission: AdmissionControl, ttft_s: float) -> None:
        self._add, self._step = loop.add, loop.step
        self._admission, self._ttft_s = admission, ttft_s
        self._tickets: dict[str, Ticket] = {}
        self.predicted_s: dict[str, float] = {}

    def add(self, request: Request) -> None:
        """In place of the loop's."""
        try:
            [ticket] = self._admission.admit([len(request.prompt)], self._ttft_s)
        except Overloaded as error:
            raise InvalidRequest("shed") from error
        self._tickets[request.request_id] = ticket
        self.predicted_s[request.request_id] = self._admission.wait_s
        try:
            self._add(request)
        except InvalidRequest:
            ticket.close()
            raise

    def step(self, urgent: Urgent = never) -> list[TokenEvent]:
        """In place of the loop's; in a leap nobody gets a first token."""
        events = self._step(urgent)
        for event in events:
            self._tickets[event.request_id].started()
        return events


def simulate(load: Load, rate: float, policy: str, factor: float, *, told: bool) -> Result:
    """One run. Without `told` nobody knows the forecasts."""
    coming = load.arrivals(rate)
    if not told:
        coming = [replace(each, work=_untold(each.work)) for each in coming]
    scheduling = {"policy": policy, "ttft_slo": load.slo.ttft_s}
    clock = VirtualClock()
    loop, executor = build_simulation(
        resolve({"scheduling": scheduling}), load_profile(load.profile), clock, noise=False
    )
    admission = AdmissionControl(ServerConfig(max_wait_factor=factor), clock)
    door = Door(loop, admission, load.slo.ttft_s)
    loop.add, loop.step = door.add, door.step  # type: ignore[method-assign]
    report = Simulation(loop, clock, coming, leaps=executor).run()
    waits = [
        (predicted_s, outcome.ttft_s)
        for name, predicted_s in door.predicted_s.items()
        if predicted_s and (outcome := report.outcomes[name]).ttft_s > load.slo.ttft_s
    ]
    return Result(list(report.outcomes.values()), waits)


def _untold(work: Request | TrainingStep) -> Request | TrainingStep:
    return replace(work, length=None) if isinstance(work, Request) else work


def capacity(load: Load) -> float:
    """Requests a second that end while a queue is never empty."""
    outcomes = simulate(load, 10_000.0 / load.seconds, "fcfs", 0.0, told=False).outcomes
    ends = sorted(outcome.last_s for outcome in outcomes if not math.isnan(outcome.last_s))
    first, last = ends[len(ends) // 10], ends[len(ends) * 9 // 10]
    return 0.8 * len(ends) / (last - first)


def main(
    profile: Annotated[str, typer.Option(help="As of tandem simulate.")] = "a100-40g:llama-3-8b",
    prompt_tokens: str = "lognormal:512:1.0",
    output_tokens: str = "lognormal:128:1.0",
    answers: Annotated[
        Path | None, typer.Option(help="Lengths of answers, as `lengths` collects them.")
    ] = None,
    load: Annotated[list[float] | None, typer.Option(help="Times the capacity.")] = None,
    factor: Annotated[list[float] | None, typer.Option(help="--max-wait-factor.")] = None,
    policy: Annotated[list[str] | None, typer.Option(help="Repeatable.")] = None,
    ttft_slo: float = 1.0,
    tpot_slo: float = 0.1,
    seconds: float = 120.0,
    seed: int = 0,
) -> None:
    """One row for each load, factor and policy."""
    slo = Slo(ttft_slo, tpot_slo)
    tasks = tasks_of(kept(answers), "lexical") if answers else []
    offered = Load(profile, prompt_tokens, output_tokens, slo, seconds, seed, tasks)
    most = capacity(offered)
    console = Console()
    console.print(f"capacity: {most:.2f} requests/s")
    table = Table("load", "factor", "policy", *_FIGURES)
    for times in load or [0.9, 1.2, 1.5]:
        for bound in factor or [0.0, 5.0]:
            for name in policy or ["fcfs", "unified"]:
                for told in (False, True) if tasks else (False,):
                    found = simulate(offered, times * most, name, bound, told=told)
                    label = f"{name}, forecasts" if told else name
                    table.add_row(f"{times:g}", f"{bound:g}", label, *figures(found, slo))
    console.print(table)


_FIGURES = ("refused", "TTFT met", "both met", "p50", "p99", "response", "predicted/real")


def figures(found: Result, slo: Slo) -> list[str]:
    """Shares of all requests, refused ones included; of the others TTFT and the mean response time
    in seconds; and of those that came too late the predicted wait by the real one, the median."""
    outcomes = found.outcomes
    served = [outcome for outcome in outcomes if outcome.error is None]
    waits = sorted(outcome.ttft_s for outcome in served)
    met = [slo.met(outcome.ttft_s, outcome.tpot_s or 0.0) for outcome in served]
    counts = (len(outcomes) - len(served), met.count("ttft") + met.count("both"), met.count("both"))
    shares = [f"{count / len(outcomes):.1%}" for count in counts]
    response_s = fmean(outcome.last_s - outcome.arrival_s for outcome in served)
    shares_of_waits = [predicted / real for predicted, real in found.waits]
    return [
        *shares,
        f"{percentile(waits, 0.5):.2f}",
        f"{percentile(waits, 0.99):.2f}",
        f"{response_s:.2f}",
        f"{median(shares_of_waits):.2f}" if shares_of_waits else "-",
    ]


if __name__ == "__main__":
    typer.run(main)
