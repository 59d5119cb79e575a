"""Findings: what is good, what is advice, what makes serving impossible."""

from __future__ import annotations

import io
import os
from importlib import metadata
from pathlib import Path

import pytest
from rich.console import Console

from tandem.cli import doctor
from tandem.cli.doctor import Finding, Level, examine, report


def shown(findings: list[Finding]) -> tuple[int, str]:
    stream = io.StringIO()
    code = report(findings, Console(file=stream, width=200))
    return code, stream.getvalue()


def test_this_machine_can_serve() -> None:
    findings = examine(os.environ)
    subjects = {finding.subject for finding in findings}
    assert {"versions", "device", "dtype", "memory", "demo model"} <= subjects
    code, text = shown(findings)
    assert code == 0, text
    assert "tandem serve demo" in text
    assert all(finding.advice for finding in findings if finding.level is not Level.GOOD)


def test_something_missing_is_fatal_and_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    version = metadata.version

    def without_torch(package: str) -> str:
        if package == "torch":
            raise metadata.PackageNotFoundError(package)
        return version(package)

    monkeypatch.setattr(doctor.metadata, "version", without_torch)
    code, text = shown(examine({}))
    assert code == 1
    assert "pip install torch" in text and "impossible" in text


def test_advice_alone_is_not_fatal() -> None:
    code, text = shown([Finding("x", Level.ADVICE, "[odd]", "do [this]")])
    assert code == 0
    assert "[odd]" in text and "do [this]" in text


def test_no_compiler_is_advice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (finding,) = [finding for finding in examine({}) if finding.subject == "C++ compiler"]
    assert finding.level is Level.ADVICE and "g++" in finding.advice
