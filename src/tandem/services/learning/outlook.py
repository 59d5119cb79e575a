"""What becomes of feedback, for whoever sent it: learned from soon, later, or not at all.

Looks at samples, places and whoever comes first. Knows no HTTP. Invariant: it promises nothing; it
says what would keep the next version from learning, as far as that is known now.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from tandem.core.learning import Sample, SampleKind, SampleState, Split, VersionState
from tandem.services.learning.learner import Learner
from tandem.services.learning.publish import NoRoom
from tandem.services.learning.selection import candidates, ready_in_s, why_none
from tandem.services.learning.settings import LearningSettings, resolve_settings
from tandem.services.learning.tools import LearningTools
from tandem.store import Connection, adapters
from tandem.store.samples import SampleHead, heads, more_dislikes

# Samples that wait longest, among which the next version is foreseen: looked at for each feedback.
_FORESEEN = 256
_WAITING = (SampleState.ACCEPTED, SampleState.ASSIGNED)


class Prospect(StrEnum):
    """What becomes of it."""

    QUEUED = "queued"
    TRAINING = "training"
    WAITS = "waits"
    HELD_OUT = "held_out"
    LEARNED = "learned"
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class NextVersion:
    """The version that will learn from a feedback, as far as it can be foreseen."""

    samples: int  # that it would learn from now
    enough: int  # so many need not wait long for others
    most: int  # so many need not wait at all
    starts_in_s: float  # if nothing else comes; 0: it has begun, or is about to
    takes_s: float | None  # as long as the last one took, from then on; None: there was none


@dataclass(frozen=True, slots=True)
class Outlook:
    """What becomes of feedback, and why it has to wait or is not learned from (empty: a version is
    made as soon as there are enough samples or time has passed, see `selection.ready_in_s`)."""

    prospect: Prospect
    note: str = ""
    next: NextVersion | None = None


class Outlooks:
    """For all adapters."""

    def __init__(self, tools: LearningTools, learner: Learner) -> None:
        self._tools = tools
        self._learner = learner

    async def of(self, adapter: str, samples: Sequence[Sample]) -> Outlook:
        """What becomes of the samples of one feedback. Raises `StoreError`."""
        left = {(sample.split, sample.state) for sample in samples}
        if (Split.TRAIN, SampleState.ASSIGNED) in left:
            if await self._tools.others_first(adapter):
                return Outlook(
                    Prospect.WAITS, "a version that learned from it waits for a decision"
                )
            return Outlook(Prospect.TRAINING, next=await self._under_way(adapter))
        if (Split.TRAIN, SampleState.ACCEPTED) in left:
            found = await self._found(adapter)
            if why := await self._wait(adapter, samples, found):
                return Outlook(Prospect.WAITS, why)
            return Outlook(Prospect.QUEUED, next=self._next(adapter, samples, found))
        if any(state in _WAITING for _, state in left):
            return Outlook(Prospect.HELD_OUT, "versions are measured on it, and not trained on it")
        if not samples:
            return Outlook(Prospect.NOTHING, "it says neither what is good nor what is bad")
        for sample in samples:
            if sample.state is SampleState.CONSUMED:
                return Outlook(Prospect.LEARNED, f"version {sample.version} learned from it")
        why = samples[0].problem or await self._refused(adapter, samples[0].version)
        return Outlook(Prospect.NOTHING, why)

    async def _refused(self, adapter: str, number: int | None) -> str:
        """What became of the version that learned from refused samples."""
        version = await self._tools.store.read(adapters.version, adapter, number or 0)
        if version is None:
            return f"version {number} learned from it and is gone"
        rolled_back = version.state is VersionState.PUBLISHED
        ended = "was rolled back by itself" if rolled_back else "was refused"
        return f"version {number} learned from it and {ended}"

    async def _under_way(self, adapter: str) -> NextVersion:
        """The version that is being made."""
        assigned = await self._tools.store.read(
            heads, adapter, SampleState.ASSIGNED, limit=_FORESEEN
        )
        count = len(assigned)
        return NextVersion(count, count, count, 0.0, self._learner.took_s(adapter))

    async def _found(self, adapter: str) -> _Found:
        """What waits with these samples."""
        tools, now_s = self._tools, self._tools.now()
        settings, accepted, replays = await tools.store.read(_accepted, adapter, tools.defaults)
        most = settings.version_samples(replaying=replays)
        return _Found(settings, most, now_s, candidates(accepted, most, settings, now_s))

    def _next(self, adapter: str, samples: Sequence[Sample], found: _Found) -> NextVersion | None:
        """The version that will learn from these; None while nobody can tell when."""
        own, settings = {sample.sample_id for sample in samples}, found.settings
        for group in found.versions:
            if any(head.sample_id in own for head in group):
                starts_in_s = ready_in_s(group, found.most, settings, found.now_s)
                took_s, enough = self._learner.took_s(adapter), settings.batch_samples
                return NextVersion(len(group), enough, found.most, starts_in_s, took_s)
        return None

    async def _wait(self, adapter: str, samples: Sequence[Sample], found: _Found) -> str:
        """Why accepted samples are not learned from; empty if they are."""
        if not self._tools.trains:
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
        dislikes = [s.sample_id for s in samples if s.kind is SampleKind.KTO and not s.desirable]
        waits = bool(dislikes) and await self._tools.store.read(more_dislikes, dislikes)
        if waits:
            return "dislikes are learned from together with as many answers that are rated up"
        # No group at all: it has just been taken.
        nothing = bool(found.versions) and not any(found.versions)
        return why_none(found.versions, found.settings) if nothing else ""


@dataclass(frozen=True, slots=True)
class _Found:
    """What versions could be made now of all that waits, of `most` samples each."""

    settings: LearningSettings
    most: int
    now_s: float
    versions: list[list[SampleHead]]


def _accepted(
    connection: Connection, adapter: str, defaults: LearningSettings
) -> tuple[LearningSettings, list[SampleHead], bool]:
    """An adapter's settings, samples that wait longest, and whether it has learned any before."""
    record = adapters.find(connection, adapter)
    settings = resolve_settings(defaults, {} if record is None else record.settings)
    waiting = heads(connection, adapter, limit=_FORESEEN, fair=settings.key_share < 1.0)
    return settings, waiting, bool(heads(connection, adapter, SampleState.CONSUMED, limit=1))
