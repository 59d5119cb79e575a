"""`tandem bench mace`: one command leaves the page and all figures behind."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from tandem.bench.mace import FIFO_VARIANTS, VARIANTS
from tandem.cli import app, mace


@pytest.fixture
def few(monkeypatch):
    """Two rates and two loads."""
    monkeypatch.setattr(mace, "RETRAIN_RATES", (0.0, 0.1))
    monkeypatch.setattr(mace, "LOADS", (0.5, 1.0))


def test_all_parts_are_written(few, tmp_path):
    flags = ["--scale", "edge", "--seconds", "3", "--seed", "2", "--no-figures", "--out"]
    result = CliRunner().invoke(app, ["bench", "mace", *flags, str(tmp_path)])
    assert result.exit_code == 0, result.output
    content = json.loads((tmp_path / "mace.json").read_text())
    assert content["schema"] == mace.SCHEMA and "server" not in content
    edge = content["edge"]
    assert len(edge["rates"]) == len(edge["loads"]) == 2 * len(VARIANTS)
    assert len(edge["fifo"]) == 2 * len(FIFO_VARIANTS)
    assert [each["variant"] for each in edge["overheads"]] == [each.name for each in VARIANTS]
    page = (tmp_path / "mace.md").read_text()
    assert page in result.output
    assert "`learning-DEVICE.md`" in page
    for claim in edge["claims"]:
        assert (f"| {claim['text']} |" in page) and (claim["holds"] or claim["reason"] in page)


def test_an_unknown_scale_is_refused_with_the_known_ones(tmp_path):
    result = CliRunner().invoke(app, ["bench", "mace", "--scale", "moon", "--out", str(tmp_path)])
    assert result.exit_code == 2 and "server, edge" in result.output
