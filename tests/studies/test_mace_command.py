"""`python -m benchmarks mace`: one command leaves the page and all figures behind."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import typer
from typer.testing import CliRunner

from benchmarks.mace import __main__ as mace
from benchmarks.mace import engines
from benchmarks.mace.runs import FIFO_VARIANTS, VARIANTS

APP = typer.Typer()
APP.command()(mace.main)


@pytest.fixture
def few(monkeypatch):
    """Two rates and two loads."""
    monkeypatch.setattr(mace, "RETRAIN_RATES", (0.0, 0.1))
    monkeypatch.setattr(mace, "LOADS", (0.5, 1.0))


@pytest.mark.full
def test_all_parts_are_written(few, tmp_path):
    flags = ["--scale", "edge", "--seconds", "3", "--seed", "2", "--no-figures", "--out"]
    result = CliRunner().invoke(APP, [*flags, str(tmp_path)])
    assert result.exit_code == 0, result.output
    content = json.loads((tmp_path / "mace.json").read_text())
    assert content["schema"] == mace.SCHEMA and "server" not in content
    edge = content["edge"]
    assert len(edge["rates"]) == len(edge["loads"]) == 2 * len(VARIANTS)
    assert len(edge["fifo"]) == 2 * len(FIFO_VARIANTS)
    assert [each["variant"] for each in edge["overheads"]] == [each.name for each in VARIANTS]
    page = (tmp_path / "mace.md").read_text()
    assert page in result.output
    assert page.startswith("# MACE at the paper's scale, simulated\n")
    assert "`learning-DEVICE.md`" in page
    for claim in edge["claims"]:
        assert (f"| {claim['text']} |" in page) and (claim["holds"] or claim["reason"] in page)


@pytest.fixture
def fewer(monkeypatch):
    """One of each: what is run on a real engine takes its time, and so do large products and long
    contexts while it is measured. As many requests come to a busy machine as to a quick one."""
    monkeypatch.setattr(mace, "SMALL_RETRAIN_RATES", (0.5,))
    monkeypatch.setattr(mace, "SMALL_LOADS", (1.0,))
    monkeypatch.setattr(mace, "bearable", lambda scale, _: replace(scale, rate=160.0))
    monkeypatch.setattr("tandem.executor.ceilings._SIDE", 256)
    monkeypatch.setattr(engines, "KV_BYTES", 8 << 20)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.full
def test_a_real_model_is_measured_as_others_are_simulated(fewer, tmp_path):
    flags = ["--engine", "demo", "--scale", "cpu", "--seconds", "0.05", "--rounds", "1"]
    command = [*flags, "--out", str(tmp_path)]
    result = CliRunner().invoke(APP, command)
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "mace.json").read_text())["cpu"]
    assert found["claims"] == [] and found["measured"]["machine"]["device"] == "cpu"
    assert found["scale"]["rate"] == 160.0 and found["ceilings"]["flops"] > 1e8
    assert all(seconds > 0 for seconds in found["measured"]["capacity"].values())
    for part, runs in (("rates", VARIANTS), ("loads", VARIANTS), ("fifo", FIFO_VARIANTS)):
        assert [row["variant"] for row in found[part]] == [variant.name for variant in runs]
        assert [[row] for row in found[part]] == found["rounds"][part]
        for row in found[part]:
            assert row["iterations"] > 0 and 0 <= row["attainment"] <= 1
    # Not of each: on a busy machine some get nowhere in so short a time.
    assert max(row["throughput"] for row in found["rates"]) > 0
    assert 0 < max(row["utilisation"] for row in found["rates"]) < 1.5
    for row in found["rates"]:  # that jobs end, with time enough, is what `job_s` was taken of
        assert row["jobs"] > 0 and 0 <= row["jobs_done"] <= row["jobs"]
    for row in found["overheads"]:
        assert 0 < row["schedule_s"] < 0.1 and 10_000 < row["state_bytes"] < 100_000_000
    page = (tmp_path / "mace.md").read_text()
    assert page.startswith("# MACE at a small scale, measured\n")
    assert "## cpu: demo" in page and "Measured on the real engine; device: cpu" in page
    assert "| claim |" not in page
    assert {path.name for path in tmp_path.glob("*.png")} == {
        f"mace-cpu-{part}.png" for part in ("rates", "loads", "fifo")
    }


def test_without_a_model_nothing_is_measured(tmp_path):
    result = CliRunner().invoke(APP, ["--scale", "cpu", "--out", str(tmp_path)])
    assert result.exit_code == 2 and "known: server, edge" in " ".join(result.output.split())


def test_a_model_that_no_scale_needs_is_refused(tmp_path):
    flags = ["--engine", "demo", "--scale", "edge", "--out", str(tmp_path)]
    result = CliRunner().invoke(APP, [*flags])
    assert result.exit_code == 2 and "--scale cpu" in " ".join(result.output.split())


def test_a_model_that_is_not_there_is_said(tmp_path):
    flags = ["--engine", str(tmp_path / "none"), "--scale", "cpu", "--out", str(tmp_path)]
    result = CliRunner().invoke(APP, [*flags])
    assert result.exit_code == 2 and "there is no directory" in result.output


def test_an_unknown_scale_is_refused_with_the_known_ones(tmp_path):
    result = CliRunner().invoke(APP, ["--scale", "moon", "--out", str(tmp_path)])
    assert result.exit_code == 2 and "server, edge" in result.output
