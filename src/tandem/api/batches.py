"""Routes of OpenAI's batch API: create, list, retrieve, cancel.

Knows how a batch looks from outside, not how it is worked on. Invariant: a key sees its own batches
only.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from tandem.api.connection import as_json, read, who_asks
from tandem.api.files import LEAST_KEPT_S, MOST_KEPT_S
from tandem.api.paging import page_json, read_limit, read_text
from tandem.api.schemas import WORD, Body, Metadata
from tandem.api.surface import Surface
from tandem.core.batches import BatchError, BatchRecord, BatchStatus
from tandem.services.batches.service import BatchAsk

_MOST = 100
# OpenAI's name of the time at which a status began.
_STAMPS = {
    BatchStatus.IN_PROGRESS: "in_progress_at",
    BatchStatus.FINALIZING: "finalizing_at",
    BatchStatus.COMPLETED: "completed_at",
    BatchStatus.FAILED: "failed_at",
    BatchStatus.EXPIRED: "expired_at",
    BatchStatus.CANCELLING: "cancelling_at",
    BatchStatus.CANCELLED: "cancelled_at",
}


class ExpiresAfter(BaseModel):
    """When output files are removed."""

    model_config = ConfigDict(strict=True, extra="forbid")

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=LEAST_KEPT_S, le=MOST_KEPT_S)]


class CreateBatchRequest(Body):
    """Body of POST /v1/batches. `adapter_version` is ours: whether the version of the adapter that
    is current at the beginning answers all lines, or each time the newest."""

    input_file_id: Annotated[str, Field(min_length=1, max_length=128, pattern=WORD)]
    endpoint: Annotated[str, Field(min_length=1, max_length=128)]
    completion_window: Annotated[str, Field(min_length=1, max_length=16)]
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None
    adapter_version: Literal["pinned", "newest"] | None = None


def add_batch_routes(app: FastAPI, surface: Surface) -> None:
    """Add /v1/batches."""

    @app.post("/v1/batches")
    async def create_batch(request: Request) -> Response:
        """Answer the requests of an uploaded file when there is room."""
        body = await read(CreateBatchRequest, request, surface.bodies)
        kept = body.output_expires_after
        ask = BatchAsk(
            input_file=body.input_file_id,
            endpoint=body.endpoint,
            completion_window=body.completion_window,
            metadata=body.metadata,
            output_kept_s=None if kept is None else float(kept.seconds),
            newest=body.adapter_version == "newest",
        )
        return as_json(_batch_json(await surface.batches.create(ask, who_asks(request))))

    @app.get("/v1/batches")
    async def list_batches(request: Request) -> Response:
        """Batches of this key, newest first."""
        limit = read_limit(request, 20, _MOST)
        after = read_text(request, "after")
        found = await surface.batches.listed(who_asks(request).tenant, after, limit + 1)
        return as_json(page_json([_batch_json(batch) for batch in found], limit))

    @app.get("/v1/batches/{batch_id}")
    async def retrieve_batch(batch_id: str, request: Request) -> Response:
        """One of them."""
        return as_json(_batch_json(await surface.batches.find(batch_id, who_asks(request).tenant)))

    @app.post("/v1/batches/{batch_id}/cancel")
    async def cancel_batch(batch_id: str, request: Request) -> Response:
        """Give it up; what was answered is kept."""
        tenant = who_asks(request).tenant
        return as_json(_batch_json(await surface.batches.cancel(batch_id, tenant)))


def _batch_json(batch: BatchRecord) -> dict[str, Any]:
    # Files are named before they are written.
    there = batch.status.ended
    stamps = {name: _whole(batch.stamps.get(status.value)) for status, name in _STAMPS.items()}
    return {
        "id": batch.batch_id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": batch.model or None,
        "errors": _errors_json(batch),
        "input_file_id": batch.input_file,
        "completion_window": batch.completion_window,
        "status": batch.status.value,
        "output_file_id": (batch.output_file or None) if there else None,
        "error_file_id": (batch.error_file or None) if there else None,
        "created_at": int(batch.created_s),
        "expires_at": int(batch.expires_s),
        **stamps,
        "request_counts": {
            "total": batch.total,
            "completed": batch.completed,
            "failed": batch.failed,
        },
        "usage": {
            "input_tokens": batch.input_tokens,
            "input_tokens_details": {"cached_tokens": batch.cached_tokens},
            "output_tokens": batch.output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": batch.input_tokens + batch.output_tokens,
        },
        "metadata": batch.metadata or None,
    }


def _errors_json(batch: BatchRecord) -> dict[str, Any] | None:
    if not batch.errors:
        return None
    return {"object": "list", "data": [_error_json(error) for error in batch.errors]}


def _error_json(error: BatchError) -> dict[str, Any]:
    return {
        "code": error.code,
        "message": error.message,
        "line": error.line,
        "param": error.param,
    }


def _whole(seconds: float | None) -> int | None:
    return None if seconds is None else int(seconds)
