"""`python -m benchmarks lengths`: the ladder; `lengths collect` and `lengths hidden`: its data."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from benchmarks.lengths.collect import Ask, answers, collect, resume
from benchmarks.lengths.figures import Figures, figures, given, in_order
from benchmarks.lengths.hidden import States, add_states, states
from benchmarks.lengths.ladder import Array, lengths_of, predicted, steps
from benchmarks.lengths.page import Model, page
from benchmarks.lengths.prompts import Prompt, data_folder, prompts
from benchmarks.lengths.rows import Row, keep, kept, made, recorded
from benchmarks.reporting.bootstrap import difference
from benchmarks.reporting.machine import describe, slug
from tandem.estimators.output_length import pinballs
from tandem.model.names import locate
from tandem.services.answering.tokenizer import Tokenizer
from tandem.services.lengths.lexicon import Lexicon
from tandem.services.lengths.scores import Scorer

RESULTS = Path(__file__).parents[1] / "results"
CLAIMS = (
    ("lexical", "input length"),
    ("lexical", "history"),
    ("MLP on the six scores", "input length"),
    ("weighted rules", "input length"),
    ("hidden", "lexical"),
)
PRODUCED = 64

app = typer.Typer(add_completion=False)
ModelName = Annotated[str, typer.Option(help="Chat model that answers")]
Data = Annotated[Path | None, typer.Option(help="Folder of the shared data")]
Seconds = Annotated[float, typer.Option(help="Begin nothing new after so long")]


@app.callback(invoke_without_command=True)
def study_command(context: typer.Context, model: ModelName = "smollm2", data: Data = None) -> None:
    """The ladder of predictors, from the outputs that were collected and the recorded ones."""
    if context.invoked_subcommand is not None:
        return
    folder, scorer = data or data_folder(), Scorer(Lexicon.load())
    tokenizer = Tokenizer.load(str(locate(model, lambda stage, done: None)))
    ask = Ask(model)
    found = {model: study(model, kept(_rows_of(model)), states(ask), own=True)}
    for name, rows in recorded(folder, tokenizer, scorer).items():
        found[name] = study(name, rows, {}, own=False)
    machine = describe("cpu", 1)
    score_ms = _score_ms(prompts(folder), scorer)
    stem = f"lengths-{slug(machine)}"
    plain = {"machine": machine, "score_ms": score_ms}
    told = {name: _plain(each) for name, each in found.items()}
    (RESULTS / f"{stem}.json").write_text(json.dumps({**plain, "models": told}, indent=1) + "\n")
    heading = (
        "Quantiles of the output length by five-fold cross-validation over prompts. The first model"
        f" answered through `tandem batch run` (temperature {ask.temperature:g}, at most"
        f" {ask.max_tokens} tokens); the others' answers are recorded, and counted with its"
        " tokenizer. A step that predicts a point has the quantiles of its own errors."
    )
    (RESULTS / f"{stem}.md").write_text(page(heading, found, score_ms))
    print(RESULTS / f"{stem}.md")


@app.command("collect")
def collect_command(
    model: ModelName = "smollm2",
    data: Data = None,
    count: Annotated[int, typer.Option(help="Prompts, of all in their order")] = 10**6,
    slice_prompts: Annotated[int, typer.Option(help="Prompts of one batch")] = 100,
    seconds: Seconds = 1e9,
) -> None:
    """Let the model answer prompts that have no answer yet; keep all lengths without texts."""
    ask, asked = Ask(model), prompts(data or data_folder())
    resume(ask, _rows_of(model))
    print(collect(asked[:count], ask, slice_prompts, seconds), "answers")
    keep(_rows_of(model), made(asked, answers(ask.path), ask.max_tokens, Scorer(Lexicon.load())))


@app.command("hidden")
def hidden_command(model: ModelName = "smollm2", data: Data = None, seconds: Seconds = 1e9) -> None:
    """Compute the last hidden state of the prompts that have an answer."""
    ask = Ask(model)
    resume(ask, _rows_of(model))
    known = answers(ask.path)
    wanted = [prompt for prompt in prompts(data or data_folder()) if prompt.key in known]
    print(add_states(wanted, ask, seconds), "states of", len(wanted))


def study(name: str, rows: Sequence[Row], hidden: States, *, own: bool) -> Model:
    """The ladder on one model's answers; with hidden states on the answers that have one. What the
    server would have said meanwhile is asked of the `own` model's, which are in random order."""
    rows = [row for row in rows if not hidden or row.key in hidden]
    lengths = lengths_of(rows)
    told = {step: predicted(make, rows) for step, make in steps(hidden).items()}
    found = {step: figures(quantiles, lengths) for step, quantiles in told.items()}
    return Model(
        name,
        len(rows),
        len({row.key for row in rows}),
        float(np.mean([row.finish == "length" for row in rows])),
        float(lengths.mean()),
        found,
        {
            (better, than): difference(_losses(rows, lengths, told[better], told[than]))
            for better, than in CLAIMS
            if better in told and than in told
        },
        _given(told, rows) if own else {},
        in_order(rows) if own else None,
    )


def _losses(
    rows: Sequence[Row], lengths: Array, ours: Array, theirs: Array
) -> dict[str, list[tuple[float, float]]]:
    clusters: dict[str, list[tuple[float, float]]] = {}
    pairs = zip(rows, pinballs(ours, lengths), pinballs(theirs, lengths), strict=True)
    for row, our, their in pairs:
        clusters.setdefault(row.key, []).append((float(our), float(their)))
    return clusters


def _given(told: dict[str, Array], rows: Sequence[Row]) -> dict[str, tuple[int, Figures, Figures]]:
    found: dict[str, tuple[int, Figures, Figures]] = {}
    for name in ("history", "lexical"):
        if known := given(told[name], rows, PRODUCED):
            without, with_it, answers_left = known
            found[name] = answers_left, without, with_it
    return found


def _score_ms(asked: Sequence[Prompt], scorer: Scorer) -> tuple[float, float]:
    """Mean and 95th percentile of the processor time that the scores of a prompt take."""
    taken = list[float]()
    for prompt in asked:
        begun_s = time.thread_time()  # others may use the cores
        scorer.score(prompt.text)
        taken.append(1e3 * (time.thread_time() - begun_s))
    return float(np.mean(taken)), float(np.quantile(taken, 0.95))


def _plain(model: Model) -> dict[str, object]:
    claims = {f"{a} against {b}": asdict(each) for (a, b), each in model.claims.items()}
    return {**asdict(model), "claims": claims}


def _rows_of(model: str) -> Path:
    return RESULTS / f"lengths-{Path(model).stem}.jsonl.gz"


if __name__ == "__main__":
    app()
