"""A prompt's words as what they may be: each with its lemma and its possible parts of speech.

A reading is kept if the word before it allows it; nothing is parsed. Knows the lexicon, not the
scores. Invariant: at most `MOST_WORDS` words and marks are read, the first and the last, so that
the time is bounded whatever the prompt's length.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from tandem.services.lengths.lexicon import Lexicon, Readings
from tandem.services.lengths.wordlists import (
    AUXILIARIES,
    CONJUNCTIONS,
    DETERMINERS,
    MODALS,
    PREPOSITIONS,
    PRONOUNS,
    SUBJECTS,
)

MOST_WORDS = 80
_EDGE_CHARACTERS = 400
_TOKEN = re.compile(r"[A-Za-z]+(?:'[A-Za-z]+)?|\d+[.)]?|[?!.;:]|,|\n+[^\S\n]*[-*•]|\n+")
# The lookbehind keeps the search for the last word from starting in the middle of each word.
_LAST_WORD, _FIRST_WORD = re.compile(r"(?<![\w'’])[\w'’]+$"), re.compile(r"^[\w'’]+")

Kind = Literal["word", "determiner", "pronoun", "auxiliary", "preposition", "conjunction", "mark"]


@dataclass(frozen=True, slots=True)
class Word:
    """A word or a mark. `parts` are readings of an open word (n, v, a, r) that its place allows,
    the first the likeliest, with their numbers of senses; `lemma` is the first reading's."""

    text: str
    kind: Kind
    lemma: str
    parts: tuple[tuple[str, int], ...] = ()

    @property
    def noun(self) -> bool:
        """Whether it is read as a noun, or is a pronoun."""
        return self.kind == "pronoun" or (self.parts != () and self.parts[0][0] == "n")

    @property
    def verb(self) -> bool:
        """Whether it is read as a verb."""
        return self.parts != () and self.parts[0][0] == "v"


_KINDS: tuple[tuple[frozenset[str], Kind], ...] = (
    (AUXILIARIES, "auxiliary"),
    (DETERMINERS, "determiner"),
    (PRONOUNS, "pronoun"),
    (PREPOSITIONS, "preposition"),
    (CONJUNCTIONS, "conjunction"),
)
_SMALL: dict[str, Kind] = {word: kind for words, kind in reversed(_KINDS) for word in words}


def read(text: str, lexicon: Lexicon) -> list[Word]:
    """The words and marks of a text, in order."""
    found, before = list[Word](), Word(".", "mark", ".")
    for token in _tokens(text):
        lower = token.lower()
        if not lower[0].isalpha():
            word = Word("\n" if lower[0] == "\n" else lower[:1], "mark", lower.strip())
        elif kind := _SMALL.get(lower):
            word = Word(lower, kind, lower)
        else:
            word = _open(lower, lexicon.readings(lower.partition("'")[0]), before)
        found.append(word)
        before = word
    return found


def _tokens(text: str) -> list[str]:
    """Of a long text the beginning and the end, with the mark of a new line between them."""
    edge, half = _EDGE_CHARACTERS, MOST_WORDS // 2
    if len(text) <= 2 * edge:
        first = last = _find(text)
        if len(first) <= MOST_WORDS:
            return first
    else:  # words that the cuts would halve are left out
        first = _find(_LAST_WORD.sub("", text[: edge + 1]))
        last = _find(_FIRST_WORD.sub("", text[-edge - 1 :]))
    return [*first[:half], "\n", *last[1 - half :]]


def _find(text: str) -> list[str]:
    return _TOKEN.findall(text.replace("’", "'"))


def _open(lower: str, readings: Readings, before: Word) -> Word:
    order = _order(before)
    parts = [part for part in order if part in readings] or sorted(readings)
    lemma = readings[parts[0]][0]
    return Word(lower, "word", lemma, tuple((part, readings[part][1]) for part in parts))


def _order(before: Word) -> str:
    """Possible parts of speech after `before`, the likeliest first."""
    if before.text in MODALS or before.text in SUBJECTS:
        return "vra"
    if before.kind in ("determiner", "preposition"):
        return "nar"
    if before.kind == "auxiliary":
        return "vanr"
    if before.parts and before.parts[0][0] == "a":
        return "nar"
    if before.noun:
        return "vnar"
    return "nvar"
