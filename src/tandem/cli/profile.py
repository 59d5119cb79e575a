"""`tandem profile`: measure a model on this machine, so that the scheduler starts knowing it.

Loads the model as `serve` does, runs micro-benchmarks and writes a profile file. Serves nobody.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tandem import __version__
from tandem.build import build_executor, join_loop, resolve_model
from tandem.config import Settings
from tandem.core.ports import Executor
from tandem.core.request import Request
from tandem.core.sampling import SamplingParams
from tandem.engine.loop import EngineLoop
from tandem.estimators.calibrate import fit
from tandem.estimators.latency import Rates
from tandem.estimators.profile import Profile, write_profile
from tandem.estimators.terms import FORWARD_TERMS, SLICE_TERMS

# Samples of a kind that were held out. Of fewer, "95% below" is the worst one.
_FEW = 20
# What an iteration takes beside its work is measured over so many answers and iterations, and over
# fewer of a model for which these take longer than so many seconds.
_ANSWERS = 4
_ITERATIONS = (8, 128)
_ITERATIONS_S = 2.0


def profile_model(settings: Settings, seconds: float, out: Path | None, console: Console) -> Path:
    """Load, measure, fit, write, show. Raises `InvalidRequest` as loading does."""
    settings = resolve_model(settings)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("loading", total=1.0)
        executor = build_executor(
            settings,
            lambda stage, done: progress.update(task, description=stage, completed=done or 0.0),
        )
        task = progress.add_task("measuring", total=1.0)
        profile = measure(
            executor, settings, seconds, lambda done: progress.update(task, completed=done)
        )
    path = out or Path(f"{settings.model.served_name}-{executor.info.device}.profile.json")
    write_profile(profile, path)
    console.print(_terms(profile))
    console.print(_errors(profile))
    if (again := profile.repeat) is not None:
        console.print(
            f"the machine's own unrest: a pass predicts the same pass right after it with a mean"
            f" error of {again.mape:.1%}, 95% below {again.p95:.1%} ({again.samples} pairs)"
        )
    for doubt in doubts(profile):
        console.print(f"[yellow]{doubt}[/]")
    console.print(f"written to {path}; use it: tandem serve --profile {path}")
    return path


def measure(
    executor: Executor, settings: Settings, seconds: float, on_progress: Callable[[float], None]
) -> Profile:
    """The profile of a loaded model."""
    from tandem.executor.ceilings import measure_ceilings
    from tandem.executor.profile import ProbeLimits, probe

    info, scheduling = executor.info, settings.scheduling
    limits = ProbeLimits(
        scheduling.max_batch_tokens, scheduling.max_sequences, settings.learning.rank
    )
    ceilings = measure_ceilings(info.device, info.dtype)
    samples = probe(executor, limits, seconds, on_progress)
    found = fit(samples, Rates.guess_for(info))
    return Profile(
        info=info,
        rates=found.rates,
        ceilings=ceilings,
        source=f"measured in {seconds:.0f} s: {len(samples.passes)} passes, "
        f"{len(samples.slices)} slices, {len(samples.updates)} updates",
        errors=found.errors,
        noise=found.noise,
        caches=found.caches,
        repeat=found.repeat,
        host_s=measure_host_s(join_loop(settings, executor, rates=found.rates)),
        kept_alone=found.kept_alone,
        kept_beside=found.kept_beside,
        versions={
            "tandem": __version__,
            "torch": metadata.version("torch"),
            "transformers": metadata.version("transformers"),
            "measured": time.strftime("%Y-%m-%d"),
        },
        threads=info.threads,
    )


def measure_host_s(loop: EngineLoop) -> float:
    """Median seconds of an iteration of a few decodes outside of the executor's own account. The
    loop has to be idle; its `on_plan` is replaced."""
    executed: list[float] = []
    loop.on_plan = lambda plan, result: executed.append(result.elapsed_s)
    least, most = _ITERATIONS
    cache = loop.scheduler.cache
    room = min(loop.info.max_model_len, cache.num_blocks * cache.block_size)
    tokens = max(1, min(most, room - 1))
    names = [f"host-{number}" for number in range(_ANSWERS)]
    for name in names:
        loop.add(Request(name, (0,), SamplingParams(max_tokens=tokens, ignore_eos=True)))
    found: list[float] = []
    ends_s = time.perf_counter() + _ITERATIONS_S
    while loop.has_work and (len(found) <= least or time.perf_counter() < ends_s):
        began_s = time.perf_counter()
        loop.step()
        found.append(time.perf_counter() - began_s - sum(executed))
        executed.clear()
    for name in names:
        loop.abort(name)
    return median(found[1:] or found)


def doubts(profile: Profile) -> Iterator[str]:
    """What of a profile says little, because there was no time to measure it."""
    rates = profile.rates
    kinds = (("passes", rates.measured), ("slices and updates", rates.slices_measured))
    if guessed := [kind for kind, measured in kinds if not measured]:
        yield f"no time was left for {' and '.join(guessed)}: what these take is a guess"
    few = [f"{kind} {each.samples}" for kind, each in profile.errors.items() if each.samples < _FEW]
    if few:
        yield f"errors of few samples say little ({', '.join(few)}): measure for longer, --seconds"


def _terms(profile: Profile) -> Table:
    table = Table("term", "microseconds")
    rates = profile.rates
    for name, value in zip(FORWARD_TERMS, rates.forward, strict=True):
        table.add_row(name, f"{1e6 * value:.3f}")
    for name, value in zip(SLICE_TERMS, rates.slices, strict=True):
        table.add_row(f"backward: {name}", f"{1e6 * value:.3f}")
    table.add_row("update", f"{1e6 * rates.update_s:.0f}")
    caches = profile.caches
    table.add_row("longer after a sleep", f"{1e6 * caches.resume_s:.0f}")
    table.add_row("less after passes: decodes", f"{1e6 * caches.decode_s:.0f}")
    table.add_row("less after passes: prompts", f"{1e6 * caches.prompt_s:.0f}")
    table.add_row("share of that missing after each", f"{caches.cold_share:.0%}")
    table.add_row("beside the work of an iteration", f"{1e6 * profile.host_s:.0f}")
    table.add_row("rho (no unit)", f"{rates.rho:.1f}")
    return table


def _errors(profile: Profile) -> Table:
    table = Table("held out", "samples", "bias", "mean error", "95% below")
    for kind, error in profile.errors.items():
        cells = (f"{error.bias:+.1%}", f"{error.mape:.1%}", f"{error.p95:.1%}")
        table.add_row(kind, str(error.samples), *cells)
    return table
