"""How often the engine may end under one job.

Knows no job's work. Invariant: a job whose own steps end the engine ends, and until then it ends it
less and less often.
"""

from __future__ import annotations

from tandem.core.errors import EngineDead, TrainingCancelled
from tandem.core.ports import ServingEngine
from tandem.services.jobs.tools import JobFailed
from tandem.services.learning.publish import engine_ready
from tandem.services.tasks import Backoff

# More than one line of a batch may cause.
_MOST = 20


class Deaths:
    """The engine's ends since the last commit of one job."""

    def __init__(self, client: ServingEngine) -> None:
        self._client = client
        self._step = -1
        self._number = 0
        self._backoff = Backoff()

    async def outlive(self, error: EngineDead | TrainingCancelled, step: int) -> None:
        """Wait for the engine after an interruption; the last commit is that of `step`. After a
        death longer each time; the twentieth one without a commit raises `JobFailed`."""
        if step > self._step:
            self._step, self._number = step, 0
            self._backoff.reset()
        if isinstance(error, EngineDead):
            self._number += 1
            if self._number >= _MOST:
                told = f"the engine ended {_MOST} times in a row after step {step} of this job"
                raise JobFailed(f"{told}, the last time: {error}", "training_failed")
            await self._backoff.wait()
        await engine_ready(self._client)
