"""What makes answers long: the examples of RT-LM's table I, and plain sentences beside them."""

from __future__ import annotations

import gzip
import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.services.lengths.lexicon import LICENCE, WORDS, Lexicon
from tandem.services.lengths.scores import Scorer
from tandem.services.lengths.word_readings import MOST_WORDS, read

LEXICON = Lexicon.load()
SCORER = Scorer(LEXICON)

# The paper's example, and the same sentence without its source.
TABLE_I = {
    "structural": ("John saw a boy in the park with a telescope.", "John saw a boy."),
    "syntactic": ("Rice flies like sand.", "The telescope was invented."),
    "semantic": ("What's the best way to deal with bats?", "Who invented telescopes?"),
    "vague": ("Tell me about the history of art.", "Who invented telescopes?"),
    "open_ended": (
        "What are the causes and consequences of poverty in developing countries?",
        "When did Rome fall?",
    ),
    "parts": (
        "How do cats and dogs differ in behavior, diet, and social interaction?",
        "How do cats behave?",
    ),
}


@pytest.mark.parametrize("source", TABLE_I)
def test_each_example_of_the_table_has_its_source(source: str) -> None:
    example, plain = TABLE_I[source]
    assert getattr(SCORER.score(example), source) >= 2.0
    assert getattr(SCORER.score(plain), source) == 0.0


@pytest.mark.parametrize("source", ["structural", "vague", "open_ended", "parts"])
def test_an_example_has_more_of_its_source_than_the_others(source: str) -> None:
    own = getattr(SCORER.score(TABLE_I[source][0]), source)
    others = [example for name, (example, _) in TABLE_I.items() if name != source]
    assert own >= max(getattr(SCORER.score(example), source) for example in others)


def test_phrases_may_belong_to_every_noun_before_them() -> None:
    ways = [
        SCORER.score(text).structural
        for text in (
            "She saw a dog.",
            "She saw a dog with glasses.",
            "She saw a dog in Rome with glasses.",
            "The dog saw the king of Spain.",  # "of" belongs to the king
        )
    ]
    assert ways == [0.0, 1.0, 3.0, 0.0]


def test_a_text_without_a_source_counts_by_its_length() -> None:
    assert SCORER.score("Telescopes.").single_rule(7) == 7.0
    scores = SCORER.score("John saw a boy in the park with a telescope.")
    assert scores.single_rule(7) == max(scores.features)


def test_a_question_for_one_fact_is_not_open() -> None:
    wide, narrow = SCORER.score("How do plants grow?"), SCORER.score("How tall is this tower?")
    assert wide.open_ended == 1.0
    assert narrow.open_ended == 0.0


@pytest.mark.parametrize(
    "text", ["", "   \n", "?!", "你好,世界", "1 + 3 = ?", "' '' n't", "é" * 999]
)
def test_any_text_has_scores(text: str) -> None:
    assert all(score >= 0.0 for score in SCORER.score(text).features)


@given(st.text(max_size=400))
def test_whatever_is_said_has_scores(text: str) -> None:
    scores = SCORER.score(text)
    assert all(math.isfinite(score) and score >= 0.0 for score in scores.features)
    assert scores.single_rule(5) > 0.0


def test_the_place_of_a_word_says_what_it_may_be() -> None:
    texts = ("the park", "they park", "to park")
    assert [read(text, LEXICON)[-1].parts[0][0] for text in texts] == ["n", "v", "v"]


@pytest.mark.parametrize(
    ("form", "part", "lemma"),
    [
        ("bats", "n", "bat"),
        ("flies", "v", "fly"),
        ("running", "v", "run"),
        ("happier", "a", "happy"),
        ("studies", "n", "study"),
        ("made", "v", "make"),
        ("women", "n", "woman"),
        ("dances", "v", "dance"),
    ],
)
def test_forms_are_read_as_their_lemmas(form: str, part: str, lemma: str) -> None:
    assert LEXICON.readings(form)[part][0] == lemma


def test_a_word_that_is_not_there_is_a_noun() -> None:
    assert LEXICON.readings("zorgblatt") == {"n": ("zorgblatt", 1)}


def test_a_long_text_is_read_at_both_ends() -> None:
    text = "Explain this. " + "lorem ipsum " * 20_000 + " Explain that, and why."
    words = read(text, LEXICON)
    assert len(words) == MOST_WORDS
    assert words[0].text == "explain" and words[-2].text == "why"
    begun_s = time.process_time()
    for _ in range(20):
        SCORER.score(text)
    assert (time.process_time() - begun_s) / 20 < 0.01  # it takes 0.3 ms


def test_a_long_word_at_the_cut_takes_no_longer_than_many_short_ones() -> None:
    def seconds(text: str) -> float:
        begun_s = time.process_time()
        for _ in range(50):
            read(text, LEXICON)
        return time.process_time() - begun_s

    assert seconds("w" * 399 + " " + "w" * 800) < seconds("cats and dogs " * 86)


def test_apostrophes_of_any_kind_and_capitals_are_the_same_words() -> None:
    plain = SCORER.score("What's this, and why don't we know?")
    assert SCORER.score("What’s this, and why don’t we know?") == plain
    assert SCORER.score("WHAT'S THIS, AND WHY DON'T WE KNOW?") == plain


def test_no_half_of_a_word_is_read() -> None:
    text = "cats " * 79 + "telescopes" + " dogs" * 200 + " microscopes" + " birds" * 66
    assert len(text) > 800 and text[399].isalpha() and text[400].isalpha()
    assert {word.text for word in read(text, LEXICON)} == {"cats", "\n", "birds"}


def test_the_lexicon_is_small_and_has_its_licence() -> None:
    assert WORDS.stat().st_size < 300_000
    assert "WordNet 3.1 Copyright" in LICENCE.read_text()
    words = [line.split()[0] for line in gzip.decompress(WORDS.read_bytes()).decode().splitlines()]
    assert words == sorted(set(words)) and len(words) > 30_000
