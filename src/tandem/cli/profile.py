"""`tandem profile`: measure a model on this machine, so that the scheduler starts knowing it.

Loads the model as `serve` does, runs micro-benchmarks and writes a profile file. With a file of
answers it also searches constants of RT-LM for them, by simulation. Serves nobody.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tandem.bench.answers import Answer, read_answers
from tandem.build import build_executor, resolve_model
from tandem.cli.checks import check_device
from tandem.cli.profile_terms import FORWARD_WORDS, OTHER_WORDS, SLICE_WORDS
from tandem.cli.tune import fitting, table_of, tune
from tandem.config import Settings
from tandem.core.errors import InvalidRequest
from tandem.engine.placement import quantile_of
from tandem.estimators.batching import Batching
from tandem.estimators.profile import Profile, read_profile, write_profile
from tandem.estimators.terms import FORWARD_TERMS, SLICE_TERMS
from tandem.profiler import measure

# A term below this is shown by none of three decimals of a microsecond.
_LEAST_S = 0.5e-9
# Samples of a kind that were held out. Of fewer, "95% below" is the worst one.
_FEW = 20
# Mean error of a pass as the prediction of the same pass from which on a profile misleads.
_UNREST = 0.2
_OVERFLOW_QUANTILE = 0.9  # the paper's k
_COLUMNS = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())


def profile_model(
    settings: Settings, seconds: float, out: Path | None, console: Console, lengths: Path | None
) -> Path:
    """Load, measure, fit, write, show; with `lengths`, tune for its answers. A configured profile
    is then tuned, and nothing is measured. Raises `InvalidRequest` as loading does."""
    answers = read_answers(lengths) if lengths is not None else None
    before = settings.scheduling.profile
    if answers is not None and before:
        profile, path = read_profile(Path(before)), out or Path(before)
    else:
        profile, path = _measured(settings, seconds, out, console)
        write_profile(profile, path)
    if answers is not None:
        profile = replace(profile, batching=_tuned(profile, settings, answers, console))
        write_profile(profile, path)
        tau = math.ceil(quantile_of(sorted(each.expected for each in answers), _OVERFLOW_QUANTILE))
        console.print(f"a tenth is predicted to be longer than: --overflow-tokens {tau}")
    if profile.batching is not None:
        console.print(f"for batches (rt_lm): {_words(profile.batching)}", soft_wrap=True)
    use = f"use it: tandem serve --profile {path}"
    if _restless(profile) or not profile.rates.measured:
        use = "measure again before you use it"
    console.print(f"written to {path}; {use}", soft_wrap=True)
    return path


def _tuned(
    profile: Profile, settings: Settings, answers: Sequence[Answer], console: Console
) -> Batching:
    found = fitting(answers, profile.info)
    if len(found) < len(answers):
        console.print(f"{len(answers) - len(found)} of {len(answers)} answers do not fit: left out")
    if not found:
        raise InvalidRequest("none of the answers fits into the model's context and the KV cache")
    with Progress(*_COLUMNS, console=console) as progress:
        task = progress.add_task("simulating", total=1.0)
        best, tried = tune(
            profile, settings, found, lambda done: progress.update(task, completed=done)
        )
    console.print(table_of(tried))
    return best


def _words(batching: Batching) -> str:
    searched = [
        f"{name} {value:g}"
        for name, value in (("alpha", batching.alpha), ("gather", batching.gather))
        if value is not None
    ]
    fitted = f"C {batching.batch}, phi {batching.phi:.4f} s, eta {batching.eta:.4f} s"
    return ", ".join([fitted, *searched])


def _measured(
    settings: Settings, seconds: float, out: Path | None, console: Console
) -> tuple[Profile, Path]:
    """What is measured, shown, and where to write it."""
    check_device(settings)
    settings = resolve_model(settings)
    with Progress(*_COLUMNS, console=console) as progress:
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
    console.print(_terms(profile))
    console.print(_errors(profile))
    if (again := profile.repeat) is not None:
        console.print(
            f"the machine's own unrest: a pass predicts the same pass right after it with a mean"
            f" error of {again.mape:.1%}, 95% below {again.p95:.1%} ({again.samples} pairs)"
        )
    for doubt in doubts(profile):
        console.print(f"[yellow]{doubt}[/]")
    return profile, path


def doubts(profile: Profile) -> Iterator[str]:
    """What of a profile says little, because there was no time to measure it."""
    rates = profile.rates
    kinds = (("passes", rates.measured), ("slices and updates", rates.slices_measured))
    if guessed := [kind for kind, measured in kinds if not measured]:
        yield f"no time was left for {' and '.join(guessed)}: what these take is a guess"
    if _restless(profile) and (again := profile.repeat) is not None:
        yield (
            f"the machine is not quiet: even the same pass takes {again.mape:.0%} longer or shorter"
            " from one time to the next; measure while nothing else computes (tandem doctor)"
        )
    few = [f"{kind} {each.samples}" for kind, each in profile.errors.items() if each.samples < _FEW]
    if few:
        yield f"errors of few samples say little ({', '.join(few)}): measure for longer, --seconds"


def _restless(profile: Profile) -> bool:
    return profile.repeat is not None and profile.repeat.mape > _UNREST


def _terms(profile: Profile) -> Table:
    """A row a term; those that take no time here are left out."""
    rates, caches = profile.rates, profile.caches
    table = Table("term", "microseconds", "of what")
    forward = zip(FORWARD_TERMS, rates.forward, strict=True)
    backward = zip(SLICE_TERMS, rates.slices, strict=True)
    rows = [(name, value, FORWARD_WORDS[name]) for name, value in forward]
    rows += [(f"backward: {name}", value, SLICE_WORDS[name]) for name, value in backward]
    for name, value, words in rows:
        if value >= _LEAST_S:
            table.add_row(name, f"{1e6 * value:.3f}", words)
    others = {
        "update": f"{1e6 * rates.update_s:.0f}",
        "longer after a sleep": f"{1e6 * caches.resume_s:.0f}",
        "less after passes: decodes": f"{1e6 * caches.decode_s:.0f}",
        "less after passes: prompts": f"{1e6 * caches.prompt_s:.0f}",
        "share of that missing after each": f"{caches.cold_share:.0%}",
        "beside the work of an iteration": f"{1e6 * profile.host_s:.0f}",
        "rho (no unit)": f"{rates.rho:.1f}",
    }
    for name, text in others.items():
        table.add_row(name, text, OTHER_WORDS[name])
    return table


def _errors(profile: Profile) -> Table:
    table = Table("held out", "samples", "bias", "mean error", "95% below")
    for kind, error in profile.errors.items():
        cells = (f"{error.bias:+.1%}", f"{error.mape:.1%}", f"{error.p95:.1%}")
        table.add_row(kind, str(error.samples), *cells)
    return table
