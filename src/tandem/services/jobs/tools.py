"""What the parts of a job share: the tools they work with, and the error that ends a job.

Knows no job. Invariant: what ends a job with a `JobFailed` is the job's fault, not the server's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tandem.core.errors import TandemError
from tandem.core.learning import AdapterRecord, JobRecord
from tandem.services.learning.learner import Learner
from tandem.services.learning.publish import nothing
from tandem.services.learning.tools import LearningTools


class JobFailed(TandemError):
    """The job cannot go on; `code` and `param` are for its `error` object."""

    def __init__(self, message: str, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


def departure(job: JobRecord, adapter: AdapterRecord | None) -> str | None:
    """Why a job that has begun cannot go on: somebody changed what its adapter answers with.

    Its version would take that out of service again, and its parent would not be what it says.
    """
    current = 0 if adapter is None else adapter.current
    if job.start_version is None or job.start_version == current:
        return None
    kept = ""
    if job.checkpoint_path:
        place = f"jobs/{job.job_id}/{Path(job.checkpoint_path).name}"
        kept = f"; what it learned in {job.step} steps is in {place} below the store's directory"
    if adapter is None:
        return f"'{job.adapter}' was deleted since the job began{kept}: start a new job"
    return (
        f"'{job.adapter}' went from version {job.start_version} to {current} since the job began"
        f"{kept}: start a new job, which goes on from version {current}, or publish version "
        f"{job.start_version} again before you resume this one"
    )


@dataclass(frozen=True, slots=True)
class JobTools:
    """What all jobs work with. `directory` is the store's; `at` is called at points where tests may
    end the process."""

    course: LearningTools
    learner: Learner
    directory: Path
    announce: Callable[[str], None]
    at: Callable[[str], None] = nothing
