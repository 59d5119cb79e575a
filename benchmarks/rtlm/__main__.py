"""RT-LM, its baselines and `unified` on real answer lengths, in simulation over a profile.

    tandem profile smollm2 --out smollm2.json; python -m benchmarks rtlm --profile smollm2.json

Each policy gets the same tasks at the same times. The page has the bars, and response times and
throughput by the variance of the predictions (tables III and IV), with static and continuous
batches; the ablation; alpha and b; benign tasks under attack; and what scheduling takes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from benchmarks.lengths.rows import Row, kept
from benchmarks.rtlm import figures, load, study
from benchmarks.rtlm.bars import Runs, bars
from benchmarks.rtlm.report import page
from benchmarks.rtlm.runs import Device, Run
from tandem.bench.answers import BETAS
from tandem.bench.workload import as_text
from tandem.core.lengths import Asked
from tandem.estimators.batching import fit_batching
from tandem.estimators.datasheet import load_profile
from tandem.estimators.learned_length import features_of
from tandem.estimators.length_network import fit
from tandem.services.lengths.lexicon import Lexicon
from tandem.services.lengths.scores import Scorer

RESULTS = Path("benchmarks/results")
_LOOKS = 500  # prompts of which scores and forecasts are timed


def lexical_s(rows: Sequence[Row]) -> float:
    """Thread seconds of a prompt's scores and forecast."""
    scorer = Scorer(Lexicon.load())
    asked = [Asked("", "", row.max_tokens, row.input_tokens, row.scores) for row in rows]
    network = fit(
        np.array([features_of(each) for each in asked]),
        np.array([row.output_tokens for row in rows], dtype=float),
    )
    texts = [
        as_text(tuple(range(place, place + row.input_tokens))) for place, row in enumerate(rows)
    ]
    began_s = time.thread_time()
    for text, each in zip(texts[:_LOOKS], asked, strict=False):
        scorer.score(text)
        network.predict(np.array([features_of(each)]))
    return (time.thread_time() - began_s) / min(_LOOKS, len(rows))


def main(
    profile: Annotated[str, typer.Option(help="A file of `tandem profile`, or DEVICE:MODEL.")],
    rows: Annotated[Path, typer.Option(help="Lengths of answers, as `lengths` collects them.")] = (
        RESULTS / "lengths-smollm2.jsonl.gz"
    ),
    forecast: Annotated[str, typer.Option(help="Step of the ladder of `lengths`.")] = "lexical",
    busy: Annotated[
        list[float] | None, typer.Option(help="Mean load, times what full batches serve.")
    ] = None,
    attacked: Annotated[
        float, typer.Option(help="The same, of the study of malicious tasks.")
    ] = 0.3,
    batch: Annotated[int | None, typer.Option(min=1, help="C; default: at full use.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Of arrivals and order.")] = 2,
    max_batch_tokens: Annotated[int, typer.Option(help="As of tandem serve.")] = 256,
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = RESULTS,
) -> None:
    """Simulate all policies; write rtlm-MODEL.json, .md and figures."""
    found, answers = load_profile(profile), kept(rows)
    tasks = load.tasks_of(answers, forecast)
    lengths = [(task.input_tokens, task.output_tokens) for task in tasks]
    batching = fit_batching(found.rates, found.host_s, lengths, batch)
    device = Device(replace(found, batching=batching), batching, max_batch_tokens)
    loads = busy or [0.5, 1.5]
    made = list[Run]()

    def take(run: Run) -> None:
        made.append(run)
        case = run.case
        typer.echo(
            f"{case.study:10} {case.tasks:7} {case.busy:<4g} {case.seed} {case.policy:16}"
            f" {'static' if case.static else '':7} mean {run.mean_s:7.2f} max {run.most_s:7.2f}"
            f" {run.per_minute:6.1f}/min"
        )

    for seed in range(seeds):
        for each in loads:
            for run in study.tables(device, tasks, each, seed):
                take(run)
        for part, at in (
            (study.ablation, loads[0]),
            (study.parameters, loads[0]),
            (study.malicious, attacked),
        ):
            for run in part(device, tasks, at, seed):
                take(run)
    for run in study.overhead(device, tasks, loads[0], 0):
        take(run)
    head = (
        f"{len(tasks)} answers of {rows.name}; forecasts by `{forecast}` (cross-validation)."
        f" Simulated: {found.info.model} on {found.info.device}, {found.source}. C ="
        f" {batching.batch}, phi = {batching.phi:.4f} s, eta = {batching.eta:.4f} s. Arrivals are"
        f" Poisson at {BETAS[0]} to {BETAS[-1]} a minute, each for a minute, shuffled;"
        " minutes are so long that the mean load is the given one, relative to what full batches"
        f" of these tasks serve. Seeds of arrivals and order: {seeds}."
    )
    stem = f"rtlm-{Path(found.info.model).stem.lower()}" + (f"-{batch}" if batch else "")
    out.mkdir(parents=True, exist_ok=True)
    runs = Runs(made)
    judged = list(bars(runs, lexical_s(answers)))
    content = {
        "schema": "tandem-rtlm-2",
        "head": head,
        "batching": asdict(batching),
        "bars": [asdict(bar) for bar in judged],
        "runs": [run.summary() for run in made],
    }
    (out / f"{stem}.json").write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
    drawn = figures.draw_all(runs, out, stem)
    (out / f"{stem}.md").write_text(page(head, judged, runs, drawn))


if __name__ == "__main__":
    typer.run(main)
