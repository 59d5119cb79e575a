"""What becomes of feedback, for whoever sent it: learned from soon, later, or not at all.

Looks at samples, places and whoever comes first. Knows no HTTP. Invariant: it promises nothing; it
says what would keep the next version from learning, as far as that is known now.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from tandem.core.learning import Sample, SampleKind, SampleState, Split
from tandem.services.learning.learner import Learner
from tandem.services.learning.publish import NoRoom
from tandem.services.learning.selection import groups
from tandem.services.learning.tools import LearningTools
from tandem.store.samples import heads


class Prospect(StrEnum):
    """What becomes of it."""

    QUEUED = "queued"
    WAITS = "waits"
    HELD_OUT = "held_out"
    LEARNED = "learned"
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class Outlook:
    """What becomes of feedback, and why it has to wait or is not learned from (empty: a version is
    made as soon as there are enough samples or time has passed, see `selection.is_ready`)."""

    prospect: Prospect
    note: str = ""


class Outlooks:
    """For all adapters. `trains` is false under a policy that never trains."""

    def __init__(self, tools: LearningTools, learner: Learner, *, trains: bool) -> None:
        self._tools = tools
        self._learner = learner
        self._trains = trains

    async def of(self, adapter: str, samples: Sequence[Sample]) -> Outlook:
        """What becomes of the samples of one feedback. Raises `StoreError`."""
        waiting = (SampleState.ACCEPTED, SampleState.ASSIGNED)
        left = {sample.split for sample in samples if sample.state in waiting}
        if Split.TRAIN in left:
            why = await self._wait(adapter, samples)
            return Outlook(Prospect.WAITS, why) if why else Outlook(Prospect.QUEUED)
        if left:
            return Outlook(Prospect.HELD_OUT, "versions are measured on it, and not trained on it")
        if not samples:
            return Outlook(Prospect.NOTHING, "it says neither what is good nor what is bad")
        for sample in samples:
            if sample.state is SampleState.CONSUMED:
                return Outlook(Prospect.LEARNED, f"version {sample.version} learned from it")
        refused = f"version {samples[0].version} learned from it and was refused"
        return Outlook(Prospect.NOTHING, samples[0].problem or refused)

    async def _wait(self, adapter: str, samples: Sequence[Sample]) -> str:
        """Why accepted samples are not learned from; empty if they are."""
        if not self._trains:
            return "nothing is trained under this server's policy"
        try:
            self._tools.publisher.require_room(adapter, self._learner.ahead_of(adapter))
        except NoRoom as error:
            return f"{error}. It is kept, and learned from when a place is free"
        if await self._tools.others_first(adapter):
            return (
                f"a fine-tuning job trains '{adapter}', or a version of it waits for a decision; "
                "it is learned from after that"
            )
        dislikes = any(s.kind is SampleKind.KTO and not s.desirable for s in samples)
        if dislikes and not groups(await self._tools.store.read(heads, adapter)):
            return "dislikes are learned from together with as many answers that are rated up"
        return ""
