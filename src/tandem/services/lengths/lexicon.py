"""English words: their parts of speech and numbers of senses, from WordNet.

`words.txt.gz` was compiled from WordNet 3.1 (`benchmarks/lengths/words.py`), whose licence lies
beside it. Knows words, not sentences. Invariant: a word that is not there is a noun with one sense,
and looking up a word again costs one lookup, for a bounded number of words.
"""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from tandem.services.lengths.wordlists import IRREGULAR

WORDS = Path(__file__).with_name("words.txt.gz")
LICENCE = Path(__file__).with_name("LICENSE.wordnet")

_MOST_KEPT = 20_000
_READING = re.compile(r"([nvar])(\d+)")
# Endings of inflected forms, what stands there in the lemma, and the part of speech.
_ENDINGS = (
    ("ies", "y", "nv"),
    ("ves", "f", "n"),
    ("es", "e", "nv"),
    ("es", "", "nv"),
    ("s", "", "nv"),
    ("ied", "y", "v"),
    ("ed", "e", "v"),
    ("ed", "", "v"),
    ("ing", "e", "v"),
    ("ing", "", "v"),
    ("ier", "y", "a"),
    ("iest", "y", "a"),
    ("er", "", "a"),
    ("est", "", "a"),
)
_DOUBLED = re.compile(r"(.)\1$")

Readings = Mapping[str, tuple[str, int]]
"""By part of speech (n, v, a, r): the lemma, and how many senses it has as that."""


class Lexicon:
    """Looks words up."""

    def __init__(self, senses: Mapping[str, Mapping[str, int]]) -> None:
        self._senses = senses
        self._kept: dict[str, Readings] = {}

    @classmethod
    def load(cls) -> Lexicon:
        """The one that is shipped; a process reads the file once."""
        return cls(_shipped())

    def readings(self, word: str) -> Readings:
        """What a word in lower case may be."""
        found = self._kept.get(word)
        if found is None:
            if len(self._kept) >= _MOST_KEPT:
                self._kept.clear()
            found = self._kept[word] = self._look_up(word)
        return found

    def _look_up(self, word: str) -> Readings:
        found: dict[str, tuple[str, int]] = {}
        for lemma, parts in self._lemmas(word):
            for part, number in self._senses.get(lemma, {}).items():
                if part in parts:
                    found.setdefault(part, (lemma, number))
        return found or {"n": (word, 1)}

    def _lemmas(self, word: str) -> Iterator[tuple[str, str]]:
        """The word itself, then what it may be a form of, each with the parts of speech that the
        form has."""
        yield word, "nvar"
        if irregular := IRREGULAR.get(word):
            yield irregular, "nv"
        for ending, instead, parts in _ENDINGS:
            if word.endswith(ending) and len(word) > len(ending) + 1:
                stem = word[: -len(ending)]
                yield stem + instead, parts
                if not instead and ending[0] in "ei" and _DOUBLED.search(stem):
                    yield stem[:-1], parts


@cache
def _shipped() -> Mapping[str, Mapping[str, int]]:
    senses: dict[str, dict[str, int]] = {}
    for line in gzip.decompress(WORDS.read_bytes()).decode().splitlines():
        word, _, parts = line.partition(" ")
        senses[word] = {part: int(number) for part, number in _READING.findall(parts)}
    return senses
