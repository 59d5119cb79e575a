"""The validation loss of a job where the model gives no finite log-probability."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from test_jobs import CALLER, TENANT, ask, ended, jobs_over, preferences, supervised, upload

from fake_engine import FakeEngine
from fake_scores import score_of
from tandem.core.learning import JobStatus
from tandem.core.training import ScoreRequest
from tandem.services.jobs.results import COLUMNS
from tandem.store import files

BAD = "It is 2."


@pytest.mark.parametrize(
    ("kind", "who"),
    [
        ("supervised", "the model"),
        ("dpo", "the model"),
        ("kto", "the model"),
        ("dpo", "the reference model"),
        ("kto", "the reference model"),
    ],
)
async def test_a_line_without_a_finite_score_is_named(tmp_path: Path, kind: str, who: str) -> None:
    """A number that JSON does not know must not end the job, nor what was trained until then."""
    bad: set[tuple[int, ...]] = set()

    def score_as(request: ScoreRequest, under: str | None) -> float:
        working = under is not None and under.startswith("working/")
        if request.tokens in bad and working == (who == "the model"):
            return math.nan
        return score_of(request.tokens, request.prompt_tokens, under)

    examples = {
        "supervised": supervised(3),
        "dpo": preferences(3),
        "kto": [
            {"prompt": f"Number {n}?", "completion": f"It is {n}.", "label": n != 1}
            for n in range(3)
        ],
    }[kind]
    async with jobs_over(tmp_path, FakeEngine(score_as=score_as)) as (world, jobs):
        encoder = await world.tools.encoder_of("any")
        turns = [{"role": "user", "content": "Number 2?"}]
        asked = ([], "Number 2?") if kind == "kto" else (turns, "")
        bad.add(encoder.prompt(*asked) + encoder.completion(*asked, BAD))
        training = await upload(world, examples[:2])
        held = await upload(world, examples)
        method = {"type": kind, kind: {"hyperparameters": {"n_epochs": 2, "batch_size": 2}}}
        wanted = ask(training, validation_file=held, method=method, hyperparameters=None)
        job = await ended(jobs, (await jobs.create(wanted, CALLER)).job_id)
        assert job.status is JobStatus.SUCCEEDED, job.error
        told = [event.message for event in await jobs.events(job.job_id, TENANT, None, 100)]
        expected = f"line 3 of the validation file: {who} gives an answer no finite"
        assert sum(expected in message for message in told) == 2  # at the end of each epoch
        checkpoints = await jobs.checkpoints(job.job_id, TENANT, None, 10)
        assert ["valid_loss" in record.metrics for record in checkpoints] == [False, False]
        file = await world.store.read(files.find, job.result_files[0])
        assert file is not None
        valid = COLUMNS.index("valid_loss")
        rows = Path(file.path).read_text().splitlines()[1:]
        assert [row.split(",")[valid] for row in rows] == ["", ""]


async def test_a_job_whose_file_is_gone_fails_and_names_it(tmp_path: Path) -> None:
    async with jobs_over(tmp_path, FakeEngine()) as (world, jobs):
        training = await upload(world, preferences(2))
        file = await world.store.read(files.find, training)
        assert file is not None
        Path(file.path).unlink()
        job = await ended(jobs, (await jobs.create(ask(training), CALLER)).job_id)
        assert job.status is JobStatus.FAILED
        assert (job.error["code"], job.error["param"]) == ("file_not_found", "training_file")
        assert training in job.error["message"] and str(tmp_path) not in job.error["message"]


@pytest.mark.parametrize("liked", [0, 1])
async def test_a_job_with_a_step_of_dislikes_alone_fails(tmp_path: Path, liked: int) -> None:
    rows = [
        {"prompt": f"{n}?", "completion": f"It is {n}.", "label": n < liked} for n in range(9)
    ]  # of two steps
    async with jobs_over(tmp_path, FakeEngine()) as (world, jobs):
        training = await upload(world, rows)
        wanted = ask(training, method={"type": "kto"}, hyperparameters=None)
        job = await ended(jobs, (await jobs.create(wanted, CALLER)).job_id)
        assert job.status is JobStatus.FAILED and job.error["param"] == "training_file"
        assert job.error["message"].startswith(f"{liked} of 9 labels are true")
