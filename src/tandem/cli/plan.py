"""`tandem plan`: runs of the simulator for a plan, and the plan as a table and a picture.

The search is `bench.capacity`; the flags are in `plan_flags`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tandem.bench.capacity import Capacity, Run
from tandem.bench.figures import new_figure, save
from tandem.bench.measure import summarise
from tandem.bench.offline import again, endless, read_batch
from tandem.bench.simulation import TRAINER, Training, arrivals_of, outcomes_of, steps_of
from tandem.bench.workload import PlannedRequest
from tandem.build import build_simulation
from tandem.config import Settings
from tandem.core.clock import VirtualClock
from tandem.core.errors import InvalidRequest
from tandem.core.request import Request
from tandem.core.slo import Slo, WorkClass
from tandem.core.training import TrainerSpec
from tandem.estimators.datasheet import load_profile
from tandem.scheduling.limits import check_request
from tandem.scheduling.scheduler import Scheduler
from tandem.sim.run import Simulation

# A run is given up after so many times the load's length, if its last request is due by then: what
# is left over is outside every objective.
_PATIENCE = 2.0


@dataclass(frozen=True, slots=True)
class Replica:
    """Simulates one replica of a device (see `bench.capacity.Simulate`)."""

    profile: str
    settings: Settings
    batch: Path | None
    prompt_tokens: int
    output_tokens: int
    console: Console

    def __call__(self, load: Sequence[PlannedRequest], *, beside: str = "") -> Run:
        """Run it over the load."""
        found, clock = load_profile(self.profile), VirtualClock()
        vocabulary = found.info.vocab_size
        arrivals, _ = arrivals_of(load, Training(), vocabulary, 0)
        training = Training()
        steps = steps_of(training, vocabulary, 0) if beside == "training" else None
        loop, executor = build_simulation(self.settings, found, clock)
        run = Simulation(
            loop,
            clock,
            arrivals,
            [TrainerSpec(TRAINER)] if steps else [],
            leaps=executor,
            supply=None if steps is None else steps.__next__,
            offline=self._offline(vocabulary, loop.scheduler) if beside == "offline" else None,
        )
        last_s = max(load[-1].at_s, 1.0)
        self.console.print(f"simulating {len(load)} requests, {last_s:.0f} s {beside}".rstrip())
        scheduling = self.settings.scheduling
        slo = Slo(scheduling.ttft_slo, scheduling.tpot_slo)
        due_s = [each.at_s + slo.ttft_s + each.output_tokens * slo.tpot_s for each in load]
        # Beside other work that never runs out, requests that are due later do not count.
        until_s = max(last_s, min(due_s)) if beside else max(_PATIENCE * last_s, *due_s)
        report = run.run(until_s=until_s)
        online = [each for each in outcomes_of(report) if due_s[each.index] <= until_s]
        summary = summarise(online, slo)
        offline = outcomes_of(report, WorkClass.OFFLINE)
        step_tokens = 2 * training.pairs * training.pair_tokens
        return Run(
            summary.goodput_share or 0.0,
            summary,
            sum(each.output_tokens for each in offline) / report.ended_s,
            step_tokens * sum(step.applied for step in report.steps) / report.ended_s,
        )

    def _offline(self, vocabulary: int, scheduler: Scheduler) -> Iterator[Request]:
        """Without end; so what the engine would refuse is left out and told. Raises
        `InvalidRequest` if that is all there is."""
        stream = endless(self.prompt_tokens, self.output_tokens, vocabulary, 0)
        requests = read_batch(self.batch, vocabulary) if self.batch else [next(stream)]
        limits = scheduler.max_model_len, scheduler.cache.num_blocks * scheduler.cache.block_size
        refused, fitting = list[str](), list[Request]()
        for request in requests:
            try:
                check_request(request, *limits)
                fitting.append(request)
            except InvalidRequest as error:
                refused.append(f"{request.request_id} cannot run on {self.profile}: {error}")
        if not fitting:
            raise InvalidRequest(f"no offline request can run; {refused[0]}")
        if refused:
            told = f"{len(refused)} of {len(requests)} offline requests are left out; {refused[0]}"
            self.console.print(told, markup=False)
        return again(fitting) if self.batch else stream


def table_of(plans: Sequence[Capacity]) -> Table:
    """A column a device; throughputs are of all replicas together."""
    table = Table("", *(plan.device for plan in plans))

    def row(name: str, *cells: str) -> None:
        table.add_row(name, *cells)

    row("replicas", *(f"{plan.replicas}" for plan in plans))
    row("busiest minutes, inside", *(f"{plan.peak.attainment:.1%}" for plan in plans))
    row("one fewer, inside", *(_fewer(plan) for plan in plans))
    row("with batches, inside", *(f"{plan.offline.attainment:.1%}" for plan in plans))
    total = [plan.replicas * plan.offline.offline_tokens_s for plan in plans]
    row("left for batches, output tokens/s", *(f"{each:.0f}" for each in total))
    row("with learning, inside", *(f"{plan.training.attainment:.1%}" for plan in plans))
    total = [plan.replicas * plan.training.training_tokens_s for plan in plans]
    row("left for learning, trained tokens/s", *(f"{each:.0f}" for each in total))
    return table


def _fewer(plan: Capacity) -> str:
    found = dict(plan.tried).get(plan.replicas - 1)
    return "" if found is None else f"{found:.1%}"


def draw(plans: Sequence[Capacity], attainment: float, beside: Path) -> list[Path]:
    """Attainment over replicas; the files written."""
    picture = new_figure(6.0, 4.0)
    axes = picture.subplots()
    for plan in plans:
        numbers, shares = zip(*plan.tried, strict=True)
        axes.plot(numbers, shares, marker="o", label=plan.device)
    axes.axhline(attainment, linestyle="--", color="grey")
    axes.set_xlabel("replicas")
    axes.set_ylabel("requests inside both objectives, busiest minutes")
    axes.set_ylim(0.0, 1.02)
    axes.legend()
    return save(picture, beside.parent, beside.stem)
