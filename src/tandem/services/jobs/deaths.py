"""How often the engine may end or fail under one job.

Knows no job's work. Invariant: a job whose own steps end the engine ends, and until then it ends it
less and less often.
"""

from __future__ import annotations

from tandem.core.errors import EngineDead, NoMemory, OutOfMemory, TandemError, TrainingCancelled
from tandem.core.ports import ServingEngine
from tandem.services.jobs.tools import JobFailed
from tandem.services.learning.publish import engine_ready
from tandem.services.tasks import Backoff

SHORTAGES = (NoMemory, OutOfMemory)
"""After these a job waits, however often: they say nothing against it."""

# More than one line of a batch may cause.
_MOST = 20


def going_on(error: TandemError) -> str:
    """What is said of the engine's end, or of what it could not do, after which a job goes on from
    its last commit. Raises any other error."""
    interrupted = isinstance(error, EngineDead | TrainingCancelled)
    if not interrupted and type(error) is not TandemError:
        raise error
    word = "Interrupted" if interrupted else "Failed"
    return f"{word}: {error}; going on from the last commit"


class Deaths:
    """The engine's ends and failures since the last commit of one job."""

    def __init__(self, client: ServingEngine) -> None:
        self._client = client
        self._step = -1
        self._number = 0
        self._backoff = Backoff()

    async def outlive(self, error: TandemError, step: int) -> None:
        """Wait for the engine after an interruption; the last commit is that of `step`. After a
        death or failure longer each time; the twentieth one without a commit raises `JobFailed`.
        Cancelled steps do not count."""
        if step > self._step:
            self._step, self._number = step, 0
            self._backoff.reset()
        if not isinstance(error, TrainingCancelled):
            self._number += 1
            if self._number >= _MOST:
                did = "ended" if isinstance(error, EngineDead) else "failed"
                told = f"the engine {did} {_MOST} times in a row after step {step} of this job"
                raise JobFailed(f"{told}, the last time: {error}", "training_failed")
            await self._backoff.wait()
        await engine_ready(self._client)
