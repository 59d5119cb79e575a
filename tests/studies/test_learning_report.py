from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.learning.figures import draw
from benchmarks.learning.report import RunKey, as_json, as_markdown, report
from benchmarks.learning.runs import PairScore, RunRecord
from benchmarks.learning.teaching import Lessons, Published
from tandem.bench.measure import Outcome
from tandem.core.errors import InvalidRequest

SECONDS = 40.0


def record(gain: float, ttft_s: float, versions: int = 0) -> RunRecord:
    """Pairs whose difference goes -2, -1, 0.5, 2 and grows by `gain` over the run."""
    pairs = [
        PairScore(
            f"pair {n}",
            n / 2,
            "even" if n % 2 == 0 else "odd",
            0,
            (-2.0, -1.0, 0.5, 2.0)[n % 4] + gain * n / 80,
            0.0,
        )
        for n in range(80)
    ]
    outcomes = [
        Outcome(n, n / 3, n / 3, [n / 3 + ttft_s, n / 3 + ttft_s + 0.03], n / 3 + 1, 5, 4, True)
        for n in range(100)
    ]
    published = [Published(float(n), n, "hash", "path", n) for n in range(1, versions + 1)]
    lessons = Lessons(published, [0.5] * versions, 8 * versions, 0, [2.0] * versions)
    return RunRecord(SECONDS, outcomes, lessons, pairs)


RECORDS = {
    RunKey(rate, policy, seed): record(gain * rate, ttft_s, versions)
    for policy, gain, ttft_s, versions in (
        ("no_retrain", 0.0, 0.01, 0),
        ("adainf", 4.0, 0.2, 10),
        ("unified", 5.0, 0.02, 10),
    )
    for rate in (0.2, 0.5)
    for seed in (0, 1)
}


def test_averages() -> None:
    found = report(RECORDS).averages[0.5]["no_retrain"]
    assert (found.pairs, found.requests, found.failed, found.versions) == (160, 200, 0, 0)
    assert found.win_rate == 0.5 and found.clpd == pytest.approx(-0.125)
    assert found.ttft_p50_s == pytest.approx(0.01) and found.tpot_p50_s == pytest.approx(0.01)
    assert found.freshness_p50_s is None
    taught = report(RECORDS).averages[0.5]["unified"]
    assert taught.freshness_p50_s == 2.0 and (taught.updates, taught.uses) == (20, 160)


def test_comparisons_pair_the_same_pairs_and_requests() -> None:
    by_name = {each.theirs: each for each in report(RECORDS).comparisons[0.5]}
    assert set(by_name) == {"no_retrain", "adainf"}
    adainf = by_name["adainf"]
    assert adainf.ttft_ratio.value == pytest.approx(0.1)
    assert adainf.clpd_difference.value == pytest.approx(0.5 * 79 / 160)
    assert 0.0 < adainf.clpd_difference.low < adainf.clpd_difference.value
    assert by_name["no_retrain"].win_rate_ratio.value > 1.0


def test_sources_are_told_apart() -> None:
    found = report(RECORDS).sources[0.5]["no_retrain"]
    assert set(found) == {"even", "odd"}
    assert found["even"].pairs == 80 and found["even"].win_rate == 0.5
    assert found["even"].clpd == pytest.approx(-0.75)
    assert found["odd"].clpd == pytest.approx(0.5)
    table = as_markdown(report(RECORDS))
    assert "| even | 80 | 0.500 / -0.8 |" in table


def test_curves_rise_with_what_is_learnt() -> None:
    curves = report(RECORDS).curves[0.5]
    curve = curves["unified"]
    assert len(curve.at_s) == len(curve.clpd) == len(curve.win_rate)
    assert 0.0 < curve.at_s[0] < curve.at_s[-1] < SECONDS
    assert curve.clpd[-1] - curve.clpd[0] > 1.0
    assert max(curves["no_retrain"].clpd) - min(curves["no_retrain"].clpd) < 0.8


def test_json_and_table() -> None:
    found = report(RECORDS)
    data = json.loads(as_json({"seeds": [0, 1]}, found))
    assert data["schema"] == "tandem-learning-1" and data["options"] == {"seeds": [0, 1]}
    assert set(data["averages"]) == {"0.2", "0.5"}
    table = as_markdown(found)
    assert table.count("| unified | 160 |") == 2 and "+0.25" in table
    assert len({line.count("|") for line in table.splitlines()[:8]}) == 1


@pytest.mark.full
def test_figures_are_the_same_each_time(tmp_path: Path) -> None:
    found = report(RECORDS)
    (tmp_path / "again").mkdir()
    written = draw(found, tmp_path, "learning")
    names = [
        f"learning-{what}.{kind}" for what in ("over-time", "by-rate") for kind in ("png", "svg")
    ]
    assert [path.name for path in written] == names
    for path, again in zip(written, draw(found, tmp_path / "again", "learning"), strict=True):
        assert path.read_bytes() == again.read_bytes() and path.stat().st_size > 10_000


def test_missing_matplotlib_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    true_import = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] == "matplotlib":
            raise ImportError("no module named matplotlib")
        return true_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(InvalidRequest, match=r"tandem\[bench\]"):
        draw(report(RECORDS), tmp_path, "learning")
