"""The learning benchmark with every option: policies, loads, lessons, objectives."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from benchmarks.learning.experiment import Experiment, ExperimentOptions, Sources
from benchmarks.learning.figures import draw
from benchmarks.learning.lessons import PriorityOptions
from benchmarks.learning.report import LearningReport, as_markdown
from benchmarks.learning.report import as_json as learning_json
from benchmarks.learning.report import report as learning_report
from benchmarks.learning.runs import POLICIES, LessonPlan
from benchmarks.learning.stream import LoadOptions
from benchmarks.learning.teaching import TeachingOptions
from tandem.build import build_engine_client
from tandem.config import ModelConfig, SchedulingConfig, Settings
from tandem.core.errors import InvalidRequest
from tandem.core.ports import EngineClient
from tandem.core.slo import Slo

_LOAD, _TEACHING = LoadOptions(), TeachingOptions()
_REPEATS, _EXPERIMENT = PriorityOptions(), ExperimentOptions()
PAIRS = "Preferences in a run at the highest rate; lower rates have fewer in the same time."
RATES = "Preferences per request (repeatable), as in MACE's figure 9."
REPEATS = "`unified` trains on a pair again until its loss is under --threshold or so many times."
LESSONS = "What is trained on: own (MACE's rule for unified, each pair once for the others), or all\
 the same: once, repeat."


def main(
    data: Annotated[Path, typer.Option(help="The shared data's folder.")] = Path("../shared/data"),
    model: Annotated[
        Path, typer.Option(help="Model directory; see learning.dialogue_model.")
    ] = Path(".bench-cache/dialogue-model"),
    cache: Annotated[Path, typer.Option(help="Finished runs are kept here.")] = Path(
        ".bench-cache"
    ),
    policy: Annotated[list[str] | None, typer.Option(help="Repeatable; default: all four.")] = None,
    seeds: Annotated[int, typer.Option(help="Runs of each policy: seeds 0, 1, ...")] = 3,
    retrain_rate: Annotated[list[float] | None, typer.Option(help=RATES)] = None,
    pairs: Annotated[int, typer.Option(help=PAIRS)] = _LOAD.pairs,
    rate: Annotated[float, typer.Option(help="Requests/s, Poisson.")] = _LOAD.rate,
    output_tokens: Annotated[int, typer.Option(help="Of every request.")] = _LOAD.output_tokens,
    source: Annotated[
        list[str] | None, typer.Option(help="Set of pairs (repeatable); default: all.")
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(help="Longer pairs are left out.")
    ] = _EXPERIMENT.max_tokens,
    learning_rate: Annotated[float, typer.Option(help="Of AdamW.")] = _TEACHING.learning_rate,
    beta: Annotated[float, typer.Option(help="Of DPO.")] = _TEACHING.beta,
    threshold: Annotated[
        float, typer.Option(help="DPO loss of a learnt pair.")
    ] = _REPEATS.threshold,
    most_uses: Annotated[int, typer.Option(help=REPEATS)] = _REPEATS.most_uses,
    lessons: Annotated[LessonPlan, typer.Option(help=LESSONS)] = _EXPERIMENT.lessons,
    ekya_interval: Annotated[
        float, typer.Option(help="Seconds between Ekya's windows.")
    ] = _EXPERIMENT.ekya_interval_s,
    ttft_slo: Annotated[
        float, typer.Option(help="Objective of the requests, seconds.")
    ] = _EXPERIMENT.slo.ttft_s,
    tpot_slo: Annotated[
        float, typer.Option(help="Objective of the requests, seconds.")
    ] = _EXPERIMENT.slo.tpot_s,
    threads: Annotated[int, typer.Option(help="Of the engine.")] = _EXPERIMENT.threads,
    out: Annotated[Path | None, typer.Option(help="Folder for JSON, table and figures.")] = None,
    figures: Annotated[bool, typer.Option(help="Draw figures too (needs matplotlib).")] = True,
) -> None:
    """Feedback streamed into a served model under each policy: win rate, CLPD, latency.

    Finished runs are kept and not made again.
    """
    rates = tuple(retrain_rate or _EXPERIMENT.retrain_rates)
    batch = _TEACHING.batch
    try:
        options = ExperimentOptions(
            load=LoadOptions(rate, max(rates), pairs, output_tokens),
            teaching=TeachingOptions(learning_rate=learning_rate, beta=beta),
            repeats=PriorityOptions(batch, threshold, most_uses),
            lessons=lessons,
            slo=Slo(ttft_slo, tpot_slo),
            policies=tuple(policy or POLICIES),
            retrain_rates=rates,
            seeds=tuple(range(seeds)),
            sources=tuple(source or ()),
            max_tokens=max_tokens,
            ekya_interval_s=ekya_interval,
            threads=threads,
        )
        found = run_experiment(Sources(data, model, cache), options)
        Console().print(as_markdown(found), markup=False, soft_wrap=True)
        if out is not None:
            write_learning(out, options, found, figures)
    except InvalidRequest as error:
        raise typer.BadParameter(str(error)) from error


def run_experiment(sources: Sources, options: ExperimentOptions) -> LearningReport:
    """Make the runs that are not there yet, each with an engine process of its own."""
    if not sources.data.is_dir():
        raise InvalidRequest(f"skipped: no shared data at {sources.data}", param="data")

    def make_client(policy: str) -> EngineClient:
        own = {"interval_s": str(options.ekya_interval_s)} if policy == "ekya" else {}
        scheduling = SchedulingConfig(policy=policy, policy_options=own)
        model = ModelConfig(str(sources.model), threads=options.threads)
        return build_engine_client(Settings(model, scheduling=scheduling))

    experiment = Experiment(sources, options, make_client)
    records = experiment.finished()
    console = Console(stderr=True)
    console.print(f"runs are kept in {experiment.folder}")
    for key in experiment.keys:
        if key not in records:
            console.print(f"{key.policy}, retrain rate {key.retrain_rate:g}, seed {key.seed}")
            records[key] = asyncio.run(experiment.make(key))
    return learning_report(records)


def write_learning(
    folder: Path,
    options: ExperimentOptions,
    found: LearningReport,
    figures: bool,
    *,
    stem: str = "learning",
    heading: str = "",
) -> None:
    """`STEM.json`, `STEM.md` and, if asked, the figures, into `folder`; the page begins with
    `heading`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{stem}.json").write_bytes(learning_json(msgspec.to_builtins(options), found))
    (folder / f"{stem}.md").write_text(heading + as_markdown(found))
    if figures:
        draw(found, folder, stem)


if __name__ == "__main__":
    typer.run(main)
