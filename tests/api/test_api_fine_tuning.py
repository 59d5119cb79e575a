"""Routes about fine-tuning jobs, with the openai client."""

from __future__ import annotations

from pathlib import Path

import httpx
import openai
import pytest
from test_api_learning import server, upload

from patience import eventually


def test_a_fine_tuning_job_with_the_openai_client(tmp_path: Path) -> None:
    examples = [
        {
            "messages": [
                {"role": "user", "content": f"Number {n}?"},
                {"role": "assistant", "content": f"It is {n}."},
            ]
        }
        for n in range(6)
    ]
    with server(tmp_path) as http:
        client = openai.OpenAI(base_url=str(http.base_url), api_key="none", max_retries=0)
        job = client.fine_tuning.jobs.create(
            model="demo",
            training_file=upload(client, examples),
            validation_file=upload(client, examples[:2]),
            suffix="numbers",
            seed=1,
            metadata={"team": "a"},
            method={
                "type": "supervised",
                "supervised": {"hyperparameters": {"n_epochs": 2, "batch_size": 2}},
            },
        )
        assert job.status == "validating_files" and job.fine_tuned_model is None
        job = eventually(
            lambda: (
                found
                if (found := client.fine_tuning.jobs.retrieve(job.id)).status
                not in ("validating_files", "queued", "running")
                else None
            )
        )
        assert job.status == "succeeded", job.error
        assert job.metadata == {"team": "a"} and job.seed == 1
        assert job.hyperparameters.n_epochs == 2
        assert job.trained_tokens and job.finished_at
        assert job.fine_tuned_model in [model.id for model in client.models.list()]
        events = client.fine_tuning.jobs.list_events(job.id, limit=4)
        assert len(events.data) == 4 and events.has_more
        every = [event.message for event in client.fine_tuning.jobs.list_events(job.id, limit=4)]
        assert len(every) == len(set(every)) > 6
        assert any(message.startswith("Step 6/6: training loss=") for message in every)
        checkpoints = client.fine_tuning.jobs.checkpoints.list(job.id).data
        assert [checkpoint.step_number for checkpoint in checkpoints] == [6, 3]
        assert checkpoints[0].metrics.full_valid_loss is not None
        text = client.files.content(job.result_files[0]).text
        assert len(text.splitlines()) == 7
        assert [listed.id for listed in client.fine_tuning.jobs.list()] == [job.id]
        asked: list[str] = []
        counting = httpx.Client(event_hooks={"request": [lambda r: asked.append(r.url.path)]})
        with openai.OpenAI(
            base_url=str(http.base_url), api_key="none", http_client=counting
        ) as hasty:
            steering = hasty.fine_tuning.jobs
            for steer in (steering.cancel, steering.pause, steering.resume):
                with pytest.raises(openai.BadRequestError, match="succeeded") as refused:
                    steer(job.id)
                assert refused.value.type == "invalid_request_error"
                assert refused.value.param == "status"
                assert "x-should-retry" not in refused.value.response.headers
            assert len(asked) == 3  # the client has not tried again
            back = f"/adapters/{job.fine_tuned_model.removeprefix('demo:')}/rollback"
            hasty.post(back, cast_to=object)
            with pytest.raises(openai.ConflictError, match="no version to roll back"):
                hasty.post(back, cast_to=object)
            assert len(asked) == 5


def test_wrong_jobs_are_refused_by_name(tmp_path: Path) -> None:
    with server(tmp_path) as http:
        client = openai.OpenAI(base_url=str(http.base_url), api_key="none", max_retries=0)
        file_id = upload(client, [{"messages": []}])
        good = {"model": "demo", "training_file": file_id}
        for changes, param in (
            ({"training_file": "file-none"}, "training_file"),
            ({"training_file": "file\0"}, "training_file"),
            ({"validation_file": "file\0"}, "validation_file"),
            ({"suffix": "formal\0"}, "suffix"),
            ({"model": "nobody"}, "model"),
            ({"method": {"type": "reinforcement"}}, "method"),
            ({"integrations": [{"type": "wandb"}]}, "integrations"),
            ({"seed": -1}, "seed"),
            ({"speed": 1}, "speed"),
        ):
            refused = http.post("/fine_tuning/jobs", json={**good, **changes})
            assert refused.json()["error"]["param"] == param, refused.text
            assert refused.status_code in (400, 404)
        job = client.fine_tuning.jobs.create(model="demo", training_file=file_id)
        job = eventually(
            lambda: (
                found
                if (found := client.fine_tuning.jobs.retrieve(job.id)).status == "failed"
                else None
            )
        )
        assert job.error and job.error.code == "invalid_training_file"
        assert "line 1" in job.error.message and job.error.param == "training_file"
