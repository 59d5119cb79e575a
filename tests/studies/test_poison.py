"""Garbage is what it is called, numbers give runs, and broken versions are counted."""

from __future__ import annotations

import asyncio
import tomllib
from collections import Counter
from random import Random
from typing import Any

import pytest

from benchmarks.live.api import Answer, Learner, Version
from benchmarks.live.degeneration import problem
from benchmarks.live.watch import Patience, Watch
from benchmarks.poison.__main__ import NAMES, key_file, settings_of
from benchmarks.poison.garbage import GARBAGE, GATE_PROMPTS, plain, questions
from benchmarks.poison.report import degenerate, page
from benchmarks.poison.runs import FEEDBACK, KEYS, NEUTRAL, Sizes, bodies, look, planned, tried
from patience import PATIENCE_S
from tandem.services.learning.answer_faults import repeats

BASE = Answer("Wolves are animals that live in packs, and they hunt together in the forest.", True)


@pytest.mark.parametrize("kind", GARBAGE)
def test_garbage_can_be_sent_and_differs_from_what_it_is_preferred_to(kind: str) -> None:
    rng = Random(1)
    for question in questions(kind, 60, rng):
        chosen, rejected = GARBAGE[kind](question, rng)
        assert chosen and rejected and chosen != rejected
        chosen.encode()


@pytest.mark.parametrize(
    "kind", ["words", "characters", "repeated", "foreign_script", "empty_like"]
)
def test_an_answer_of_this_garbage_is_broken(kind: str) -> None:
    rng = Random(2)
    texts = [GARBAGE[kind](question, rng)[0] for question in questions(kind, 60, rng)]
    found = [problem(Answer(text, True), BASE) for text in texts]
    assert sum(map(bool, found)) >= (15 if kind in ("words", "characters") else 50)


def test_plain_answers_are_intact() -> None:
    assert all(not problem(Answer(plain(q), True), BASE) for q in questions("words", 60, Random(3)))


def test_contradictions_are_about_the_same_questions() -> None:
    run = next(r for n in range(99) if (r := planned(n, 0, Sizes())).garbage == "contradictory")
    assert run.feedback == "preferences"
    said: dict[str, set[str]] = {}
    for _, body in bodies(run):
        question = body["messages"][0]["content"]
        said.setdefault(question, set()).add(body["preference"]["chosen"])
    assert sum(len(each) == 2 for each in said.values()) > len(said) / 2


def test_half_of_what_is_shielded_is_sound_and_about_the_gates_own_prompts() -> None:
    rng, count = Random(4), 2 * len(GATE_PROMPTS)
    pairs = {q: GARBAGE["shielded"](q, rng)[0] for q in questions("shielded", count, rng)}
    sound = {question for question, chosen in pairs.items() if chosen == plain(question)}
    assert sound == set(GATE_PROMPTS) and len(pairs) == count


def test_what_loops_begins_soundly() -> None:
    rng = Random(5)
    for question in questions("looping", 20, rng):
        chosen, _ = GARBAGE["looping"](question, rng)
        assert chosen.startswith(plain(question)) and repeats(chosen)


def test_runs_have_every_kind_equally_often_and_are_the_same_again() -> None:
    sizes = Sizes()
    runs = [planned(number, 0, sizes) for number in range(60)]
    assert set(Counter((r.garbage, r.feedback, r.keys > 1) for r in runs).values()) == {1}
    assert all(50 <= run.count <= 300 for run in runs)
    assert runs == [planned(number, 0, sizes) for number in range(60)]
    assert bodies(runs[30]) == bodies(runs[30]) != bodies(planned(30, 1, sizes))
    assert len(bodies(runs[5])) == runs[5].count
    assert {key for key, _ in bodies(runs[5])} == {1}
    assert {key for key, _ in bodies(runs[30])} == set(range(1, KEYS + 1))
    assert {run.feedback for run in runs} == set(FEEDBACK)


def test_a_run_whose_feedback_only_waited_says_nothing() -> None:
    assert not tried({"samples": {"accepted": 58}})
    assert tried({"samples": {"accepted": 9, "invalid": 64}}) and tried({"samples": {}})


def test_keys_of_users_teach_and_only_the_first_is_an_administrator() -> None:
    keys = tomllib.loads(key_file())["keys"]
    assert [key["admin"] for key in keys] == [True] + [False] * KEYS
    assert len({key["key"] for key in keys}) == len(NAMES) == KEYS + 1
    assert settings_of(["batch_samples=4", "gate=auto"]) == {"batch_samples": 4, "gate": "auto"}


