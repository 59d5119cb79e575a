"""What the parts of a job share: the tools they work with, and the error that ends a job.

Knows no job. Invariant: what ends a job with a `JobFailed` is the job's fault, not the server's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tandem.core.errors import TandemError
from tandem.services.learning.learner import Learner
from tandem.services.learning.publish import nothing
from tandem.services.learning.tools import LearningTools


class JobFailed(TandemError):
    """The job cannot go on; `code` and `param` are for its `error` object."""

    def __init__(self, message: str, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


@dataclass(frozen=True, slots=True)
class JobTools:
    """What all jobs work with. `directory` is the store's; `trains` is False where the policy never
    lets a step begin; `at` is called at points where tests may end the process."""

    course: LearningTools
    learner: Learner
    directory: Path
    announce: Callable[[str], None]
    trains: bool = True
    at: Callable[[str], None] = nothing
