"""Watches what was published: a version whose live answers break, or whose thumbs fall, is rolled
back by itself.

Looks at one version at a time, beside the answers; no other waits while the base is asked about
broken ones. Only versions that the gate alone has published are watched (`VersionRecord.watched`);
a person's decision stands. Invariant: a version is rolled back only while it is current and
watched, which the transaction that does it looks up.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from math import comb

from tandem.adapters.files import holds
from tandem.core.learning import AdapterRecord, EventRecord, VersionRecord
from tandem.core.slo import WorkClass
from tandem.services.answering.models import BASE_LABEL
from tandem.services.feedback.signals import EXPLICIT
from tandem.services.learning.answer_faults import AnswerText, fault_alone
from tandem.services.learning.answers import Speechless, spoken
from tandem.services.learning.learner import Learner
from tandem.services.learning.live import Broken
from tandem.services.learning.selection import most_shared, shared
from tandem.services.learning.settings import resolve_settings
from tandem.services.learning.tools import LearningTools
from tandem.services.tasks import together, uninterrupted
from tandem.services.versions import changes
from tandem.store import Connection, adapters, feedback
from tandem.store.feedback import Thumb

logger = logging.getLogger(__name__)

LOOKS = (8, 16, 32, 64, 128, 256)
"""At how many ratings of a version they are compared with those of the version before."""

_CONFIDENCE = 0.95
_FEEDBACK_READ = 20_000
_ASKED_AT_ONCE = 10
_ASK_EVERY_S = 60.0


class Watch:
    """The watch over all adapters. `start` and `stop` run in the server's event loop."""

    def __init__(self, tools: LearningTools, learner: Learner) -> None:
        self._tools = tools
        self._learner = learner
        self._live = tools.live
        self._asked_s: dict[str, float] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._places = asyncio.Semaphore(_ASKED_AT_ONCE)
        self._numbers = itertools.count(1)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to watch."""
        self._task = asyncio.create_task(self._run(), name="watch")

    async def stop(self) -> None:
        """End it. A roll back for broken answers that has begun is finished first; one for ratings
        that is committed is adopted at the next start."""
        if self._task is not None:
            tasks = (self._task, *self._asking.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._task = None

    async def _run(self) -> None:
        while True:
            label = await self._live.suspect()
            async with _tried(label):
                await self._look(label)

    async def _look(self, label: str) -> None:
        """At a version's ratings, and beside that at its answers: the base may take its time."""
        name, _, number = label.rpartition("@")
        read = self._tools.store.read
        asking = self._asking.get(label)
        found = await read(_watched, name, int(number))
        if found is None:
            if asking is not None:
                asking.cancel()
            self._forget(label)
            return
        record, version = found
        both = (label, _label(version, version.parent))
        ratings = await read(feedback.ratings, name, EXPLICIT, both, _FEEDBACK_READ)
        share = resolve_settings(self._tools.defaults, record.settings).key_share
        why = fallen(version, ratings, share)
        if why is not None:
            if asking is not None:  # a late answer would interrupt what goes on from the parent
                asking.cancel()
            await self._roll_back(version, why)
        elif asking is None:
            task = asyncio.create_task(self._ask(version, label), name=f"watch {label}")
            self._asking[label] = task

    async def _ask(self, version: VersionRecord, label: str) -> None:
        try:
            async with _tried(label):
                why = await self._broken(label)
                if why is not None:  # a roll back that is committed is adopted, too
                    await uninterrupted(self._roll_back(version, why))
        finally:
            del self._asking[label]

    def _forget(self, label: str) -> None:
        self._live.forget(label)
        self._asked_s.pop(label, None)

    async def _roll_back(self, version: VersionRecord, why: str) -> None:
        name = version.adapter
        event = EventRecord(name, self._tools.now(), "warning", why)
        async with self._learner.held(name):
            work, target = changes.roll_back_watched, await self._target(version)
            reached = await self._tools.store.write(work, name, version.number, target, event)
            if reached is not None:
                await self._tools.rolled_back(name, *reached)
        self._forget(_label(version, version.number))

    async def _target(self, version: VersionRecord) -> int:
        """The nearest version before it whose files are as they were; 0 for the base."""
        number = version.parent
        while number:
            before = await self._tools.store.read(adapters.version, version.adapter, number)
            if before is None:
                return 0
            if await asyncio.to_thread(holds, before.path, before.content_hash):
                return number
            number = before.parent
        return 0

    # -------------------------------------------------------------------- answers

    async def _broken(self, label: str) -> str | None:
        """Why a version's last answers say that it is broken; None if they do not.

        The base model is asked the same as the broken ones. What it answers as badly is not held
        against the version: its clients ask for it.
        """
        live = self._live.window(label)
        window = live.copy()  # of a busy version the live one has moved on before the base answers
        if not window.too_many(window.broken):
            return None
        now_s = self._tools.now()  # of a clock that may be set back
        if abs(now_s - self._asked_s.get(label, float("-inf"))) < _ASK_EVERY_S:
            return None
        self._asked_s[label] = now_s
        doubtful = [each for each in window.broken if not each.confirmed][-_ASKED_AT_ONCE:]
        own = await together(self._base_answer(each) for each in doubtful)
        for each, answer in zip(doubtful, own, strict=True):
            if answer is not None and fault_alone(answer) is None:
                each.confirmed = True
            else:
                window.excuse(each)
                live.excuse(each)
        confirmed = [each for each in window.broken if each.confirmed]
        if not window.too_many(confirmed):
            return None
        [(fault, _)] = Counter(each.fault for each in confirmed).most_common(1)
        return f"{len(confirmed)} of its last {len(window)} answers were broken ({fault})"

    async def _base_answer(self, broken: Broken) -> AnswerText | None:
        """What the base model says where a version's answer is broken, at most as long; None if it
        cannot answer either."""
        asked = broken.request
        sampling = replace(
            asked.sampling, max_tokens=max(1, broken.tokens), logprobs=None, prompt_logprobs=None
        )
        request = replace(
            asked,
            request_id=f"watch-{next(self._numbers)}",
            sampling=sampling,
            n=1,
            adapter=None,
            work_class=WorkClass.OFFLINE,
            slo=None,
            arrival_s=0.0,
        )
        try:
            async with self._places:
                tokens = await spoken(self._tools.client, request)
        except Speechless:
            return None
        encoder = self._tools.encoder(self._tools.defaults)
        return AnswerText(encoder.text(tokens), len(tokens), encoder.ends(tokens))


