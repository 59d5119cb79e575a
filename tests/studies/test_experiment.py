from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from benchmarks.learning import compare
from benchmarks.learning.experiment import Experiment, ExperimentOptions, Sources
from benchmarks.learning.lessons import PriorityOptions
from benchmarks.learning.preferences import held_back, read_preferences
from benchmarks.learning.report import RunKey, report
from benchmarks.learning.stream import Feedback, LoadOptions
from benchmarks.learning.teaching import TeachingOptions
from fake_engine import INFO, FakeEngine, Script
from tandem.core.errors import InvalidRequest
from tandem.model.names import DEMO_PATH
from tandem.sim.curves import read_curve
from virtual_time import virtually

OPTIONS = ExperimentOptions(
    load=LoadOptions(rate=150.0, pairs=8, output_tokens=2),
    teaching=TeachingOptions(batch=2, micro_batch=2, steps_per_version=1),
    repeats=PriorityOptions(batch=2),
    policies=("no_retrain", "unified"),
    retrain_rates=(0.2, 0.1),
    seeds=(0,),
    sources=("gsm8k",),
)


@pytest.fixture
def sources(tmp_path: Path) -> Sources:
    folder = tmp_path / "data" / "preferences"
    folder.mkdir(parents=True)
    rows = [
        {
            "question": f"{n} + 1?",
            "a": {"is_correct": True, "solution": f"It is {n + 1}."},
            "b": {"is_correct": False, "solution": f"It is {n}."},
        }
        for n in range(24)
    ]
    text = "\n".join(json.dumps(row) for row in rows).encode()
    (folder / "gsm8k_example_model_solutions.jsonl.gz").write_bytes(gzip.compress(text))
    return Sources(tmp_path / "data", DEMO_PATH, tmp_path / "cache")


def fake(policy: str) -> FakeEngine:
    info = replace(INFO, vocab_size=4096)
    return FakeEngine(lambda request, index: Script(tokens=(7, 8)), info=info, step_s=0.001)


def test_runs_are_made_once_and_found_again(sources: Sources) -> None:
    experiment = Experiment(sources, OPTIONS, fake)
    assert [key.retrain_rate for key in experiment.keys] == [0.2, 0.2, 0.1, 0.1]
    for key in experiment.keys:
        virtually(experiment.make(key))
    again = Experiment(sources, replace(OPTIONS, seeds=(0, 1)), fake)
    records = again.finished()
    assert set(records) == set(experiment.keys)  # seed 1 is still to be made
    found = report(records)
    assert found.averages[0.2]["unified"].pairs == 8
    assert found.averages[0.1]["unified"].pairs == 4
    assert found.averages[0.2]["unified"].updates > 0
    curves = {path.stem for path in again.folder.glob("*.csv")}
    assert curves == {"unified-0.1-0", "unified-0.2-0"}
    assert len(list(again.folder.iterdir())) == 4 + len(curves)
    losses = records[RunKey(0.2, "unified", 0)].lessons.losses
    rows = (again.folder / "unified-0.2-0.csv").read_text().splitlines()
    assert rows == ["step,train_loss", *(f"{n},{loss:.6f}" for n, loss in enumerate(losses, 1))]
    read_curve(again.folder / "unified-0.2-0.csv")
    other = replace(OPTIONS, teaching=replace(OPTIONS.teaching, beta=0.2))
    assert Experiment(sources, other, fake).finished() == {}


def test_runs_of_other_code_are_not_found(sources: Sources) -> None:
    code = sources.data / "code"
    (code / "kernels").mkdir(parents=True)
    python, kernel = code / "loop.py", code / "kernels" / "matmul.cpp"
    python.write_text("pass")
    kernel.write_text("// none")

    def folder() -> Path:
        return Experiment(replace(sources, code=(code,)), OPTIONS, fake).folder

    folders = {folder()}
    (code / "kernels" / "matmul.so").write_bytes(b"compiled")
    assert folder() in folders
    for change in (
        lambda: python.write_text("pass  # faster"),
        lambda: kernel.write_text("// faster"),
        lambda: python.rename(code / "loops.py"),
    ):
        change()
        assert folder() not in folders
        folders.add(folder())
    product, study = Sources(*[Path()] * 3).code
    assert (product / "engine" / "loop.py").is_file() and (study / "experiment.py").is_file()


def test_load_is_the_same_for_every_policy(sources: Sources) -> None:
    experiment = Experiment(sources, OPTIONS, fake)
    first, second = (experiment.load(RunKey(0.2, name, 0)) for name in OPTIONS.policies)
    assert first == second and len(first.feedback) == 8
    pair = first.feedback[0].pair
    assert pair.chosen[-1] == pair.rejected[-1] == 2  # <|im_end|>
    assert pair.chosen != pair.rejected


def test_held_back_pairs_are_never_met(sources: Sources) -> None:
    read = read_preferences(sources.data / "preferences", OPTIONS.sources)
    kept = sum(not held_back(pair) for pair in read)
    assert 0 < kept < len(read) == 24
    every = replace(OPTIONS, load=replace(OPTIONS.load, pairs=kept))
    met = {each.pair.prompt for each in load_of(sources, every)}
    with pytest.raises(InvalidRequest, match=f"{kept + 1} pairs are asked for and {kept} are"):
        load_of(sources, replace(every, load=replace(every.load, pairs=kept + 1)))
    assert len(met) == kept


def load_of(sources: Sources, options: ExperimentOptions) -> tuple[Feedback, ...]:
    return Experiment(sources, options, fake).load(RunKey(0.2, "unified", 0)).feedback


def test_options_that_cannot_be_run(sources: Sources) -> None:
    with pytest.raises(InvalidRequest, match="no policy 'fcfs'; known: no_retrain"):
        Experiment(sources, replace(OPTIONS, policies=("fcfs",)), fake)
    with pytest.raises(InvalidRequest, match="dialogue_model"):
        empty = replace(sources, model=sources.data)
        Experiment(empty, OPTIONS, fake)


def test_command_without_shared_data(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(compare.main)
    result = CliRunner().invoke(app, ["--data", str(tmp_path / "absent")])
    assert result.exit_code == 2
    assert "skipped: no shared data" in result.output
