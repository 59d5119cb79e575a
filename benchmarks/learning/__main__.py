"""The learning benchmark in one command: train the dialogue model, make all runs, write results.

    python -m benchmarks learning

Both the model and finished runs are kept in the cache, so that it goes on where it was interrupted.
See docs/benchmarks.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.learning import dialogue_model
from benchmarks.learning.compare import run_experiment, write_learning
from benchmarks.learning.experiment import ExperimentOptions, Sources
from benchmarks.learning.report import as_markdown
from benchmarks.learning.stream import LoadOptions
from benchmarks.reporting.machine import describe, slug

RESULTS = Path(__file__).parents[1] / "results"
HEADING = """# Learning from a stream of preferences

{machine}

{rate:g} requests/s, {pairs} pairs a run, seeds {seeds}.

"""


def main(
    data: Annotated[Path, typer.Option(help="The shared data's folder.")] = Path("../shared/data"),
    cache: Annotated[Path, typer.Option(help="Model and finished runs.")] = Path(".bench-cache"),
    seeds: Annotated[int, typer.Option(help="Runs of each policy at each rate.")] = 3,
    retrain_rate: Annotated[
        list[float] | None, typer.Option(help="Preferences per request; repeatable; default: 0.5.")
    ] = None,
    rate: Annotated[float, typer.Option(help="Requests/s, Poisson.")] = 9.0,
    pairs: Annotated[int, typer.Option(help="Preferences in a run at the highest rate.")] = 720,
) -> None:
    """Train, run, write."""
    model = cache / "dialogue-model"
    dialogue_model.main(data=data, out=model)
    # Seed 0 was looked at while the load was chosen.
    fresh = tuple(range(1, seeds + 1))
    options = ExperimentOptions(
        LoadOptions(rate=rate, pairs=pairs),
        retrain_rates=tuple(retrain_rate or (0.5,)),
        seeds=fresh,
    )
    found = run_experiment(Sources(data, model, cache), options)
    machine = describe("cpu", options.threads)
    heading = HEADING.format(
        machine=", ".join(f"{name}: {value}" for name, value in machine.items()),
        rate=rate,
        pairs=pairs,
        seeds=", ".join(map(str, fresh)),
    )
    stem = f"learning-{slug(machine)}"
    write_learning(RESULTS, options, found, figures=True, stem=stem, heading=heading)
    print(as_markdown(found))


if __name__ == "__main__":
    typer.run(main)
