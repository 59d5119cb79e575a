"""Runs the parts within a budget of wall-clock time and writes what there is after every row.

A part that would not fit is skipped and says so; one that fails does not end the run. Invariant:
the files on the disk have every row that was measured, however the run ends.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from benchmarks.gpu import ceilings, coserving, generation, passes, replays
from benchmarks.gpu.ceilings import Ceilings
from benchmarks.gpu.engine import Engine
from benchmarks.gpu.options import Options
from benchmarks.gpu.report import as_markdown, as_table
from benchmarks.reporting.machine import describe, slug

Row = dict[str, object]
Measure = Callable[[Engine, Ceilings, Options], Iterator[Row]]

MEASURES: dict[str, Measure] = {
    "decode": passes.decode,
    "iterations": generation.iterations,
    "prefill": passes.prefill,
    # Many adapters enlarge their table, and passes with adapters are captured anew.
    "coserving": coserving.coserving,
    "adapters": passes.adapters,
    "replays": replays.replays,
    "kernels": passes.kernels,
    "peers": generation.peers,
}
# Seconds that a part takes on a large device, to be on the safe side; kernels compile meanwhile.
COST_S = {
    "decode": 8.0,
    "iterations": 16.0,
    "prefill": 6.0,
    "adapters": 10.0,
    "replays": 10.0,
    "kernels": 10.0,
    "peers": 30.0,
}
LOAD_S = 25.0  # with the passes that are captured then
# Parts for which one model, the first, says enough.
FIRST_ONLY = ("coserving",)


@dataclass
class Findings:
    """What is written: rows by part, and what is missing with the reason."""

    machine: dict[str, object]
    parts: dict[str, list[Row]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)

    def write(self, out: Path) -> Path:
        """As `gpu-DEVICE.json` and `.md`; returns the page."""
        out.mkdir(parents=True, exist_ok=True)
        stem = out / f"gpu-{slug(self.machine)}"
        data = {"machine": self.machine, "parts": self.parts, "missing": self.missing}
        page = stem.with_suffix(".md")
        stem.with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n")
        page.write_text(as_markdown(data))
        return page

    def keep_from(self, out: Path, parts: tuple[str, ...]) -> None:
        """Take over those of an earlier run's rows that this one does not measure."""
        path = out / f"gpu-{slug(self.machine)}.json"
        if path.exists():
            earlier: dict[str, list[Row]] = json.loads(path.read_text())["parts"]
            self.parts = {name: rows for name, rows in earlier.items() if name not in parts}


class Study:
    """One run."""

    def __init__(
        self, options: Options, out: Path, say: Callable[[str], None], began_s: float
    ) -> None:
        """`began_s`, on `time.perf_counter`, is when the budget began."""
        self._options, self._out, self._say, self._began_s = options, out, say, began_s
        self._engines: dict[str, Engine] = {}
        self.findings = Findings(_machine(options.device))

    def run(self, *, keep: bool = False) -> bool:
        """Measure all parts; False if any is missing. `keep` an earlier run's other parts."""
        options = self._options
        if keep:
            self.findings.keep_from(self._out, ("ceilings", *options.parts))
        limits = ceilings.measure(options)
        self._take("ceilings", "", ceilings.rows(limits))
        for part, measure in MEASURES.items():
            if part not in options.parts:
                continue
            models = options.models[:1] if part in FIRST_ONLY else options.models
            for model in models:
                self._measure(part, model, measure, limits)
        self._say(f"written: {self.findings.write(self._out)}")
        return not self.findings.missing

    def _measure(self, part: str, model: str, measure: Measure, limits: Ceilings) -> None:
        needs_s = self._needs_s(part, model)
        left_s = self._options.budget_s - self._now_s()
        if needs_s > left_s:
            self._miss(part, model, f"skipped: needs {needs_s:.0f} s, {left_s:.0f} s are left")
            return
        try:
            if model not in self._engines:
                self._engines[model] = Engine(model, self._options, self._progress)
            self._take(part, model, measure(self._engines[model], limits, self._options))
        except Exception as error:  # a part that fails must not cost the others
            self._say(traceback.format_exc())
            self._miss(part, model, f"failed: {type(error).__name__}: {error}")

    def _take(self, part: str, model: str, rows: Iterator[Row]) -> None:
        began_s, found = self._now_s(), []
        for row in rows:
            found.append(row)
            self.findings.parts.setdefault(part, []).append(row)
            self.findings.write(self._out)
        took_s = self._now_s() - began_s
        self._progress(f"{part} {model}".strip() + f": {took_s:.1f} s")
        self._say("\n".join(as_table(found)))

    def _miss(self, part: str, model: str, reason: str) -> None:
        line = f"{part} of {model}: {' '.join(reason.split())}"
        self.findings.missing.append(line)
        self.findings.write(self._out)
        self._progress(line)

    def _needs_s(self, part: str, model: str) -> float:
        options = self._options
        windows = 2.0 + len(options.tpot_factors) + 2.0 * coserving.WARM_UP_SHARE
        usual = COST_S.get(part, windows * options.seconds + 5.0)
        return usual + (LOAD_S if model not in self._engines else 0.0)

    def _progress(self, text: str) -> None:
        self._say(f"{self._now_s():6.1f} s  {text}")

    def _now_s(self) -> float:
        return time.perf_counter() - self._began_s


def small(options: Options) -> Options:
    """The same parts in seconds on a processor: it shows that they run, and no speed."""
    return replace(
        options,
        dtype="float32",
        stream_bytes=1 << 22,
        matrix=64,
        batches=(1, 3),
        context_tokens=24,
        prefill_tokens=(16, 40),
        adapter_rows=3,
        rounds=2,
        warm_up=1,
        output_tokens=4,
        peer_batches=(1, 2),
        rate=20.0,
        prompt_tokens=12,
        answer_tokens=6,
        sequence_tokens=16,
        kv_tokens=4096,
        max_batch_tokens=128,
    )


def _machine(device: str) -> dict[str, object]:
    found = describe(device, torch.get_num_threads())
    for name in ("transformers", "triton"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "none"
    return found
