"""One model on several engines: rounds of all jobs, engines taking turns within each job.

Knows workers and jobs, not engines. Invariant: within a round an engine's figure and the ceilings
it is compared with are measured minutes apart at most, on the same machine.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.peers.driver import Workers, WorkerSpec, in_new_process
from benchmarks.peers.gguf_files import ensure_gguf
from benchmarks.peers.jobs import JOBS, Figures, Job, medians
from benchmarks.peers.models import ensure_model, prefill_flops, shape_of, streamed_bytes

CEILINGS = "ceilings"
CEILINGS_ENGINE = "benchmarks.peers.engine_ceilings"
WARMUP_TOKENS = 4


@dataclass
class Comparison:
    """What was measured for one model; `samples[job][engine]` has the figures of every round."""

    model: str
    streamed_bytes: int
    prefill_flops: float
    workers: dict[str, dict[str, Any]] = field(default_factory=dict)
    ceilings: list[Figures] = field(default_factory=list)
    samples: dict[str, dict[str, list[Figures]]] = field(default_factory=dict)
    idle_cpu_s: dict[str, float] = field(default_factory=dict)

    def median(self, job: str, engine: str) -> Figures:
        """Medians over the rounds."""
        return medians(self.samples[job][engine])

    def ratio(self, job: str, figure: str, ours: str, peer: str) -> float:
        """Median over the rounds of the two engines' ratio within a round."""
        pairs = zip(self.samples[job][ours], self.samples[job][peer], strict=True)
        return medians([{"ratio": a[figure] / b[figure]} for a, b in pairs])["ratio"]

    def share(self, job: Job, figure: str, engine: str) -> float:
        """Median share of the round's ceiling: matrix rate for a prefill, else weight streaming.

        A decode step of any number of sequences reads the weights once.
        """
        shares: list[Figures] = []
        for sample, ceiling in zip(self.samples[job.name][engine], self.ceilings, strict=True):
            if figure == "prefill":
                per_token = self.prefill_flops / job.prompt_tokens
                limit = ceiling["flops"] / per_token
            else:
                limit = job.sequences * ceiling["read_bytes_per_s"] / self.streamed_bytes
            shares.append({"share": sample[figure] / limit})
        return medians(shares)["share"]


@dataclass(frozen=True)
class Plan:
    """What to compare. `alone` guards every single job (e.g. takes a lock on the machine)."""

    specs: list[WorkerSpec]
    rounds: int
    cache: Path
    seed: int = 0
    say: Callable[[str], None] = print
    alone: Callable[[], AbstractContextManager[None]] = nullcontext


def compare(model: str, plan: Plan) -> Comparison:
    """Load `model` everywhere, warm up, measure `plan.rounds` rounds."""
    folder = ensure_model(model, plan.cache)
    result = Comparison(model, streamed_bytes(model), prefill_flops(model, JOBS[0].prompt_tokens))
    vocabulary, rng = shape_of(model).vocab_size, Random(plan.seed)
    ceilings = WorkerSpec(CEILINGS, CEILINGS_ENGINE, options=plan.specs[0].options)
    specs = [ceilings, *(_with_file(spec, folder, plan.cache) for spec in plan.specs)]
    with Workers(specs, folder, plan.cache / "logs") as workers:
        engines = {name: each for name, each in workers.by_name.items() if name != CEILINGS}
        for name, worker in engines.items():
            result.workers[name] = worker.ready
            plan.say(f"{model}: {name} loaded in {worker.ready['load_s']:.0f} s")
            for job in JOBS:
                worker.run(job.request(rng, vocabulary, min(job.output_tokens, WARMUP_TOKENS)))
        for round_ in range(plan.rounds):
            _round(plan, workers, result, round_, lambda job: job.request(rng, vocabulary))
        result.idle_cpu_s = {name: worker.idle_cpu_s for name, worker in engines.items()}
    return result


def _with_file(spec: WorkerSpec, folder: Path, cache: Path) -> WorkerSpec:
    """The worker with the file of the model, if it wants one of a kind."""
    kind = spec.options.get("gguf")
    if kind is None:
        return spec
    file = str(in_new_process(ensure_gguf, folder, kind, cache))
    return replace(spec, options=spec.options | {"file": file})


def _round(
    plan: Plan,
    workers: Workers,
    result: Comparison,
    round_: int,
    request: Callable[[Job], dict[str, Any]],
) -> None:
    """All jobs once; who begins changes from round to round.

    The ceilings are taken before every job, and the best of the round is what the machine can do.
    """
    names = [name for name in workers.by_name if name != CEILINGS]
    turn = round_ % len(names)
    ceilings: list[Figures] = []
    for job in JOBS:
        with plan.alone():
            ceilings.append(workers.by_name[CEILINGS].run({"repeats": 5}))
        for name in names[turn:] + names[:turn]:
            with plan.alone():
                answer = workers.by_name[name].run(request(job))
            figures = job.figures(answer["token_s"])
            result.samples.setdefault(job.name, {}).setdefault(name, []).append(figures)
            text = ", ".join(f"{figure} {value:.1f}" for figure, value in figures.items())
            plan.say(f"round {round_ + 1}/{plan.rounds}  {job.name:13} {name:13} {text} tokens/s")
    result.ceilings.append({name: max(each[name] for each in ceilings) for name in ceilings[0]})