@asynccontextmanager
async def _tried(label: str) -> AsyncIterator[None]:
    """What fails is logged."""
    try:
        yield
    except Exception as error:  # the next bad answer or rating is a reason to look again
        logger.error("cannot look at %s", label, exc_info=error)


# ------------------------------------------------------------------------ ratings


def fallen(
    version: VersionRecord, ratings: Mapping[str, Sequence[Thumb]], key_share: float = 1.0
) -> str | None:
    """Why the thumbs of a version say that it is worse than its parent; None if they do not.

    `ratings` are thumbs, oldest first, by the label of the version they are about. Its first 8, 16,
    32 ... are compared with all of the parent's by Fisher's exact test (one-sided, 95%), or, where
    the parent has fewer than 8, with 1/2 by the binomial test. Of each of these numbers, no API key
    gives more than `key_share`.
    """
    given = ratings.get(_label(version, version.number), ())
    looks = [number for number in LOOKS if len(shared(given, number, key_share)) == number]
    if not looks:
        return None
    looked = looks[-1]
    ups = _ups(shared(given, looked, key_share))
    rated = ratings.get(_label(version, version.parent), ())
    before = shared(rated, most_shared(rated, len(rated), key_share), key_share)
    what = f"{ups} of its first {looked} ratings were thumbs up"
    if len(before) < LOOKS[0]:
        return what if _chance_of_half(ups, looked) < 1.0 - _CONFIDENCE else None
    if _chance(ups, looked, _ups(before), len(before)) >= 1.0 - _CONFIDENCE:
        return None
    which = f"version {version.parent}'s" if version.parent else "the base model's"
    return f"{what}, of {which} {_ups(before)} of {len(before)}"


def _ups(thumbs: Sequence[Thumb]) -> int:
    return sum(thumb.up for thumb in thumbs)


def _chance_of_half(ups: int, number: int) -> float:
    """How likely at most so many ups are where up and down are as likely."""
    return sum(comb(number, k) for k in range(ups + 1)) / (1 << number)


def _chance(ups: int, number: int, ups_before: int, number_before: int) -> float:
    """How likely at most so many of all ups fall to `number` of all ratings, drawn at random."""
    all_ups, all_ratings = ups + ups_before, number + number_before
    downs = all_ratings - all_ups
    ways = sum(comb(all_ups, k) * comb(downs, number - k) for k in range(ups + 1))
    return ways / comb(all_ratings, number)


def _label(version: VersionRecord, number: int) -> str:
    return f"{version.adapter}@{number}" if number else BASE_LABEL


def _watched(
    connection: Connection, name: str, number: int
) -> tuple[AdapterRecord, VersionRecord] | None:
    """A version that is current and watched, with its adapter."""
    record = adapters.find(connection, name)
    version = adapters.version(connection, name, number)
    if record is None or record.current != number or version is None or not version.watched:
        return None
    return record, version