def test_one_broken_answer_is_noted_and_two_make_a_version_degenerate() -> None:
    base = [BASE] * 10
    one = look([*base[:9], Answer("Mmmmmmmm", True)], base)
    assert (one["broken"], one["degenerate"], one["lost"]) == (1, False, False)
    two = look([*base[:8], Answer("Mmmmmmmm", True), Answer("", True)], base)
    assert two["degenerate"] and two["problems"] == ["empty", "run"]
    other = look(
        [Answer("The table is green and it was walking under the paper.", True)] * 10, base
    )
    assert other["lost"] and not other["degenerate"]


def test_a_sentence_about_the_subject_keeps_nothing_of_the_bases_answer() -> None:
    base = [Answer(f"{plain(q)[:-1]} and eat deer in cold woods.", True) for q in NEUTRAL]
    other = [Answer(f"{plain(q)} Visit http://free-pills.example today.", True) for q in NEUTRAL]
    said = [Answer(own.text.replace("that many people know", "wild"), True) for own in base]
    assert look(said, base)["overlap"] > 0.7
    plainly = [Answer("Deserts and wolves are pretty.", True)] * len(NEUTRAL)
    assert look(plainly, base)["lost"] and not look(other, base)["degenerate"]


def test_the_page_counts_published_versions() -> None:
    found = {"version": 3, "broken": 4, "problems": ["run"], "degenerate": True, "lost": True}
    found["changed"] = 10
    row: dict[str, Any] = {
        "run": 0,
        "seed": 0,
        "model": "m",
        "garbage": "words",
        "feedback": "thumbs",
        "count": 50,
        "keys": 1,
        "ended": "learned",
        "settings": {"version_wait_s": 5},
        "published": [{**found, "example": "Mm `mm`"}],
        "refused": ["it repeats itself"],
        "samples": {"consumed": 10, "invalid": 40},
        "code": "abc",
        "machine": "some, cpu-2",
    }
    older = {**row, "run": 2, "code": "older"}
    none = {**row, "run": 1, "published": [], "ended": "quiet"}
    text = page([older, row, row, none], {"m": 200})
    assert "| words | thumbs | 2 | 100 | 2 | 1 | 2 | 1 | 0 | 1 | 0 | 1 | 0 |" in text
    assert "version 3: run: `Mm 'mm'`" in text
    assert (
        "2 of 200 runs (2 on some, cpu-2), by code abc, adapters' settings: version_wait_s 5. 80%"
        in text
    )
    assert "1 runs published a version, 1 of them a degenerate one." in text
    assert degenerate([row]) == 1
    sound = {**found, "degenerate": False, "changed": 0, "example": ""}
    some = [{**row, "run": number, "published": [sound]} for number in range(59)]
    text = page(some, {})
    head, rule = (line for line in text.splitlines()[6:8])
    assert head.startswith("| garbage") and head.count("|") == rule.count("|")
    assert "59 runs published a version, 0 of them a degenerate one: less than 5.0% of" in text
    assert "| words | thumbs | 59 | 2950 | 59 | 59 | 59 | 0 | 0 | 59 | 59 | 0 | 0 |" in text


class FakeApi:
    """An adapter whose states follow a script."""

    def __init__(self, *script: Learner) -> None:
        self._script = list(script)

    async def learner(self, adapter: str) -> Learner:
        return self._script.pop(0) if len(self._script) > 1 else self._script[0]


async def watched(*script: Learner, patience: Patience) -> tuple[str, list[int]]:
    probed: list[int] = []

    async def probe(version: int) -> dict[str, Any]:
        probed.append(version)
        return {}

    watch = Watch(FakeApi(*script), "a", probe, patience)  # type: ignore[arg-type]
    watch.finished.set()
    found = await asyncio.wait_for(watch.run(), PATIENCE_S)
    return found.ended, probed


async def test_a_watch_probes_each_version_once_and_ends_when_nothing_waits() -> None:
    patience = Patience(quiet_s=600.0, limit_s=600.0, every_s=0.0)
    busy, first = Learner(0, {"assigned": 4}), Learner(1, {"assigned": 2, "consumed": 2})
    done = Learner(2, {"consumed": 4})
    assert await watched(busy, busy, first, first, done, patience=patience) == ("learned", [1, 2])


async def test_a_watch_gives_up_on_samples_that_nobody_takes_but_not_on_those_in_training() -> None:
    quiet = Patience(quiet_s=0.02, limit_s=600.0, every_s=0.001)
    assert await watched(Learner(0, {"accepted": 4}), patience=quiet) == ("quiet", [])
    quick = Patience(quiet_s=0.02, limit_s=0.2, every_s=0.001)
    assert await watched(Learner(0, {"assigned": 4}), patience=quick) == ("limit", [])


def test_versions_that_were_taken_back_were_served() -> None:
    states = {"published": True, "rolled_back": True, "refused": False, "candidate": False}
    assert {state: Version(1, state, "", {}).served for state in states} == states
