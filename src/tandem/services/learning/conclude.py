"""How training ends, whoever trained: the trainer's state becomes a candidate, is measured, and is
published, refused or kept for a decision.

Feedback and fine-tuning jobs come here with their own samples, numbers and words. Knows no job and
no block of samples. Invariant: a candidate that was not measured to the end leaves nothing behind.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from tandem.core.learning import Sample, VersionRecord
from tandem.core.version import AdapterVersion
from tandem.services.learning.gate import Outcome, Verdict
from tandem.services.learning.measure import Candidate
from tandem.services.learning.publish import Conclusion, candidate_name, remove_tree
from tandem.services.learning.settings import LearningSettings
from tandem.services.learning.tools import LearningTools
from tandem.services.tasks import uninterrupted

WORDS = {
    Outcome.PUBLISH: ("info", "published"),
    Outcome.HOLD: ("info", "waits for a decision"),
    Outcome.REFUSE: ("warning", "refused"),
}
"""How an outcome is told: the event's level, and a word."""
_COUNTED = {Outcome.PUBLISH: "published", Outcome.HOLD: "held", Outcome.REFUSE: "refused"}


class Concluder:
    """The end of training of `adapter`, whose parameters are those of `trainer`."""

    def __init__(self, adapter: str, trainer: str, tools: LearningTools) -> None:
        self._adapter = adapter
        self._trainer = trainer
        self._tools = tools

    async def examine(
        self,
        aside: Path,
        settings: LearningSettings,
        taught: Sequence[Sample],
        keys: Sequence[str] = (),
    ) -> tuple[AdapterVersion, Verdict]:
        """Write the parameters to `aside`, load them as the candidate, and measure it.

        `keys` are those that sent `taught`. Where this raises, `aside` and the candidate are gone.
        """
        name, tools = candidate_name(self._adapter), self._tools
        try:
            # Given up half way, the engine would still write, and then load what nobody knows of.
            staged = await uninterrupted(tools.client.stage(self._trainer, name, str(aside)))
            candidate = Candidate(self._adapter, staged, taught, keys)
            encoder = tools.encoder(settings)
            return staged, await tools.examiner.examine(candidate, settings, encoder)
        except BaseException:
            await asyncio.to_thread(remove_tree, aside)
            await tools.publisher.forget(name)
            raise

    async def settle(
        self, conclusion: Conclusion, outcome: Outcome, stored_s: Sequence[float] = ()
    ) -> VersionRecord:
        """Let the outcome come true; the version as it is then. `stored_s` are the times at which
        the samples came that the version used first."""
        publisher, metrics, record = self._tools.publisher, self._tools.metrics, conclusion.record
        if outcome is Outcome.PUBLISH:
            self._tools.freshness.published(record, stored_s)  # before it answers
            version = await publisher.publish(conclusion)
            metrics.version.labels(record.adapter).set(record.number)
        elif outcome is Outcome.REFUSE:
            version = await publisher.refuse(conclusion)
        else:
            version = await publisher.hold(conclusion)
        metrics.versions.labels(record.adapter, _COUNTED[outcome]).inc()
        return version
