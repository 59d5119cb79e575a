"""Loss curves: files that runs write are read back, and what is wrong with others is said."""

from __future__ import annotations

import math
from codecs import BOM_UTF8
from pathlib import Path

import pytest

from tandem.core.errors import InvalidRequest
from tandem.core.learning import EventRecord
from tandem.services.jobs.results import as_csv, step_event
from tandem.sim.curves import Curve, Recorded, read_curve, write_curve


def loss_at(curve: Curve, updates: int) -> float:
    """DPO's loss at the curve's margin."""
    margin = curve.margin(updates)
    return math.log1p(math.exp(-abs(margin))) + max(0.0, -margin)


def test_a_run_gives_its_losses_back():
    curve = Recorded([0.69, 0.5, 0.2])
    for updates, loss in ((0, 0.69), (1, 0.5), (2, 0.2), (9, 0.2)):
        assert loss_at(curve, updates) == pytest.approx(loss)
    assert loss_at(Recorded([1000.0]), 0) == pytest.approx(1000.0)
    with pytest.raises(InvalidRequest, match="losses above 0"):
        Recorded([])


def test_what_is_written_is_read(tmp_path: Path):
    path = tmp_path / "losses.csv"
    write_curve([0.693147, 1.25, 0.0000001], path)
    assert path.read_text().splitlines()[:2] == ["step,train_loss", "1,0.693147"]
    curve = read_curve(path)
    assert [loss_at(curve, n) for n in range(3)] == pytest.approx([0.693147, 1.25, 5e-7])
    path.write_bytes(BOM_UTF8 + path.read_bytes())  # as spreadsheets save it
    assert loss_at(read_curve(path), 1) == pytest.approx(1.25)


def test_the_result_file_of_a_job_is_a_curve(tmp_path: Path):
    """Its second step was left out, so it made no update."""
    losses = {1: 0.7, 3: 0.6, 4: 0.45}
    events: list[EventRecord] = [
        step_event("job", 0.0, 4, {"step": step, "train_loss": loss, "train_accuracy": 0.5})
        for step, loss in losses.items()
    ]
    path = tmp_path / "result.csv"
    path.write_bytes(as_csv(events))
    curve = read_curve(path)
    assert [loss_at(curve, n) for n in range(4)] == pytest.approx([0.7, 0.6, 0.45, 0.45])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "names no column step and no train_loss"),
        ("step,loss\n1,0.5\n", "names no column train_loss"),
        ("step,train_loss\n", "it has no step"),
        ("step,train_loss\n1,0.5\n2,\n", "line 3 lacks a whole step or a loss"),
        ("step,train_loss\n1,0.5\n1.5,0.4\n", "line 3 lacks a whole step or a loss"),
        ("step,train_loss\n1\n", "line 2 lacks a whole step or a loss"),
        ("step,train_loss\n0,0.5\n", "line 2: step 0 must be above 0"),
        ("step,train_loss\n2,0.5\n2,0.4\n", "line 3: step 2 must be above 2"),
        ("step,train_loss\n1,-0.5\n", "line 2: the loss -0.5 is below 0 or not finite"),
        ("step,train_loss\n1,nan\n", "line 2: the loss nan is below 0 or not finite"),
    ],
)
def test_what_is_no_curve_is_said_with_its_line(tmp_path: Path, text: str, said: str):
    path = tmp_path / "losses.csv"
    path.write_text(text)
    with pytest.raises(InvalidRequest) as caught:
        read_curve(path)
    assert said in str(caught.value) and str(path) in str(caught.value)


def test_what_cannot_be_read_is_said(tmp_path: Path):
    with pytest.raises(InvalidRequest, match="cannot read the loss curve"):
        read_curve(tmp_path / "nowhere.csv")
    (tmp_path / "picture.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidRequest, match="cannot read the loss curve"):
        read_curve(tmp_path / "picture.csv")
