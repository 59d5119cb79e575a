"""A prompt's words as what they may be: each with its lemma and its possible parts of speech.

A reading is kept if the word before it allows it; nothing is parsed. Knows the lexicon, not what
the words are good for. Invariant: at most `MOST_WORDS` words are read, the first and the last, so
that the time is bounded whatever the prompt's length.
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
_TOKEN = re.compile(r"[A-Za-z]+(?:'[a-z]+)?|\d+[.)]?|[?!.;:]|,|\n+[^\S\n]*[-*•]|\n+")

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
        """Whether it is read as a noun, or stands for one."""
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
    if len(text) <= 2 * _EDGE_CHARACTERS:
        tokens = _TOKEN.findall(text)
    else:
        edges = text[:_EDGE_CHARACTERS], text[-_EDGE_CHARACTERS:]
        tokens = [token for edge in edges for token in _TOKEN.findall(edge)]
    if len(tokens) > MOST_WORDS:
        tokens = tokens[: MOST_WORDS // 2] + tokens[-MOST_WORDS // 2 :]
    return tokens


def _open(lower: str, readings: Readings, before: Word) -> Word:
    order = _order(before)
    parts = [part for part in order if part in readings] or sorted(readings)
    lemma = readings[parts[0]][0]
    return Word(lower, "word", lemma, tuple((part, readings[part][1]) for part in parts))


def _order(before: Word) -> str:
    """The parts of speech that a word may be after another, the likeliest first."""
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
