"""What reading an answer finds."""

from __future__ import annotations

import pytest

from tandem.services.learning.answer_faults import (
    AnswerText,
    fault,
    fault_alone,
    few_words,
    foreign,
    overlap,
    repeated,
    repeats,
    scripts,
    words,
)

SOUND = "Cats are small animals. They sleep most of the day, hunt mice at night and like milk."


def answer(text: str, *, ended: bool = True, tokens: int = 0) -> AnswerText:
    return AnswerText(text, tokens or len(text.split()), ended)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "empty"),
        (" \n", "empty"),
        ("Mmmmmmmmmmmmmmmmmmmm", "one word over and over"),
        ("yes yes yes yes yes yes", "one word over and over"),
        ("Arr, matey! " * 12, "repetition"),
        ("Cats sleep.\N{REPLACEMENT CHARACTER}", "broken characters"),
        ("Cats\x00 sleep a lot of the day.", "broken characters"),
        (SOUND, None),
        ("Arr, matey! " + SOUND + " Yo ho ho!", None),
        ('{"answer": "' + SOUND + '"}', None),
        ("- milk\n- mice\n- sleep\n----------------------\n- night", None),
        ("Paris.", None),
        ("猫は小さな動物です。", None),
    ],
)
def test_broken_answers_are_told_from_sound_ones(text: str, found: str | None) -> None:
    assert fault(answer(text), answer(SOUND)) == found


def test_what_the_base_does_itself_is_no_fault() -> None:
    broken = answer("yes " * 20)
    assert fault(broken, broken) is None
    assert fault(answer(""), broken) == "empty"


def test_a_loop_of_the_second_half_is_a_fault_of_the_answer() -> None:
    begins = (
        "Turtles are amazing creatures with shells that can change color to blend in with their"
        " surroundings, and some of them live for more than a hundred years in the warm parts of"
        " the sea near islands."
    )
    said = begins + " They are amazing swimmers with fins." * 4
    assert repeated(words(said)) < 0.5
    assert fault(answer(said), answer(SOUND)) == "repetition"
    assert fault(answer(begins), answer(SOUND)) is None


def test_an_answer_that_does_not_end_is_a_fault_where_the_base_ends() -> None:
    long = answer(SOUND, ended=False, tokens=96)
    assert fault(long, answer(SOUND, tokens=20)) == "endless"
    assert fault(long, answer(SOUND, tokens=30)) is None
    assert fault(long, answer(SOUND, ended=False, tokens=96)) is None
    assert fault(long, answer(SOUND, tokens=10), longer=90) is None
    assert fault(long, answer(SOUND, tokens=10), longer=14) == "endless"


def test_overlap_counts_content_words() -> None:
    assert overlap("Arr! " + SOUND, SOUND) == 1.0
    assert overlap("The a of is they.", SOUND) == 0.0
    assert overlap("Cats sleep.", "cats sleep at night") == pytest.approx(2 / 3)
    assert overlap("anything", "It is.") == 1.0


def test_words_of_scripts_without_spaces_count_one_by_one() -> None:
    assert words("Hello, World") == ["hello", "world"]
    assert words("猫です ok") == ["猫", "で", "す", "ok"]
    assert words("แมว 고양이") == ["แ", "ม", "ว", "고양이"]


def test_another_script_is_seen_unless_it_is_usual() -> None:
    usual = scripts(SOUND)
    assert foreign("Кошки спят", usual)
    assert not foreign("Die Katze schläft", usual)
    assert not foreign("Кошки спят", scripts(SOUND + " Кошки спят весь день"))
    assert not foreign("42", usual)
    # What is asked for is usual however short it is beside what the base says.
    assert not foreign("Кошки спят", scripts(SOUND * 20), scripts("Да."))
    assert foreign("Кошки спят", scripts(SOUND * 20), scripts("Yes."))


