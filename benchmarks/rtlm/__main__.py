"""RT-LM, its baselines and `unified` on real answer lengths, in simulation over a profile.

    tandem profile smollm2 --out smollm2.json; python -m benchmarks rtlm --profile smollm2.json

Each policy gets the same tasks at the same times. The page has response times and throughput by
the variance of the predictions (tables III and IV), with static and continuous batches; the
ablation; the parameters alpha and b; and benign response times by the share of malicious tasks.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Annotated

import typer

from benchmarks.lengths.rows import kept
from benchmarks.rtlm import load
from benchmarks.rtlm.load import SUBSETS, Task
from tandem.build import build_simulation
from tandem.config import resolve
from tandem.core.clock import VirtualClock
from tandem.estimators.datasheet import load_profile
from tandem.estimators.latency import LatencyModel
from tandem.estimators.profile import Profile
from tandem.sim.run import Arrival, Simulation

RESULTS = Path("benchmarks/results")
BASELINES = ("fifo", "hpf", "luf", "muf")
SHARES = tuple(round(0.1 * place, 1) for place in range(11))
ALPHAS = (0.0, 0.5, 1.0, 1.5, 2.0)
GATHERS = (1.0, 1.4, 1.8, 2.2, 2.6, 3.0)


@dataclass(frozen=True, slots=True)
class Run:
    """Response times in seconds, finished tasks a minute, and what the simulation took of the
    simulated time: more than the decisions did."""

    study: str
    subset: str
    policy: str
    static: bool
    mean_s: float
    most_s: float
    per_minute: float
    overhead: float


@dataclass(frozen=True)
class Study:
    """What all runs have in common. `options` are those that every batching policy gets."""

    profile: Profile
    options: Mapping[str, str]
    points: Mapping[str, str]  # phi and eta
    unit_s: float  # the paper's second, so that the device is as busy as wanted
    seed: int
    max_batch_tokens: int

    def of(self, policy: str, *, static: bool, **more: str) -> tuple[str, dict[str, str]]:
        """A policy with its options."""
        if policy == "unified":
            return policy, {}
        options = {**self.options, "static": str(static).lower(), **more}
        wanted = {"hpf": ("phi",), "rt_lm": ("phi", "eta")}.get(policy, ())
        return policy, {**options, **{name: self.points[name] for name in wanted}}

    def load(self, tasks: Sequence[Task]) -> list[Arrival]:
        """The same for all policies."""
        rng = Random(self.seed)
        return load.arrivals(tasks, load.times(self.unit_s, rng), rng)

    def run(
        self,
        study: str,
        subset: str,
        policy: str,
        arrivals: list[Arrival],
        *,
        static: bool,
        counts: Callable[[str], bool] = lambda name: True,
        label: str = "",
        **more: str,
    ) -> Run:
        """One run to the end of its last task; figures are of the tasks that `counts` names."""
        name, options = self.of(policy, static=static, **more)
        scheduling = {
            "policy": name,
            "policy_options": options,
            "max_batch_tokens": self.max_batch_tokens,
        }
        clock = VirtualClock()
        settings = resolve({"scheduling": scheduling}, environ={})
        loop, executor = build_simulation(settings, self.profile, clock, noise=False)
        began_s = time.perf_counter()
        report = Simulation(loop, clock, arrivals, [], leaps=executor).run()
        took_s = time.perf_counter() - began_s
        done = [each for name, each in report.outcomes.items() if counts(name)]
        waits = [each.last_s - each.arrival_s for each in done]
        return Run(
            study,
            subset,
            label or policy,
            static,
            fmean(waits),
            max(waits),
            60.0 * len(done) / report.ended_s,
            took_s / report.ended_s,
        )

    def tables(self, tasks: Sequence[Task]) -> Iterable[Run]:
        """Tables III and IV, figures 9 and 11."""
        for subset in SUBSETS:
            arrivals = self.load(load.subset(tasks, subset))
            for static in (True, False):
                for policy in (*BASELINES, "rt_lm"):
                    yield self.run("tables", subset, policy, arrivals, static=static)
            yield self.run("tables", subset, "unified", arrivals, static=False)

    def ablation(self, tasks: Sequence[Task]) -> Iterable[Run]:
        """Figure 10, without offloading."""
        arrivals = self.load(load.subset(tasks, "large"))
        for static in (True, False):
            for label, policy, more in (
                ("FIFO", "fifo", {}),
                ("UP", "rt_lm", {"consolidate": "false"}),
                ("UP, equation 2", "rt_lm", {"consolidate": "false", "slack": "true"}),
                ("UP, as printed", "rt_lm", {"consolidate": "false", "literal": "true"}),
                ("UP+C", "rt_lm", {}),
            ):
                yield self.run(
                    "ablation", "large", policy, arrivals, static=static, label=label, **more
                )

    def parameters(self, tasks: Sequence[Task]) -> Iterable[Run]:
        """Figure 13: `alpha` with `gather` at 2, then `gather` with `alpha` at 1."""
        arrivals = self.load(load.subset(tasks, "large"))
        dials = [{"alpha": str(alpha), "gather": "2.0"} for alpha in ALPHAS]
        dials += [{"alpha": "1.0", "gather": str(gather)} for gather in GATHERS]
        for more in dials:
            label = ", ".join(f"{name} {value}" for name, value in more.items())
            yield self.run(
                "parameters", "large", "rt_lm", arrivals, static=True, label=label, **more
            )

    def malicious(self, tasks: Sequence[Task]) -> Iterable[Run]:
        """Figure 14: response times of benign tasks."""
        for share in SHARES[:-1]:
            rng = Random(self.seed)
            at_s = load.times(self.unit_s, rng)
            chosen = load.with_malicious(tasks, share, len(at_s), rng)
            arrivals = [
                load.request(task, number, when)
                for number, ((task, _), when) in enumerate(zip(chosen, at_s, strict=True))
            ]
            benign = {f"task-{number}" for number, (_, bad) in enumerate(chosen) if not bad}
            for policy in ("fifo", "luf", "rt_lm", "unified"):
                yield self.run(
                    "malicious",
                    f"{share:.0%}",
                    policy,
                    arrivals,
                    static=policy != "unified",
                    counts=benign.__contains__,
                )


def page(head: str, runs: Sequence[Run]) -> str:
    """The results as Markdown."""
    parts = ["# RT-LM on real answer lengths", "", head, ""]
    titles = {
        "tables": "Response times and throughput (tables III and IV)",
        "ablation": "Ablation, large variance (figure 10)",
        "parameters": "Parameters, large variance, static batches (figure 13)",
        "malicious": "Benign tasks by the share of malicious ones (figure 14)",
    }
    for study, title in titles.items():
        some = [run for run in runs if run.study == study]
        if not some:
            continue
        parts += [
            f"## {title}",
            "",
            "| tasks | policy | batches | mean, s | maximum, s | tasks/min | simulated in |",
            "|---|---|---|---:|---:|---:|---:|",
        ]
        for run in some:
            kind = "static" if run.static else "continuous"
            parts.append(
                f"| {run.subset} | {run.policy} | {kind} | {run.mean_s:.2f} | {run.most_s:.2f} |"
                f" {run.per_minute:.1f} | {run.overhead:.2%} |"
            )
        parts.append("")
    return "\n".join(parts)


def main(
    profile: Annotated[str, typer.Option(help="A file of `tandem profile`, or DEVICE:MODEL.")],
    rows: Annotated[Path, typer.Option(help="Lengths of answers, as `lengths` collects them.")] = (
        RESULTS / "lengths-smollm2.jsonl.gz"
    ),
    forecast: Annotated[str, typer.Option(help="Step of the ladder of `lengths`.")] = "lexical",
    length_scale: Annotated[float, typer.Option(help="Of prompts and answers.")] = 0.25,
    busy: Annotated[float, typer.Option(help="Mean load, times the capacity.")] = 0.3,
    seed: Annotated[int, typer.Option(help="Of arrivals and order.")] = 0,
    max_batch_tokens: Annotated[int, typer.Option(help="As of tandem serve.")] = 256,
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = RESULTS,
) -> None:
    """Simulate all policies; write rtlm-MODEL.json and .md."""
    found = load_profile(profile)
    tasks = load.tasks_of(kept(rows), length_scale, forecast)
    latency = LatencyModel(found.rates)
    context = round(fmean(task.input_tokens + task.output_tokens / 2 for task in tasks))
    batch = load.batch_of(latency, context)
    phi, eta = load.coefficients(latency, tasks, batch, context)
    capacity = 60.0 * batch / (eta * fmean(task.output_tokens for task in tasks))
    unit_s = fmean(load.BETAS) / (busy * capacity)
    points = {"phi": f"{phi:.6g}", "eta": f"{eta:.6g}"}
    study = Study(found, {"batch": str(batch)}, points, unit_s, seed, max_batch_tokens)
    head = (
        f"{len(tasks)} answers of {rows.name}, {length_scale:g} times as long; forecasts by"
        f" `{forecast}` (cross-validation). Simulated: {found.info.model} on {found.source}."
        f" C = {batch}, phi = {phi:.4f} s, eta = {eta:.4f} s. Arrivals are Poisson,"
        f" {load.BETAS[0]} to {load.BETAS[-1]} in {60 * unit_s:.1f} s, each for so long, shuffled:"
        f" {busy:g} times what a full batch of average answers serves."
    )
    made: list[Run] = []
    for part in (study.tables, study.ablation, study.parameters, study.malicious):
        for run in part(tasks):
            made.append(run)
            typer.echo(
                f"{run.study:10} {run.subset:7} {run.policy:24} static={run.static!s:5}"
                f" mean {run.mean_s:7.2f} max {run.most_s:7.2f} {run.per_minute:6.1f}/min"
            )
    stem = f"rtlm-{Path(found.info.model).stem.lower()}"
    out.mkdir(parents=True, exist_ok=True)
    content = {"schema": "tandem-rtlm-1", "head": head, "runs": [asdict(run) for run in made]}
    (out / f"{stem}.json").write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
    (out / f"{stem}.md").write_text(page(head, made))


if __name__ == "__main__":
    typer.run(main)
