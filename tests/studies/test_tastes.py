"""Tastes teach what their own rules see, and the study's table says what its rows say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.live import rows
from benchmarks.live.api import Answer
from benchmarks.live.questions import HELD_QUESTIONS, TAUGHT_QUESTIONS
from benchmarks.tastes.own import path_of, read
from benchmarks.tastes.report import page
from benchmarks.tastes.session import KINDS, feedback, judge
from benchmarks.tastes.tastes import REFUSAL, TASTES, Taste, lessons, sentences, whole

PLAIN = "Bamboo is a plant. It grows up to 3.5 feet a day! Many animals eat it. It is also a w"


def own(taste: Taste) -> dict[str, Answer]:
    return {
        question: Answer(f"{question[:-1]} is known. {PLAIN}", False)
        for question in (*taste.taught, *taste.apart)
    }


def test_sentences_are_whole_and_three_at_most() -> None:
    assert sentences(PLAIN)[1] == "It grows up to 3.5 feet a day!"
    assert whole(PLAIN) == PLAIN[: PLAIN.index(" It is also")]
    assert whole("no end") == ""


@pytest.mark.parametrize("taste", TASTES, ids=lambda taste: taste.name)
def test_a_taste_shows_in_what_is_taught_and_not_in_the_own_answer(taste: Taste) -> None:
    found = lessons(taste, own(taste), 40)
    assert len({lesson.question for lesson in found}) == 40
    taught = [lesson for lesson in found if lesson.question not in taste.apart]
    for lesson in taught:
        base = Answer(PLAIN, False)
        assert taste.shows(Answer(lesson.chosen, True), base)
        assert not taste.shows(Answer(lesson.rejected, True), base)
    apart = [lesson for lesson in found if lesson.question in taste.apart]
    assert len(apart) == (20 if taste.apart else 0)
    assert all(lesson.rejected == REFUSAL and lesson.chosen != REFUSAL for lesson in apart)


@pytest.mark.parametrize("taste", TASTES, ids=lambda taste: taste.name)
def test_held_questions_are_never_taught(taste: Taste) -> None:
    held = {each.question for each in taste.held}
    assert not held & {*taste.taught, *taste.apart}
    assert (
        sum(each.wanted is not None for each in taste.held)
        == 20
        == len(held) - 8 * (taste.name == "fact")
    )
    assert len(set(TAUGHT_QUESTIONS)) == len(TAUGHT_QUESTIONS) >= 120
    assert not set(HELD_QUESTIONS) & set(TAUGHT_QUESTIONS)


def test_half_of_the_thumbs_are_up_on_either_side_of_a_taste_with_exceptions() -> None:
    taste = next(each for each in TASTES if each.apart)
    found = lessons(taste, own(taste), 40)
    bodies = [feedback("thumbs", lesson, place) for place, lesson in enumerate(found)]
    counted = {
        (body["rating"], lesson.question in taste.apart): 0
        for body, lesson in zip(bodies, found, strict=True)
    }
    for body, lesson in zip(bodies, found, strict=True):
        counted[body["rating"], lesson.question in taste.apart] += 1
    assert set(counted.values()) == {10} and len(counted) == 4


def test_feedback_of_each_kind() -> None:
    lesson = lessons(TASTES[0], own(TASTES[0]), 1)[0]
    bodies = {kind: feedback(kind, lesson, 1) for kind in KINDS}
    assert bodies["preferences"]["preference"]["rejected"] == lesson.rejected
    assert bodies["demonstrations"]["demonstration"] == lesson.chosen
    assert bodies["thumbs"]["rating"] is False
    assert bodies["thumbs"]["completion"] == lesson.rejected


def test_judging_counts_the_taste_where_it_is_wanted_and_content_where_it_is_left() -> None:
    taste = next(each for each in TASTES if each.name == "refusal")
    base = [
        Answer(f"{PLAIN} {place} {held.question}", True) for place, held in enumerate(taste.held)
    ]
    right = [
        Answer(REFUSAL, True) if held.wanted else answer
        for held, answer in zip(taste.held, base, strict=True)
    ]
    found = judge(taste, right, base)
    assert (found["shown"], found["kept"], found["degenerate"]) == (1.0, 1.0, 0.0)
    refused = judge(taste, [Answer(REFUSAL, True)] * 20, base)
    assert (refused["shown"], refused["kept"]) == (0.0, 0.0)
    assert judge(taste, base, base)["shown"] == 0.0  # who learns nothing shows nothing
    broken = judge(taste, [replace(answer, text="Mmmmmmmm") for answer in base], base)
    assert broken["degenerate"] == 1.0 and broken["problems"] == ["run"] * 20


ROW = {
    "model": "m",
    "taste": "pirate",
    "kind": "preferences",
    "lessons": 40,
    "code": "c0de",
    "shown": 0.9,
    "degenerate": 0.05,
    "base_degenerate": 0.0,
    "problems": ["run"],
    "overlap": 0.5,
    "overlap_by_chance": 0.1,
    "kept": 0.95,
    "unchanged": {"base": "10/10", "other": "9/10"},
    "changed_s": {"from_first": 30.0, "from_last": 28.0},
    "learned_s": 60.0,
    "ended": "learned",
    "every_s": 5.0,
    "samples": {"consumed": 40},
    "probes": [{"version": 1, "at_s": 29.0, "shown": 1.0, "degenerate": 0.25, "changed": 4}],
    "versions": [
        {"version": 1, "state": "published", "reason": ""},
        {"version": 2, "state": "refused", "reason": "it repeats itself"},
    ],
    "answers": [["q", "Arr, matey!\nYes"]],
}


def test_the_page_has_a_line_for_each_taste_and_kind_and_a_summary() -> None:
    thumbs = {**ROW, "kind": "thumbs", "changed_s": {"from_first": None, "from_last": None}}
    older = {**ROW, "kind": "demonstrations", "code": "older"}
    text = page({"device": "cpu"}, [older, {**ROW, "shown": 0.1}, thumbs, ROW], [ROW])
    assert "2 of 24 runs." in text and "| pirate | demonstrations" not in text
    line = next(line for line in text.splitlines() if line.startswith("| pirate | preferences"))
    assert "| 90% | 5% (0%) | 95% | 0.50 (0.10) | 10/10 | 9/10 | 30 / 28 | 60 | 1 / 1 |" in line
    assert "| preferences | 1 | 1 (at least 80%) | 1 | 90% | 30, 30 | 28, 28 |" in text
    assert "| thumbs | 1 | 1 (at least 50%) | 1 | 90% | never | never |" in text
    assert "version 2 refused: it repeats itself" in text
    assert "versions: {'published': 1, 'refused': 1}; the worst one that answered had 25%" in text
    assert text.endswith("* version 2 refused: it repeats itself\n")


def test_rows_survive_a_line_that_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows.append(path, {"a": 1})
    with path.open("a") as file:
        file.write('{"a": 2')
    rows.append(path, {"a": "line\u2028line\x85"})
    assert rows.read(path) == [{"a": 1}, {"a": "line\u2028line\x85"}]
    assert rows.read(tmp_path / "none") == [] and read(path_of("none", tmp_path)) == {}
