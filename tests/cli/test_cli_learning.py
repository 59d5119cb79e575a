"""`tandem adapters` and `tandem finetune` against a whole server over the scripted engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner, Result

from fake_engine import FakeEngine
from learning_world import CANARY
from serving import live
from tandem.adapters.files import CONFIG_NAME, WEIGHTS_NAME
from tandem.build import build_app
from tandem.cli import app
from tandem.config import AdapterConfig, LearningConfig, Settings, StoreConfig

RUNNER = CliRunner(env={"COLUMNS": "200"})


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    canary = tmp_path / "canary.jsonl"
    canary.write_text(CANARY)
    folder = tmp_path / "roots" / "given"
    folder.mkdir(parents=True)
    (folder / CONFIG_NAME).write_text('{"peft_type": "LORA", "r": 4, "lora_alpha": 8}')
    (folder / WEIGHTS_NAME).write_bytes(b"weights")
    settings = Settings(
        store=StoreConfig(directory=str(tmp_path / "state")),
        learning=LearningConfig(canary_file=str(canary)),
        adapters=AdapterConfig(roots=(str(tmp_path / "roots"),)),
    )
    with live(build_app(settings, FakeEngine())) as address:
        yield f"{address}/v1"


def run(url: str, *words: str) -> Result:
    return RUNNER.invoke(app, [*words, "--url", url])


def test_adapters_from_the_command_line(url: str, tmp_path: Path) -> None:
    made = run(url, "adapters", "create", "formal", "--set", "rank=4", "--set", "gate=manual")
    assert made.exit_code == 0 and "'rank': 4" in made.output, made.output
    assert "formal@1 answers now" in run(url, "adapters", "import", "formal", "given").output
    assert "formal@2 answers now" in run(url, "adapters", "import", "formal", "given").output
    listed = run(url.removesuffix("/v1"), "adapters", "list").output
    assert "demo:formal" in listed and "formal@2" in listed and "manual" in listed
    versions = run(url, "adapters", "versions", "formal").output
    assert "2 *" in versions and "import" in versions
    assert (
        "formal@1 answers now"
        in run(url, "adapters", "rollback", "formal", "--version", "1").output
    )
    assert "formal@2 answers now" in run(url, "adapters", "publish", "formal", "2").output
    target = tmp_path / "out.zip"
    exported = run(url, "adapters", "export", "formal", "2", "--out", str(target))
    assert exported.exit_code == 0 and target.stat().st_size > 0
    current = tmp_path / "current.zip"
    assert run(url, "adapters", "export", "formal", "--out", str(current)).exit_code == 0
    assert current.read_bytes() == target.read_bytes()
    run(url, "adapters", "create", "unlearned")
    nothing = run(url, "adapters", "export", "unlearned", "--out", str(tmp_path / "no.zip"))
    assert nothing.exit_code == 1 and "no current version" in nothing.output
    assert not (tmp_path / "no.zip").exists()
    assert "rolled back from version 2 to 1" in run(url, "adapters", "events", "formal").output
    one = ("adapters", "delete", "formal", "--version")
    refused = run(url, *one, "2")
    assert refused.exit_code == 1 and "answers" in refused.output
    assert "formal@1 is gone" in run(url, *one, "1").output
    assert "has no version 1" in run(url, *one, "1").output
    assert "formal is gone" in run(url, "adapters", "delete", "formal").output
    gone = run(url, "adapters", "versions", "formal")
    assert gone.exit_code == 1 and "there is no adapter 'formal'" in gone.output


def test_a_server_that_is_not_there_is_one_line() -> None:
    failed = run("http://127.0.0.1:9/v1", "adapters", "list")
    assert failed.exit_code == 1 and "error: cannot reach" in failed.output


def test_a_wrong_setting_is_refused(url: str) -> None:
    assert run(url, "adapters", "create", "formal", "--set", "rank").exit_code == 2
    refused = run(url, "adapters", "create", "formal", "--set", "speed=1")
    assert refused.exit_code == 1 and "there is no setting 'speed'" in refused.output


def test_a_job_is_watched_to_its_end(url: str, tmp_path: Path) -> None:
    examples = tmp_path / "train.jsonl"
    lines = [
        {"prompt": f"Number {n}:", "completion": f" {n}", "label": n % 2 == 0} for n in range(6)
    ]
    examples.write_text("\n".join(json.dumps(line) for line in lines))
    done = run(
        url, "finetune", "create", str(examples), "--model", "demo", "--method", "kto",
        "--suffix", "numbers", "--epochs", "1", "--batch-size", "2", "--seed", "0",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    (job,) = httpx.get(f"{url}/fine_tuning/jobs").json()["data"]
    assert job["seed"] == 0
    assert "is ready" in done.output and "succeeded" in done.output
    job_id = done.output.split()[0]
    assert job_id in run(url, "finetune", "list").output
    events = run(url, "finetune", "events", job_id).output
    assert events.index("Step 1/3") < events.index("Step 3/3")
    cancelled = run(url, "finetune", "cancel", job_id)
    assert cancelled.exit_code == 1 and "cannot be cancelled" in cancelled.output
    lines.append({"prompt": "x"})
    examples.write_text("\n".join(json.dumps(line) for line in lines))
    failed = run(url, "finetune", "create", str(examples), "--model", "demo", "--method", "kto")
    assert failed.exit_code == 1 and "line 7" in failed.output
