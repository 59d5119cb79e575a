"""Teaches one taste by one kind of feedback on a running server, and judges what it answers then.

Invariant: the adapter is made for this run and deleted after it; only feedback teaches it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from benchmarks.live.api import Answer, Api
from benchmarks.live.degeneration import overlap, problem
from benchmarks.live.margins import stated
from benchmarks.live.questions import HELD_QUESTIONS
from benchmarks.live.watch import Patience, Watch, Watched
from benchmarks.tastes.tastes import Held, Lesson, Taste

KINDS = ("preferences", "demonstrations", "thumbs")
# Twice what the base needs for most answers: a taste may add words, and an answer that was only cut
# is not endless.
MAX_TOKENS = 192
PROBES = 4
KEPT_OVERLAP = 0.3
SHOWN_CHARACTERS = 300
BYSTANDER = "bystander"
BYSTANDER_LESSONS = 16
WITNESSES = HELD_QUESTIONS[20:30]


def feedback(kind: str, lesson: Lesson, place: int) -> dict[str, Any]:
    """The body that teaches `lesson`; of thumbs every second one is down, on the plain answer."""
    body: dict[str, Any] = {"messages": [{"role": "user", "content": lesson.question}]}
    if kind == "preferences":
        return body | {"preference": {"chosen": lesson.chosen, "rejected": lesson.rejected}}
    if kind == "demonstrations":
        return body | {"demonstration": lesson.chosen}
    up = place % 2 == 0
    return body | {"completion": lesson.chosen if up else lesson.rejected, "rating": up}


@dataclass(frozen=True, slots=True)
class Witness:
    """Answers that nothing may change: the base's and another adapter's, to the same questions."""

    base: Sequence[Answer]
    other: Sequence[Answer]

    @staticmethod
    async def take(api: Api) -> Witness:
        """What they answer now."""
        base = await api.ask_all(WITNESSES, None, MAX_TOKENS)
        return Witness(base, await api.ask_all(WITNESSES, BYSTANDER, MAX_TOKENS))

    def unchanged(self, now: Witness) -> dict[str, str]:
        """How many of how many answers are the same now."""
        pairs = {"base": (self.base, now.base), "other": (self.other, now.other)}
        return {
            name: f"{sum(a == b for a, b in zip(*both, strict=True))}/{len(both[0])}"
            for name, both in pairs.items()
        }


class Session:
    """One server: the base's answers, asked once, and another adapter that is there from the
    start."""

    def __init__(self, api: Api, patience: Patience) -> None:
        self._api = api
        self._patience = patience
        self._base: dict[str, Answer] = {}

    async def begin(self, lessons: Sequence[Lesson]) -> int:
        """Teach the other adapter by demonstrations; the version that it answers with."""
        await self._api.create(BYSTANDER, {})
        for lesson in lessons[:BYSTANDER_LESSONS]:
            await self._api.teach(BYSTANDER, feedback("demonstrations", lesson, 0))
        watch = Watch(self._api, BYSTANDER, _no_probe, self._patience)
        watch.finished.set()
        await watch.run()
        return (await self._api.learner(BYSTANDER)).version

    async def run(
        self, taste: Taste, kind: str, lessons: Sequence[Lesson], every_s: float = 0.0
    ) -> dict[str, Any]:
        """Teach and judge; `every_s` lies between two feedbacks. The row of the result."""
        adapter = f"{taste.name}-{kind}-{time.time_ns() % 10**9}"
        base = await self._answers_of_base([held.question for held in taste.held])
        witness = await Witness.take(self._api)
        await self._api.create(adapter, {})
        try:
            watched, sent_s = await self._teach(adapter, taste, kind, lessons, every_s)
            held = [each.question for each in taste.held]
            answers = await self._api.ask_all(held, adapter, MAX_TOKENS)
            versions = await self._api.versions(adapter)
            unchanged = witness.unchanged(await Witness.take(self._api))
        finally:
            await self._api.forget(adapter)
        return {
            "model": self._api.model,
            "taste": taste.name,
            "kind": kind,
            "lessons": len(lessons),
            **judge(taste, answers, base),
            "unchanged": unchanged,
            "changed_s": _changed_s(watched, sent_s),
            "learned_s": watched.seconds,
            "ended": watched.ended,
            "samples": watched.samples,
            "probes": watched.probes,
            "versions": [stated(each) for each in versions],
            "answers": [
                [question, answer.text[:SHOWN_CHARACTERS]]
                for question, answer in zip(held, answers, strict=True)
            ],
        }

    async def _answers_of_base(self, questions: Sequence[str]) -> list[Answer]:
        missing = [question for question in questions if question not in self._base]
        found = await self._api.ask_all(missing, None, MAX_TOKENS)
        self._base |= dict(zip(missing, found, strict=True))
        return [self._base[question] for question in questions]

    async def _teach(
        self, adapter: str, taste: Taste, kind: str, lessons: Sequence[Lesson], every_s: float
    ) -> tuple[Watched, tuple[float, float]]:
        """What the watch saw, and when the first and the last feedback had been sent."""
        shown = [held for held in taste.held if held.wanted][:PROBES]
        before = await self._answers_of_base([held.question for held in shown])

        async def probe(version: int) -> dict[str, Any]:
            asked = [held.question for held in shown]
            answers = await self._api.ask_all(asked, adapter, MAX_TOKENS)
            changed = sum(a != b for a, b in zip(answers, before, strict=True))
            return {
                "answered_s": watch.now_s,
                "changed": changed,
                **_shares(taste, shown, answers, before),
            }

        watch = Watch(self._api, adapter, probe, self._patience)
        watching = asyncio.create_task(watch.run())
        try:
            first_s = watch.now_s
            for place, lesson in enumerate(lessons):
                await asyncio.sleep(max(0.0, place * every_s - (watch.now_s - first_s)))
                await self._api.teach(adapter, feedback(kind, lesson, place))
            sent_s = (first_s, watch.now_s)
            watch.finished.set()
            return await watching, sent_s
        finally:
            watching.cancel()


async def _no_probe(version: int) -> dict[str, Any]:
    return {}


def _changed_s(watched: Watched, sent_s: tuple[float, float]) -> dict[str, float | None]:
    """From the first and from the last feedback to the first answer that differs from the base's;
    below 0 where it came before the last feedback."""
    first = next((each["answered_s"] for each in watched.probes if each["changed"]), None)
    names = ("from_first", "from_last")
    return {
        name: None if first is None else first - at_s
        for name, at_s in zip(names, sent_s, strict=True)
    }


def judge(taste: Taste, answers: Sequence[Answer], base: Sequence[Answer]) -> dict[str, Any]:
    """Shares over the held questions; `overlap` with the base's own answers where the taste leaves
    them, beside that of answers to different questions."""
    left = [
        (answer, own)
        for held, answer, own in zip(taste.held, answers, base, strict=True)
        if (taste.keeps if held.wanted else True)
    ]
    found = [overlap(answer.text, own.text) for answer, own in left]
    others = [own for _, own in left]
    by_chance = [
        overlap(answer.text, other.text)
        for (answer, _), other in zip(left, others[1:] + others[:1], strict=True)
    ]
    brokenness = [problem(own) for own in base]
    return {
        **_shares(taste, taste.held, answers, base),
        "base_degenerate": sum(map(bool, brokenness)) / len(base),
        "overlap": fmean(found) if found else None,
        "overlap_by_chance": fmean(by_chance) if found else None,
        "kept": sum(each >= KEPT_OVERLAP for each in found) / len(found) if found else None,
    }


def _shares(
    taste: Taste, held: Sequence[Held], answers: Sequence[Answer], base: Sequence[Answer]
) -> dict[str, Any]:
    # Where some answers should show it and others should not, it shows no better than in the worse.
    judged = dict[bool, list[bool]]()
    for each, answer, own in zip(held, answers, base, strict=True):
        if each.wanted is not None:
            right = taste.shows(answer, own) is each.wanted
            judged.setdefault(each.wanted, []).append(right)
    problems = [
        problem(answer, own, brief=taste.brief)
        for each, answer, own in zip(held, answers, base, strict=True)
    ]
    return {
        "shown": min(map(fmean, judged.values())),
        "degenerate": sum(map(bool, problems)) / len(problems),
        "problems": sorted(filter(None, problems)),
    }