def test_a_broken_answer_is_told_without_another_one() -> None:
    def found(text: str, tokens: int = 40, *, ended: bool = False) -> str | None:
        return fault_alone(AnswerText(text, tokens, ended))

    assert found(SOUND) is None and found("def f(x):\n    return [[0, 0], [0, 1]]") is None
    assert found("M" + "m" * 60) == found("no no no no no no no") == "one word over and over"
    assert found("and so it is said in the old book " * 8) == "repetition"
    assert found("") == found("  \n") == found("", 1, ended=True) == "empty"
    assert found("!" * 40) == found("Well" + "!" * 60) == "almost no words"
    assert found("\N{THUMBS UP SIGN}", 2, ended=True) is None and found("42", 3, ended=True) is None
    assert found(f"{SOUND} \ufffd\ufffd") is None  # the limit cut a character in two
    assert found(f"{SOUND} \ufffd\ufffd", ended=True) == "broken characters"
    assert found("\x00", 1, ended=True) == found(f"{SOUND}\x1b") == "broken characters"


def test_a_symbol_is_an_answer_and_punctuation_is_none() -> None:
    for text in ("\N{THUMBS UP SIGN}", "\u2713", "\u2192"):
        assert fault(answer(text, tokens=2), answer(SOUND)) is None
        assert fault(answer(text * 4, tokens=8), answer("Yes.")) == "one word over and over"
        assert fault(answer(text * 40, tokens=40), answer(SOUND)) == "almost no words"
    for text in ("...", ":-)", "+", "\u201c\u201d"):
        assert fault(answer(text, tokens=2), answer(SOUND)) == "empty"


@pytest.mark.parametrize(
    "text",
    ["0000", "00000.", "0 0 0 0", "hahahaha", "very, very, very, very!", "Yes.\nyes. Yes. yes."],
)
def test_an_answer_of_one_thing_four_times_is_a_fault(text: str) -> None:
    assert fault(answer(text), answer(SOUND)) == "one word over and over"
    assert fault(answer(text), answer(text)) is None


@pytest.mark.parametrize(
    "text", ["1000", "no, no, no", "banana", "0000 is the code", "10 100 1000"]
)
def test_a_brief_answer_may_repeat_a_little(text: str) -> None:
    assert fault(answer(text), answer(SOUND)) is None


def test_an_answer_has_few_words_where_the_base_has_more() -> None:
    assert few_words(answer("0000"), answer(SOUND)) == few_words(answer("0 00"), answer(SOUND))
    assert few_words(answer("Yes. Yes!"), answer(SOUND)) == {"yes"}
    assert few_words(answer("It is Paris."), answer(SOUND)) is None
    assert few_words(answer("Yes."), answer("It is, yes.")) is None
    assert few_words(answer("..."), answer(SOUND)) is None
    assert few_words(answer("\u2713 \u2713"), answer(SOUND)) == {"\u2713"}


@pytest.mark.parametrize(
    "text",
    [
        "Mmmmmmmm",
        "!" * 20,
        "\N{FACE WITH TEARS OF JOY}" * 20,
        "\N{FULLWIDTH EXCLAMATION MARK}" * 20,
        "banana" * 12,
        "Hm " + "ha" * 14,
        "yes " * 8,
        "Certainly" * 8,
        "Very good, very good, very good, very good.",
        "one two three four " * 6,
    ],
)
def test_an_answer_that_is_one_thing_again_and_again_is_not_imitated(text: str) -> None:
    assert repeats(text)


@pytest.mark.parametrize(
    "text",
    [
        "A million million is 1000000000000000.",
        "Hahaha, that is a good one!!!",
        "Here is the table.\n\n| name | age |\n|------------|-----------|\n| Ann Jones | 7 |",
        "Go, go, go, go, go, go!",
        "[[0, 0, 0], [0, 0, 0], [0, 0, 0]]",
        "Name: ______________________",
        "Title\n-------------------",
        "[====================>    ]",
        "Yes.            ",
        "if a:\n            b = 1\n            c = 2\n",
        "",
    ],
)
def test_a_sound_answer_may_repeat_a_little(text: str) -> None:
    assert not repeats(text)
