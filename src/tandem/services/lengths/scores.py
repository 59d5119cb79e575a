"""Six scores of what makes an answer long (RT-LM, sections II-B and III-B, table I).

Each counts one source of linguistic uncertainty. The rules are ours, since the paper prints one of
them (listing 1); docs/lengths.md compares them with it. Knows words, not lengths. Invariant: a
score is 0 without its source and grows with it; nothing is remembered between two texts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass

from tandem.services.lengths.lexicon import Lexicon
from tandem.services.lengths.word_readings import Word, read
from tandem.services.lengths.wordlists import (
    CLOSED_WORDS,
    COPULAS,
    LISTING,
    NEVER_FREE,
    NUMBERED,
    OPEN_WORDS,
    VAGUE,
)

_MANY_SENSES = 5
_MOST_SITES = 4  # to which a phrase may belong
_ENDS = ".?!;:\n"


@dataclass(frozen=True, slots=True)
class Uncertainty:
    """Scores of one text."""

    structural: float  # phrases that may belong to several words before them
    syntactic: float  # further parts of speech that words may be
    semantic: float  # bits of choosing among the senses of words that have many
    vague: float  # broad ideas and general words
    open_ended: float  # what asks for context, background or explanations
    parts: float  # sub-questions, listed things, further sentences that ask

    @property
    def features(self) -> tuple[float, ...]:
        """The six, in the order of the paper's table."""
        return astuple(self)

    def single_rule(self, input_tokens: int) -> float:
        """The score of the text's primary source; without a source, the length of the input."""
        return max(self.features) or float(input_tokens)


class Scorer:
    """Scores texts, with one lexicon."""

    def __init__(self, lexicon: Lexicon) -> None:
        self._lexicon = lexicon

    def score(self, text: str) -> Uncertainty:
        """The scores of what a user says; of a long text, of its beginning and its end."""
        words = read(text, self._lexicon)
        return Uncertainty(
            structural=_structural(words),
            syntactic=_syntactic(words),
            semantic=_semantic(words),
            vague=float(sum(word.lemma in VAGUE for word in words)),
            open_ended=_open_ended(words),
            parts=_parts(words),
        )


def _structural(words: Sequence[Word]) -> float:
    """A prepositional phrase after a verb and n nouns may belong to any of them: n further ways.
    So may an adjective before two joined nouns: one."""
    total, nouns, verb = 0, 0, False
    for place, word in enumerate(words):
        if word.kind == "mark" and word.text in _ENDS:
            nouns, verb = 0, False
        elif word.kind == "preposition":
            free = verb and words[place - 1].noun and word.text not in NEVER_FREE
            total += min(nouns, _MOST_SITES) if free else 0
        elif word.text in ("and", "or"):
            total += _shared_adjective(words, place)
        elif word.verb or word.kind == "auxiliary":
            nouns, verb = 0, True
        elif word.noun and verb:
            nouns += 1
    return float(total)


def _shared_adjective(words: Sequence[Word], joined: int) -> int:
    near = words[max(0, joined - 2) : joined + 2]
    if len(near) < 4:
        return 0
    first, second, _, third = near
    described = any(part == "a" for part, _ in first.parts)
    return int(described and second.noun and third.noun)


def _syntactic(words: Sequence[Word]) -> float:
    return float(sum(max(0, len({part for part, _ in word.parts}) - 1) for word in words))


def _semantic(words: Sequence[Word]) -> float:
    return sum(
        math.log2(word.parts[0][1])
        for word in words
        if word.parts and word.parts[0][1] >= _MANY_SENSES
    )


def _open_ended(words: Sequence[Word]) -> float:
    """Words that ask for more than a fact; a question for one fact takes one back."""
    total, begins = 0, True
    for place, word in enumerate(words):
        after = words[place + 1].text if place + 1 < len(words) else ""
        if word.text == "how" and after in NUMBERED:
            total -= 1
        elif word.lemma in OPEN_WORDS or (word.text == "what" and begins):
            total += 1
        elif begins and (word.text in COPULAS or word.text in CLOSED_WORDS):
            total -= 1
        begins = word.kind == "mark"
    return float(max(0, total))


def _parts(words: Sequence[Word]) -> float:
    """Joined and listed things, and sentences beyond the first."""
    total, sentences, open_sentence = 0, 0, False
    for word in words:
        if word.kind != "mark":
            open_sentence = True
            total += word.text in ("and", "or") or word.text in LISTING
        elif word.text == ",":
            total += 1
        elif word.text in _ENDS and open_sentence:
            sentences, open_sentence = sentences + 1, False
    return float(total + max(0, sentences + open_sentence - 1))
