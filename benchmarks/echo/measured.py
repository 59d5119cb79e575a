"""The same on this machine's CPU: the real engine and a real model, all policies in turn.

    python -m benchmarks echo.measured --minutes 5 --rounds 2

The model is loaded once. Each run has a new scheduler and an empty cache. Documents are short and
KV memory holds only a few of them, so eviction matters as at the paper's scale.
"""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks.echo import online
from benchmarks.echo.policies import Variant, chosen
from benchmarks.echo.pools import SOURCES, Encode, Limits
from benchmarks.echo.report import GOAL_DATASET, Setup
from benchmarks.echo.results import brief, described, write
from benchmarks.echo.runs import Run, Work, alone, execute, figures
from benchmarks.echo.simulated import ALONE, Plan, find_rate
from benchmarks.reporting.machine import describe, slug
from tandem.bench.machine import busy_cpu_s
from tandem.build import build_executor, join_loop, resolve_model
from tandem.config import Settings, resolve
from tandem.core.clock import SleepingClock
from tandem.core.ports import Executor
from tandem.core.request import Request
from tandem.core.slo import Slo
from tandem.engine.loop import EngineLoop
from tandem.estimators.latency import LatencyModel
from tandem.estimators.work import PassWork
from tandem.model.load import computes_in
from tandem.profiler import measure
from tandem.services.answering.tokenizer import Tokenizer

GAIN = 2.0
BLOCK_TOKENS = 16
# An online request decodes after about so many tokens.
_USUAL_CONTEXT = 128
# The rate that the simulation finds is lowered until the engine attains what is wanted, too.
_LOWER, _TRIES = 0.85, 6
_WARM_UP_S = 5.0


@dataclass(frozen=True)
class Study:
    """A loaded engine and what all of its runs have in common."""

    plan: Plan
    executor: Executor
    settings: Settings
    variants: dict[str, Variant]
    datasets: list[str]
    rounds: int
    say: Callable[[str], None] = typer.echo

    def loop(self, variant: Variant, clock: SleepingClock) -> EngineLoop:
        """A new engine over the loaded model; all know the measured profile."""
        scheduling = self.plan.settings_of(variant).scheduling
        gc.collect()
        gc.freeze()  # what exists now stays: every run has as little to look through
        settings = replace(self.settings, scheduling=scheduling)
        return join_loop(settings, self.executor, clock=clock, rates=self.plan.profile.rates)

    def checked_rate(self) -> tuple[float, dict[str, float]]:
        """A rate at which online requests alone attain what is wanted: first as simulated with the
        measured profile, then on the engine. With what was tried."""
        rate, simulated = find_rate(self.plan, first=1.0)
        tried = {f"{each:.2f} simulated": share for each, share in simulated.items()}
        for _ in range(_TRIES):
            seconds = self.plan.seconds + self.plan.slo.ttft_s
            work = Work("", self.plan.load_at(rate), [], seconds, self.plan.slo)
            clock = SleepingClock()
            found = alone(work, execute(self.loop(ALONE, clock), clock, work))
            tried[f"{rate:.2f} measured"] = found
            self.say(f"{rate:.2f} requests/s: {found:.1%} attain alone")
            if found >= self.plan.wanted:
                break
            rate *= _LOWER
        return rate, tried

    def runs(self, load: online.Load, pools: dict[str, list[Request]]) -> Iterator[Run]:
        """All runs, policies one after the other, beginning with another one in each round."""
        labels = list(self.variants)
        for round_ in range(self.rounds):
            for dataset in self.datasets:
                turn = round_ % len(labels)
                work = Work(dataset, load, pools[dataset], self.plan.seconds, self.plan.slo)
                for label in labels[turn:] + labels[:turn]:
                    yield self._run(label, work, round_)

    def _run(self, label: str, work: Work, round_: int) -> Run:
        clock = SleepingClock()
        loop = self.loop(self.variants[label], clock)
        own_s, busy_s, began_s = time.process_time(), busy_cpu_s(), clock.now()
        report = execute(loop, clock, work)
        others_s = busy_cpu_s() - busy_s - (time.process_time() - own_s)
        others = others_s / (os.cpu_count() or 1) / (clock.now() - began_s)
        return replace(figures(label, work, loop, report, round_), others=max(0.0, others))

    def warm_up(self, load: online.Load, offline: list[Request]) -> None:
        """The first passes of a model take longer than others."""
        clock = SleepingClock()
        work = Work("", load[:4], offline[:4], _WARM_UP_S, self.plan.slo)
        execute(self.loop(ALONE, clock), clock, work)


def kv_bytes(folder: Path, itemsize: int) -> int:
    """Of a block, from the model's configuration."""
    found = json.loads((folder / "config.json").read_text())
    heads = found["num_attention_heads"]
    width = found.get("head_dim") or found["hidden_size"] // heads
    numbers = 2 * found["num_hidden_layers"] * found.get("num_key_value_heads", heads) * width
    return int(numbers * BLOCK_TOKENS * itemsize)


