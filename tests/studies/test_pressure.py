"""The study of admission under KV pressure: answers end where the trace says, whatever is known."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from benchmarks.lengths.pressure import WAYS, Setting, rows, simulate
from tandem.core.slo import Slo


def trace(folder: Path, seconds: float, rate: float) -> str:
    """Prompts of 300 to 600 tokens; answers of 5 to 400, mostly short."""
    (folder / "traces").mkdir()
    random, lines, at_s = Random(0), ["TIMESTAMP,ContextTokens,GeneratedTokens"], 0.0
    while at_s < seconds:
        at_s += random.expovariate(rate)
        output = 5 + int(min(395.0, random.expovariate(1 / 80)))
        stamp = f"2023-11-16 18:{int(at_s // 60):02d}:{at_s % 60:010.7f}"
        lines.append(f"{stamp},{random.randint(300, 600)},{output}")
    (folder / "traces" / "made.csv").write_text("\n".join(lines) + "\n")
    return "made.csv"


@pytest.mark.full
def test_the_predicted_peak_gains_without_preemptions(tmp_path: Path) -> None:
    name = trace(tmp_path, 40.0, 16.0)
    setting = Setting("h100:llama-3-8b", tmp_path, 40.0, 5.0, 512, Slo(2.0, 0.1))
    found = {(name, 380, 16.0, way): simulate(setting, name, 380, 16.0, way) for way in WAYS}
    reserve, greedy, predicted, known = found.values()
    assert predicted.goodput > 1.1 * reserve.goodput > 0.0
    assert reserve.preemptions == known.preemptions == 0
    assert 2 * predicted.preemptions < greedy.preemptions
    assert predicted.held > 1.1 * reserve.held
    assert len(list(rows(found))) == 3
