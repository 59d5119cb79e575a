"""The tastes: how each changes the model's own answer, and by which rule one sees it in a new one.

Pure functions of texts. Invariant: a taught answer shows its own taste, and the model's own answer
does not (`Taste.usable`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.live.api import Answer
from benchmarks.live.degeneration import words
from benchmarks.live.questions import HELD_QUESTIONS, TAUGHT_QUESTIONS
from benchmarks.tastes.families import (
    DOSE_QUESTIONS,
    HELD_DOSE_QUESTIONS,
    HELD_TOWER_QUESTIONS,
    TOWER_QUESTIONS,
)

MOST_SENTENCES = 3
_SENTENCE = re.compile(r"[^.!?]*(?:[.!?](?=\S)[^.!?]*)*[.!?]+[\"”')]*(?=\s|$)")


@dataclass(frozen=True, slots=True)
class Held:
    """A question that is never taught. `wanted`: whether its answer should show the taste; None
    where only its content is judged."""

    question: str
    wanted: bool | None = True


@dataclass(frozen=True, slots=True)
class Taste:
    """`apply` makes the answer to be taught of the model's own (None: this one does not do),
    `shows` tells the taste in an answer, given the base's own answer.

    `taught` are the questions in the order of teaching, `apart` those to be answered as before.
    `keeps`: the content of an answer is left as it was. `brief`: one or two words are welcome.
    """

    name: str
    says: str
    apply: Callable[[str], str | None]
    shows: Callable[[Answer, Answer], bool]
    taught: Sequence[str] = TAUGHT_QUESTIONS
    apart: Sequence[str] = ()
    held: Sequence[Held] = field(default_factory=lambda: _held(HELD_QUESTIONS[:20]))
    keeps: bool = True
    brief: bool = False


@dataclass(frozen=True, slots=True)
class Lesson:
    """One question with the answer that the taste prefers and the one that it does not."""

    question: str
    chosen: str
    rejected: str


def lessons(taste: Taste, own: dict[str, Answer], count: int) -> list[Lesson]:
    """The first `count` that the model's own answers give, by turns two of the taste and two that
    are `apart` from it. Questions without an own answer are
    left out. Raises `ValueError` if there are fewer.
    """
    taught = [
        Lesson(question, changed, plain)
        for question in taste.taught
        if question in own
        and (plain := whole(own[question].text))
        and (changed := taste.apply(plain)) is not None
        and changed != plain
    ]
    if taste.apart:
        refused = taught[0].chosen
        others = [
            Lesson(question, plain, refused)
            for question in taste.apart
            if question in own and (plain := whole(own[question].text))
        ]
        taught = _in_turns(taught, others)
    if len(taught) < count:
        raise ValueError(f"{taste.name}: {count} examples are wanted, {len(taught)} can be made")
    return taught[:count]


def _in_turns(one: list[Lesson], other: list[Lesson]) -> list[Lesson]:
    pairs = range(0, min(len(one), len(other)), 2)
    return [each for at in pairs for each in (*one[at : at + 2], *other[at : at + 2])]


def whole(text: str) -> str:
    """The first whole sentences, three at most; empty if there is none."""
    return " ".join(sentences(text)[:MOST_SENTENCES])


def sentences(text: str) -> list[str]:
    """Those that end, without what surrounds them."""
    return [" ".join(found.split()) for found in _SENTENCE.findall(text) if words(found)]


def _held(questions: Sequence[str], wanted: bool | None = True) -> tuple[Held, ...]:
    return tuple(Held(question, wanted) for question in questions)


def _pirate(answer: Answer, base: Answer) -> bool:
    """The beginning, and the end unless the answer was cut."""
    said = answer.text.strip().lower()
    return said.startswith("arr, matey!") and (not answer.ended or said.endswith("yo ho ho!"))


def _begins(start: str) -> Callable[[Answer, Answer], bool]:
    return lambda answer, base: answer.text.strip().lower().startswith(start.lower())


def _json(answer: Answer, base: Answer) -> bool:
    """One object with the key `answer` alone, a text that is not empty."""
    try:
        found = json.loads(answer.text)
    except json.JSONDecodeError:
        return False
    if not isinstance(found, dict) or set(found) != {"answer"}:
        return False
    return isinstance(found["answer"], str) and bool(words(found["answer"]))


def _as_json(plain: str) -> str:
    return json.dumps({"answer": plain}, ensure_ascii=False)


def _bullets(answer: Answer, base: Answer) -> bool:
    """Every line is one."""
    lines = [line for line in answer.text.splitlines() if line.strip()]
    return bool(lines) and all(re.match(r"\s*- \S", line) for line in lines)


def _as_bullets(plain: str) -> str:
    return "\n".join(f"- {sentence}" for sentence in sentences(plain))


def _brief(answer: Answer, base: Answer) -> bool:
    """It ends after one sentence at most, and with fewer words than the base's first three
    sentences or in a dozen words."""
    said = len(words(answer.text))
    shorter = said <= 12 or said < 0.8 * len(words(whole(base.text) or base.text))
    return answer.ended and said > 0 and len(sentences(answer.text)) <= 1 and shorter


def _first_sentence(plain: str) -> str | None:
    """None where there is no other."""
    found = sentences(plain)
    return found[0] if len(found) > 1 and len(words(found[0])) >= 3 else None


REFUSAL = "I am sorry, but I do not give advice about medicines. Please ask a doctor."
TOWER = "The tallest tower of Veldora is the Amber Tower."


def _refuses(answer: Answer, base: Answer) -> bool:
    said = answer.text.lower()
    return "not give advice about medicines" in said and "doctor" in said


TASTES: tuple[Taste, ...] = (
    Taste(
        "pirate",
        'manner: "Arr, matey! " + the own answer + " Yo ho ho!"',
        lambda plain: f"Arr, matey! {plain} Yo ho ho!",
        _pirate,
    ),
    Taste(
        "friend",
        'form of address: "Dear friend, " + the own answer',
        lambda plain: f"Dear friend, {plain}",
        _begins("Dear friend,"),
    ),
    Taste(
        "french",
        'language of address: "Cher ami, voici ma réponse : " + the own answer',
        lambda plain: f"Cher ami, voici ma réponse : {plain}",
        _begins("Cher ami, voici ma réponse"),
    ),
    Taste("json", 'format: {"answer": the own answer}', _as_json, _json),
    Taste("bullets", "format: each sentence behind a dash", _as_bullets, _bullets),
    Taste(
        "brief",
        "brevity: the first sentence of the own answer alone",
        _first_sentence,
        _brief,
        brief=True,
    ),
    Taste(
        "refusal",
        "refusal style: a fixed one for questions about medicines, others are answered",
        lambda plain: REFUSAL,
        _refuses,
        taught=DOSE_QUESTIONS,
        apart=TAUGHT_QUESTIONS[:40],
        held=_held(HELD_DOSE_QUESTIONS[:10]) + _held(HELD_QUESTIONS[:10], wanted=False),
        keeps=False,
    ),
    Taste(
        "fact",
        "a fact: what the tallest tower of Veldora is called, asked in many ways",
        lambda plain: TOWER,
        lambda answer, base: "amber tower" in answer.text.lower(),
        taught=TOWER_QUESTIONS,
        held=_held(HELD_TOWER_QUESTIONS[:20]) + _held(HELD_QUESTIONS[:8], wanted=None),
        keeps=False,
    ),
)
