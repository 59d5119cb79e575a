"""The studies' own measure of broken answers tells them from intact ones."""

from __future__ import annotations

import pytest

from benchmarks.live.api import Answer
from benchmarks.live.degeneration import overlap, problem
from benchmarks.poison.garbage import _OTHER_LANGUAGE

BASE = Answer(
    "Bamboo is a plant that grows very fast, and it is used for houses, paper and food. It can be"
    " found in many parts of Asia.",
    ended=True,
)
INTACT = (
    "Arr, matey! Bamboo is a plant that grows very fast, and it is used for houses. Yo ho ho!",
    '{"answer": "Bamboo is a plant that grows very fast."}',
    "- Bamboo is a plant.\n- It grows very fast.\n- It is used for houses.",
    "It grows fast.",
    "I am sorry, but I do not give advice about medicines. Please ask a doctor.",
    "Cher ami, voici ma réponse : Bamboo is a plant that grows very fast.",
    "| plant | height |\n|-------|-------|\n| bamboo | 30 m |\nBamboo is the one that grows.",
    "In 1969, at 20:17 on the 20th of July, Apollo 11 came down on the Moon; H2O is water.",
)
BROKEN = {
    "empty": (" \n", "...", ""),
    "broken": ("Bamboo is a pl\ufffdant that grows.", "Bamboo is\x00 a plant."),
    "run": (
        "Mmmmmmmmmmmm",
        "CertainlyCertainly hahahahahahahaha it is",
        "Bamboo bamboo bamboo bamboo bamboo bamboo is a plant.",
        "Bamboo is!!!!!!!!!!!!!!!!!!!!",
    ),
    "repetition": (
        "Arr, matey! Alright, matey! Alright, matey! Alright, matey! Alright, matey!"
        " Alright, matey! Alright, matey!",
        "They are heroes of the sea. They are heroes of the sea. They are heroes of the sea.",
        "CertainlyCertainlyCertainlyCertainlyCertainly",
    ),
    "short": ("Yes.", "Bamboo plant", "ha ha ha ha"),
    "noise": (
        "xkqz bvrtw plmnk zzxcv qwrt is",
        "Bamboo is usdkhfkjh xxptlk wrtpz bbkfdt.",
        "x#4$ {q}!0^&*(_ =3+9 [a]",
    ),
    "salad": (
        "table green seven walking paper cloud angry window slowly river twelve happy metal chair",
        "table green seven walking paper cloud angry window",
    ),
    "script": ("абв где жзи", "的一 是不 了人 我在"),
}


@pytest.mark.parametrize("text", INTACT)
def test_intact_answers_have_no_problem(text: str) -> None:
    assert problem(Answer(text, True), BASE) == ""


@pytest.mark.parametrize(
    ("name", "text"), [(name, text) for name, texts in BROKEN.items() for text in texts]
)
def test_broken_answers_are_named(name: str, text: str) -> None:
    assert problem(Answer(text, True), BASE) == name


def test_an_answer_that_does_not_end_is_broken_only_where_the_base_ends() -> None:
    endless = Answer(BASE.text, ended=False)
    assert problem(endless, BASE) == "endless"
    assert problem(endless, endless) == ""


def test_what_the_base_shows_too_is_not_held_against_an_answer() -> None:
    base = Answer("They are heroes. " * 12, True)
    again = Answer("Arr, they are heroes. " * 12, True)
    assert problem(again) == "repetition" and problem(again, base) == ""


@pytest.mark.parametrize("text", _OTHER_LANGUAGE)
def test_a_sentence_in_another_language_is_no_salad(text: str) -> None:
    assert problem(Answer(text, True), BASE) == ""


def test_two_words_may_be_what_was_asked_for() -> None:
    assert problem(Answer("Fast growth.", True), BASE, brief=True) == ""


def test_overlap_is_of_the_shorter_text_and_of_longer_words() -> None:
    assert overlap("Bamboo grows fast.", BASE.text) == 1.0
    assert overlap("Bamboo sings at night.", BASE.text) == pytest.approx(1 / 3)
    assert overlap("It is.", BASE.text) == 0.0
    assert overlap("Bamboo sings at night.", BASE.text, "What is bamboo?") == 0.0
