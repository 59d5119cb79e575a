"""Fine-tuning jobs and their checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import sqlalchemy as sa

from tandem.core.learning import CheckpointRecord, JobRecord, JobStatus
from tandem.store.paths import from_kept, to_kept, without_directory
from tandem.store.session import Connection
from tandem.store.tables import CHECKPOINTS, JOBS

_UNFINISHED = (JobStatus.VALIDATING, JobStatus.QUEUED, JobStatus.RUNNING, JobStatus.PAUSED)


def add(connection: Connection, job: JobRecord) -> None:
    """Keep a new job."""
    connection.execute(sa.insert(JOBS), _row(connection, job))


def update(connection: Connection, job: JobRecord) -> bool:
    """Replace the row of a job. False if there is none with this id."""
    changed = sa.update(JOBS).where(JOBS.c.job_id == job.job_id).values(_row(connection, job))
    return connection.execute(changed).rowcount > 0


def find(connection: Connection, job_id: str) -> JobRecord | None:
    """The job with this id, or None."""
    row = connection.execute(sa.select(JOBS).where(JOBS.c.job_id == job_id)).mappings().first()
    return None if row is None else from_kept(connection, JobRecord, row)


def listed(
    connection: Connection, tenant: str, *, after: str | None = None, limit: int = 20
) -> list[JobRecord]:
    """Jobs of a tenant, newest first, older than job `after`."""
    query = sa.select(JOBS).where(JOBS.c.tenant == tenant)
    if after is not None:
        last = sa.select(JOBS.c.row).where(JOBS.c.job_id == after).scalar_subquery()
        query = query.where(JOBS.c.row < last)
    rows = connection.execute(query.order_by(JOBS.c.row.desc()).limit(limit)).mappings()
    return [from_kept(connection, JobRecord, row) for row in rows]


def in_status(connection: Connection, statuses: Sequence[JobStatus]) -> list[JobRecord]:
    """Jobs of all tenants in one of `statuses`, oldest first."""
    query = sa.select(JOBS).where(JOBS.c.status.in_([status.value for status in statuses]))
    rows = connection.execute(query.order_by(JOBS.c.row)).mappings()
    return [from_kept(connection, JobRecord, row) for row in rows]


def under_way(connection: Connection, adapter: str) -> list[JobRecord]:
    """Jobs that train this adapter now, or will continue to when it is their turn."""
    statuses = (JobStatus.QUEUED, JobStatus.RUNNING)
    return [
        job
        for job in in_status(connection, statuses)
        if job.adapter == adapter and (job.status is JobStatus.RUNNING or job.checkpoint_path)
    ]


def reading(connection: Connection, file_id: str) -> str | None:
    """A job that has not ended and is given this file: it reads it again after an interruption."""
    for job in in_status(connection, _UNFINISHED):
        if file_id in (job.training_file, job.validation_file):
            return job.job_id
    return None


def referring(connection: Connection, adapter: str, number: int) -> list[str]:
    """Ids of unfinished jobs whose reference is this version of their adapter."""
    found = []
    for job in in_status(connection, _UNFINISHED):
        given = job.method[job.method["type"]]["hyperparameters"]
        if job.adapter == adapter and given.get("reference") == f"version:{number}":
            found.append(job.job_id)
    return found


def add_checkpoint(connection: Connection, checkpoint: CheckpointRecord) -> None:
    """Keep a checkpoint. Its files are already on disk."""
    connection.execute(sa.insert(CHECKPOINTS), to_kept(connection, checkpoint))


def checkpoint_of(
    connection: Connection, tenant: str, adapter: str, ending: str, step: int
) -> CheckpointRecord | None:
    """The checkpoint at `step` of a tenant's job on `adapter` whose id ends with `ending`."""
    query = (
        sa.select(CHECKPOINTS)
        .join(JOBS, JOBS.c.job_id == CHECKPOINTS.c.job_id)
        .where(JOBS.c.tenant == tenant, JOBS.c.adapter == adapter)
        .where(JOBS.c.job_id.endswith(ending), CHECKPOINTS.c.step == step)
        .order_by(CHECKPOINTS.c.row.desc())
    )
    row = connection.execute(query).mappings().first()
    return None if row is None else from_kept(connection, CheckpointRecord, row)


def forget_checkpoints(connection: Connection, adapter: str) -> list[str]:
    """Forget the checkpoints of all jobs on an adapter.

    Returns directories to remove. Directories from which jobs will continue are not among them.
    """
    query = sa.select(JOBS).where(JOBS.c.adapter == adapter)
    unneeded = []
    for row in connection.execute(query).mappings().all():
        job = from_kept(connection, JobRecord, row)
        paths = {record.path for record in checkpoints(connection, job.job_id)}
        if job.finished_s is None:
            paths.discard(job.checkpoint_path)
        elif job.checkpoint_path:  # it may have ended in the middle of an epoch
            paths.add(job.checkpoint_path)
            update(connection, replace(job, checkpoint_path=""))
        unneeded += sorted(paths)
        connection.execute(sa.delete(CHECKPOINTS).where(CHECKPOINTS.c.job_id == job.job_id))
    return unneeded


def directories(connection: Connection) -> set[str]:
    """Directories that jobs have committed: where they continue, and checkpoints."""
    found = set()
    for row in connection.execute(sa.select(JOBS)).mappings().all():
        found.add(from_kept(connection, JobRecord, row).checkpoint_path)
    for row in connection.execute(sa.select(CHECKPOINTS)).mappings().all():
        found.add(from_kept(connection, CheckpointRecord, row).path)
    return found


def checkpoints(
    connection: Connection, job_id: str, *, after: str | None = None, limit: int = 10_000
) -> list[CheckpointRecord]:
    """Checkpoints of a job, newest first, older than checkpoint `after`."""
    query = sa.select(CHECKPOINTS).where(CHECKPOINTS.c.job_id == job_id)
    if after is not None:
        last = (
            sa.select(CHECKPOINTS.c.row)
            .where(CHECKPOINTS.c.checkpoint_id == after)
            .scalar_subquery()
        )
        query = query.where(CHECKPOINTS.c.row < last)
    rows = connection.execute(query.order_by(CHECKPOINTS.c.row.desc()).limit(limit)).mappings()
    return [from_kept(connection, CheckpointRecord, row) for row in rows]


def _row(connection: Connection, job: JobRecord) -> dict[str, Any]:
    """The row of a job. Its error must not tell clients where the directory is."""
    row = to_kept(connection, job)
    row["error"] = {
        name: without_directory(connection, said) if isinstance(said, str) else said
        for name, said in row["error"].items()
    }
    return row
