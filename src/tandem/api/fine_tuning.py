"""Routes of OpenAI's fine-tuning API, with its objects; `kto` is ours.

Knows how a job looks from outside, not how it runs. Invariant: statuses, lists and errors have
OpenAI's shape.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import FastAPI, Request, Response
from pydantic import Field

from tandem.api.connection import as_json, read, who_asks
from tandem.api.paging import page_json, parse_number, read_limit, read_text
from tandem.api.schemas import WORD, Body, Metadata
from tandem.api.surface import Surface
from tandem.core.errors import InvalidRequest
from tandem.core.learning import CheckpointRecord, EventRecord, JobRecord, JobStatus
from tandem.services.jobs.service import JobAsk, Jobs
from tandem.services.versions.checkpoints import checkpoint_label

_LARGEST_PAGE = 100
_EVENT = "ftevent-"
_LEVELS = {"warning": "warn"}
_ENDED = (JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.CANCELLED)


class CreateJobRequest(Body):
    """Body of POST /v1/fine_tuning/jobs."""

    model: Annotated[str, Field(min_length=1, max_length=256)]
    training_file: Annotated[str, Field(min_length=1, max_length=128, pattern=WORD)]
    validation_file: Annotated[str, Field(min_length=1, max_length=128, pattern=WORD)] | None = None
    suffix: Annotated[str, Field(min_length=1, max_length=64, pattern=WORD)] | None = None
    seed: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    method: dict[str, Any] | None = None
    hyperparameters: dict[str, Any] | None = None
    metadata: Metadata | None = None
    integrations: Annotated[list[Any], Field(max_length=0)] | None = None


def add_fine_tuning_routes(app: FastAPI, surface: Surface) -> None:
    """Add /v1/fine_tuning/jobs."""
    _add_jobs(app, surface)
    _add_control(app, surface)


def _add_jobs(app: FastAPI, surface: Surface) -> None:
    @app.post("/v1/fine_tuning/jobs")
    async def create_job(request: Request) -> Response:
        """Create a fine-tuning job."""
        body = await read(CreateJobRequest, request, surface.bodies)
        ask = JobAsk(
            model=body.model,
            training_file=body.training_file,
            validation_file=body.validation_file or "",
            suffix=body.suffix or "",
            seed=body.seed,
            method=body.method,
            hyperparameters=body.hyperparameters,
            metadata=body.metadata,
        )
        return _job(surface, await _jobs(surface).create(ask, who_asks(request)))

    @app.get("/v1/fine_tuning/jobs")
    async def list_jobs(request: Request) -> Response:
        """List the caller's fine-tuning jobs, newest first."""
        limit = read_limit(request, 20, _LARGEST_PAGE)
        after = read_text(request, "after")
        found = await _jobs(surface).listed(who_asks(request).tenant, after, limit + 1)
        return as_json(page_json([_job_json(surface, job) for job in found], limit))

    @app.get("/v1/fine_tuning/jobs/{job_id}")
    async def retrieve_job(job_id: str, request: Request) -> Response:
        """Retrieve a fine-tuning job."""
        return _job(surface, await _jobs(surface).find(job_id, who_asks(request).tenant))

    @app.get("/v1/fine_tuning/jobs/{job_id}/events")
    async def list_job_events(job_id: str, request: Request) -> Response:
        """List a job's events, newest first."""
        limit = read_limit(request, 20, _LARGEST_PAGE)
        tenant = who_asks(request).tenant
        found = await _jobs(surface).events(job_id, tenant, _event_number(request), limit + 1)
        return as_json(page_json([_event_json(event) for event in found], limit))

    @app.get("/v1/fine_tuning/jobs/{job_id}/checkpoints")
    async def list_job_checkpoints(job_id: str, request: Request) -> Response:
        """List a job's checkpoints, newest first."""
        limit = read_limit(request, 10, _LARGEST_PAGE)
        tenant = who_asks(request).tenant
        jobs = _jobs(surface)
        job = await jobs.find(job_id, tenant)
        found = await jobs.checkpoints(job_id, tenant, read_text(request, "after"), limit + 1)
        shown = [_checkpoint_json(surface, job, record) for record in found]
        return as_json(page_json(shown, limit))