def loaded(model: str, kv_tokens: int, max_sequences: int) -> tuple[Executor, Settings]:
    """The model on the CPU, with KV memory for so many tokens."""
    half = computes_in(torch.bfloat16)
    dtype = "bfloat16" if half else "float32"
    chosen = {"model": {"model": model, "device": "cpu", "dtype": dtype}}
    settings = resolve_model(resolve(chosen, environ={}))
    each = kv_bytes(Path(settings.model.model), 2 if half else 4)
    memory = -(-kv_tokens // BLOCK_TOKENS) * each
    cache = replace(settings.cache, block_size=BLOCK_TOKENS, memory_bytes=memory)
    scheduling = replace(settings.scheduling, max_sequences=max_sequences)
    settings = replace(settings, cache=cache, scheduling=scheduling)
    return build_executor(settings), settings


def own_encoder(settings: Settings) -> Encode:
    """The model's own tokenizer."""
    tokenizer = Tokenizer.load(settings.model.model)
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False))


def main(
    model: Annotated[str, typer.Option(help="As of tandem serve.")] = "smollm2",
    policy: Annotated[
        list[str] | None,
        typer.Option(help="BS, BS+E, BS+E+S, Echo, or NAME:OPTION=VALUE,...; repeatable."),
    ] = None,
    dataset: Annotated[
        list[str] | None, typer.Option(help=f"{', '.join(SOURCES)}; repeatable.")
    ] = None,
    minutes: Annotated[float, typer.Option(help="Of each run.")] = 5.0,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each policy and data set.")] = 2,
    rate: Annotated[float, typer.Option(help="Online requests/s; 0: search it.")] = 0.0,
    attainment: Annotated[float, typer.Option(help="That online requests alone have.")] = 0.9,
    ttft_slo: Annotated[float, typer.Option(help="Seconds.")] = 1.0,
    tpot_slo: Annotated[float, typer.Option(help="Seconds, or 5 decodes if they are more.")] = 0.05,
    documents: Annotated[int, typer.Option(help="Of a pool.")] = 48,
    document_tokens: Annotated[int, typer.Option(help="Longer ones are cut.")] = 1280,
    answer_tokens: Annotated[int, typer.Option(help="Longer answers are cut.")] = 32,
    kv_documents: Annotated[int, typer.Option(help="For which KV memory has room.")] = 8,
    length_scale: Annotated[float, typer.Option(help="Of online requests and chats.")] = 0.25,
    max_sequences: Annotated[int, typer.Option(help="As of tandem serve.")] = 64,
    max_batch_tokens: Annotated[int, typer.Option(help="As of tandem serve.")] = 256,
    profile_s: Annotated[float, typer.Option(help="Of the profile that all have.")] = 60.0,
    pictures: Annotated[bool, typer.Option("--figures/--no-figures")] = True,
    data: Annotated[Path, typer.Option(help="The shared data's folder.")] = Path("../shared/data"),
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("benchmarks/results"),
) -> None:
    """Measure every policy; write echo-DEVICE.json, .md and figures."""
    if not (data / online.TRACE).is_file():
        raise SystemExit(f"skipped: no shared data at {data}")
    machine = describe("cpu", len(os.sched_getaffinity(0)))
    kv_tokens = kv_documents * (document_tokens + 4 * BLOCK_TOKENS)
    executor, settings = loaded(model, kv_tokens, max_sequences)
    profile = measure(executor, settings, profile_s, lambda done: None)
    decode = PassWork()
    decode.decode(_USUAL_CONTEXT)
    decode_s = LatencyModel(profile.rates).forward_s(decode)
    objectives = Slo(ttft_slo, max(tpot_slo, 5.0 * decode_s))
    limits = Limits(document_tokens, answer_tokens, length_scale, documents)
    scheduling = (max_sequences, max_batch_tokens)
    seconds = 60.0 * minutes
    plan = Plan(data, profile, seconds, objectives, limits, *scheduling, attainment, seconds)
    datasets, variants = dataset or [GOAL_DATASET], chosen(policy)
    study = Study(plan, executor, settings, variants, datasets, rounds)
    encode = own_encoder(settings)
    pools = {name: plan.pool(name, encode) for name in datasets}
    study.warm_up(plan.load_at(rate or 1.0), pools[datasets[0]])
    found, tried = (rate, {}) if rate else study.checked_rate()
    setup = Setup(
        stem=f"echo-{slug(machine)}",
        title="Echo's figures, measured on the engine",
        where=f"Measured: {model} in {settings.model.dtype}; "
        + ", ".join(f"{name}: {said}" for name, said in machine.items())
        + f". A decode alone takes {1e3 * decode_s:.1f} ms by the profile.",
        machine=machine,
        rate=found,
        tried=tried,
        objectives=(objectives.ttft_s, objectives.tpot_s),
        wanted=attainment,
        blocks=executor.info.num_blocks,
        block_size=executor.info.block_size,
        seconds=seconds,
        rounds=rounds,
        gain=GAIN,
        settings={
            "limits": asdict(limits),
            "policies": {each: asdict(variant) for each, variant in variants.items()},
            "max_sequences": max_sequences,
            "max_batch_tokens": max_batch_tokens,
            "profile": profile.source,
        },
        pools={name: described(name, requests) for name, requests in pools.items()},
    )
    made: list[Run] = []
    for run in study.runs(plan.load_at(found), pools):
        made.append(run)
        typer.echo(brief(run))
        write(setup, made, out, draw=False)  # what there is, should the study be ended
    typer.echo(write(setup, made, out, draw=pictures))


if __name__ == "__main__":
    typer.run(main)
