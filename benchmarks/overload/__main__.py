"""What becomes of objectives under overload: with and without shedding by predicted wait, first
come, first served (`fcfs`) and those in time first (`unified`).

The real scheduler and the API's admission over a simulated device; no request is sent twice. Loads
are multiples of what the device serves while it always has a queue.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

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
from tandem.engine.loop import EngineLoop
from tandem.estimators.datasheet import load_profile
from tandem.services.answering.admission_control import AdmissionControl, Ticket
from tandem.sim.run import SimOutcome, Simulation


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that arrive at random, and their objective."""

    profile: str
    prompts: str
    outputs: str
    slo: Slo
    seconds: float
    seed: int


class Door:
    """Asks the admission before a request reaches the loop, as the API does; what is refused ends
    as an outcome with an error."""

    def __init__(self, loop: EngineLoop, admission: AdmissionControl, ttft_s: float) -> None:
        self._add, self._step = loop.add, loop.step
        self._admission, self._ttft_s = admission, ttft_s
        self._tickets: dict[str, Ticket] = {}

    def add(self, request: Request) -> None:
        """In place of the loop's."""
        try:
            [ticket] = self._admission.admit([len(request.prompt)], self._ttft_s)
        except Overloaded as error:
            raise InvalidRequest("shed") from error
        self._tickets[request.request_id] = ticket
        self._add(request)

    def step(self, urgent: Urgent = never) -> list[TokenEvent]:
        """In place of the loop's; in a leap nobody gets a first token."""
        events = self._step(urgent)
        for event in events:
            self._tickets[event.request_id].started()
        return events


def simulate(load: Load, rate: float, policy: str, factor: float) -> list[SimOutcome]:
    """Outcomes of all requests; those that were refused have no times."""
    profile = load_profile(load.profile)
    planned = build_workload(
        WorkloadOptions(
            Arrivals.POISSON,
            parse_lengths(load.prompts),
            parse_lengths(load.outputs),
            Limits(None, load.seconds, None, None),
            rate=rate,
            vocabulary=profile.info.vocab_size,
            seed=load.seed,
        )
    )
    arrivals, _ = arrivals_of(planned, Training(), profile.info.vocab_size, load.seed)
    scheduling = {"policy": policy, "ttft_slo": load.slo.ttft_s}
    clock = VirtualClock()
    loop, executor = build_simulation(
        resolve({"scheduling": scheduling}), profile, clock, noise=False
    )
    admission = AdmissionControl(ServerConfig(max_wait_factor=factor), clock)
    door = Door(loop, admission, load.slo.ttft_s)
    loop.add, loop.step = door.add, door.step  # type: ignore[method-assign]
    report = Simulation(loop, clock, arrivals, leaps=executor).run()
    return list(report.outcomes.values())


def capacity(load: Load) -> float:
    """Requests a second that end while a queue is never empty."""
    outcomes = simulate(load, 10_000.0 / load.seconds, "fcfs", 0.0)
    ends = sorted(outcome.last_s for outcome in outcomes if not math.isnan(outcome.last_s))
    first, last = ends[len(ends) // 10], ends[len(ends) * 9 // 10]
    return 0.8 * len(ends) / (last - first)


def main(
    profile: Annotated[str, typer.Option(help="As of tandem simulate.")] = "a100-40g:llama-3-8b",
    prompt_tokens: str = "lognormal:512:1.0",
    output_tokens: str = "lognormal:128:1.0",
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
    offered = Load(profile, prompt_tokens, output_tokens, slo, seconds, seed)
    most = capacity(offered)
    console = Console()
    console.print(f"capacity: {most:.2f} requests/s")
    table = Table("load", "factor", "policy", "refused", "TTFT met", "both met", "p50", "p99")
    for times in load or [0.9, 1.2, 1.5]:
        for bound in factor or [0.0, 5.0]:
            for name in policy or ["fcfs", "unified"]:
                outcomes = simulate(offered, times * most, name, bound)
                table.add_row(f"{times:g}", f"{bound:g}", name, *figures(outcomes, slo))
    console.print(table)


def figures(outcomes: list[SimOutcome], slo: Slo) -> list[str]:
    """Shares of all requests, refused ones included, and TTFT of the others in seconds."""
    served = [outcome for outcome in outcomes if outcome.error is None]
    waits = sorted(outcome.ttft_s for outcome in served)
    met = [slo.met(outcome.ttft_s, outcome.tpot_s or 0.0) for outcome in served]
    counts = (len(outcomes) - len(served), met.count("ttft") + met.count("both"), met.count("both"))
    shares = [f"{count / len(outcomes):.1%}" for count in counts]
    return [*shares, f"{percentile(waits, 0.5):.2f}", f"{percentile(waits, 0.99):.2f}"]


if __name__ == "__main__":
    typer.run(main)