def _add_control(app: FastAPI, surface: Surface) -> None:
    @app.post("/v1/fine_tuning/jobs/{job_id}/cancel")
    async def cancel_job(job_id: str, request: Request) -> Response:
        """Cancel a job."""
        return _job(surface, await _jobs(surface).cancel(job_id, who_asks(request).tenant))

    @app.post("/v1/fine_tuning/jobs/{job_id}/pause")
    async def pause_job(job_id: str, request: Request) -> Response:
        """Pause a job after its current step."""
        return _job(surface, await _jobs(surface).pause(job_id, who_asks(request).tenant))

    @app.post("/v1/fine_tuning/jobs/{job_id}/resume")
    async def resume_job(job_id: str, request: Request) -> Response:
        """Resume a paused job."""
        return _job(surface, await _jobs(surface).resume(job_id, who_asks(request).tenant))


def _jobs(surface: Surface) -> Jobs:
    if surface.jobs is None:
        raise InvalidRequest("learning is off on this server (--learning)")
    return surface.jobs


def _event_number(request: Request) -> int | None:
    """The number in `after`, an event's id. Raises `InvalidRequest`."""
    after = read_text(request, "after")
    if after is None:
        return None
    number = parse_number(after.removeprefix(_EVENT))
    if number is None:
        raise InvalidRequest("'after' must be the id of an event", param="after")
    return number


def _job(surface: Surface, job: JobRecord) -> Response:
    return as_json(_job_json(surface, job))


def _job_json(surface: Surface, job: JobRecord) -> dict[str, Any]:
    kind = job.method["type"]
    succeeded = job.status is JobStatus.SUCCEEDED
    ended = job.status in _ENDED
    return {
        "object": "fine_tuning.job",
        "id": job.job_id,
        "created_at": int(job.created_s),
        "error": job.error or None,
        "fine_tuned_model": surface.models.id_of(job.adapter) if succeeded else None,
        "finished_at": None if job.finished_s is None else int(job.finished_s),
        "hyperparameters": job.method[kind]["hyperparameters"],
        "model": job.model,
        "organization_id": "tandem",
        "result_files": list(job.result_files),
        "seed": job.seed,
        "status": job.status.value,
        "step": job.step,
        "total_steps": job.total_steps or None,
        "trained_tokens": job.trained_tokens if ended else None,
        "training_file": job.training_file,
        "validation_file": job.validation_file or None,
        "estimated_finish": None,
        "integrations": [],
        "metadata": job.metadata,
        "method": job.method,
        "user_provided_suffix": job.suffix or None,
    }


def _event_json(event: EventRecord) -> dict[str, Any]:
    data = dict(event.data)
    return {
        "object": "fine_tuning.job.event",
        "id": f"{_EVENT}{event.number}",
        "created_at": int(event.created_s),
        "level": _LEVELS.get(event.level, event.level),
        "message": event.message,
        "type": data.pop("type", "message"),
        "data": data,
    }


def _checkpoint_json(surface: Surface, job: JobRecord, record: CheckpointRecord) -> dict[str, Any]:
    label, metrics = checkpoint_label(job.adapter, job.job_id, record.step), dict(record.metrics)
    shown = {
        "step": record.step,
        "train_loss": metrics.get("train_loss"),
        "full_valid_loss": metrics.get("valid_loss"),
        "valid_loss": metrics.get("valid_loss"),
    }
    return {
        "object": "fine_tuning.job.checkpoint",
        "id": record.checkpoint_id,
        "created_at": int(record.created_s),
        "fine_tuned_model_checkpoint": surface.models.id_of(label),
        "fine_tuning_job_id": record.job_id,
        "metrics": {name: value for name, value in shown.items() if value is not None},
        "step_number": record.step,
    }
