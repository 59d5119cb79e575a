"""Reads answers as a person would skim them: are they broken, and do they still say the same?

Pure functions of texts. A win rate can be perfect for a model that answers "Mmmm" to everything,
and the base model may find broken answers likelier than sound ones. So the text itself is examined.
Invariant: nothing here knows what the feedback asked for; `gate.py` compares.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

_WORD = re.compile(r"\w+", re.UNICODE)
_DRAWN_OUT = re.compile(r"([^\W_])\1{11}", re.UNICODE | re.IGNORECASE)
# One letter, syllable, word or symbol eight times; digits, lines and blanks may be sound.
_STRETCHED = re.compile(
    r"((?:[^\W\d_]|[!?]|[^\x00-\x7f\s\u2010-\u2027\u2500-\u259f])\D{0,11}?)\1{7,}",
    re.UNICODE | re.IGNORECASE,
)
# All of an answer is one to twelve letters or digits, four times or more.
_ONE_THING = re.compile(r"\W*(\w{1,12}?)(?:\W{0,3}\1){3,}\W*", re.UNICODE | re.IGNORECASE)
_AGAIN = re.compile(r"(\w{1,4}?)\1+", re.UNICODE)
_UNSPACED = re.compile(
    r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\u3130\u3190-\u9fff\uf900-\ufaff"
    r"\U00020000-\U0003ffff]"
)
_GRAM = 4
_LONGEST_RUN = 6
_MOST_REPEATED = 0.5
_MANY_TOKENS = 16
_LEAST_WORDS = 8  # in which repetition is looked for, beside all of an answer
_ENDLESS_TIMES = 4  # the base's tokens
_FEW_WORDS = 2
_OFTEN = 4  # the one symbol of an answer
# Replacements and controls (Cc).
_BROKEN = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufffd]")
_CUT = "\N{REPLACEMENT CHARACTER}"
# Stop words: common words without content.
_COMMON = frozenset(
    _WORD.findall(
        "a an and are as at be but by can do does for from has have how i in is it its of on or "
        "that the their there they this to was were what when which who will with you your"
    )
)


@dataclass(frozen=True, slots=True)
class AnswerText:
    """An answer as it is examined; `ended` says that the model ended it, not the limit."""

    text: str
    tokens: int
    ended: bool


def words(text: str) -> list[str]:
    """Words in lower case. Of scripts without spaces between words (Chinese, Japanese, Thai, Lao,
    Khmer, Burmese), each letter counts as a word."""
    if text.isascii():
        return _WORD.findall(text.lower())
    found: list[str] = []
    for word in _WORD.findall(text.lower()):
        found.extend(word if _UNSPACED.search(word) else (word,))
    return found


def fault(answer: AnswerText, before: AnswerText, longer: int = 0) -> str | None:
    """What is broken in an answer to a prompt that the base model answered with `before`; None if
    nothing is. A fault that the base's own answer also has is ignored. `longer`: how many tokens
    more than the base's own answers are asked to have."""
    found = _fault(answer, before, longer)
    return None if found is None or _fault(before, before) == found else found


def fault_alone(answer: AnswerText) -> str | None:
    """What is broken in an answer whatever it was asked for, such as a live one; None if nothing
    is. A brief answer may have no word (a symbol, say), and a limit may cut a character in two."""
    text = answer.text if answer.ended else answer.text.rstrip(_CUT)
    marks, letters = sum(map(len, text.split())), sum(map(len, words(text)))
    if answer.tokens < _MANY_TOKENS and marks and not letters:
        return "broken characters" if _broken(text) else None
    if answer.tokens >= _MANY_TOKENS and marks > 10 * letters:
        return "almost no words"
    return _fault(replace(answer, text=text), AnswerText("", 0, ended=False))


def _fault(answer: AnswerText, before: AnswerText, longer: int = 0) -> str | None:
    said = words(answer.text)
    symbols = frozenset[str]() if said else _symbols(answer.text)
    if not said and not symbols:
        return "empty"
    if not said and answer.tokens >= _MANY_TOKENS:
        return "almost no words"
    if len(symbols) == 1 and answer.text.count(min(symbols)) >= _OFTEN:
        return "one word over and over"
    if _broken(answer.text) > _broken(before.text):
        return "broken characters"
    if _longest_run(said) >= _LONGEST_RUN or _DRAWN_OUT.search(answer.text):
        return "one word over and over"
    if _ONE_THING.fullmatch(answer.text):
        return "one word over and over"
    if _loops(said):
        return "repetition"
    enough = _ENDLESS_TIMES * (before.tokens + longer)
    if before.ended and not answer.ended and answer.tokens >= enough:
        return "endless"
    return None


def repeated(said: Sequence[str]) -> float:
    """Share of four-word sequences in an answer that are repeats."""
    grams = [tuple(said[at : at + _GRAM]) for at in range(len(said) - _GRAM + 1)]
    return 1.0 - len(set(grams)) / len(grams) if grams else 0.0


def repeats(text: str) -> bool:
    """Whether an answer to be imitated repeats itself, all of it or from its middle on, or is
    mostly one thing again and again. One of few words or of numbers is for the gate to judge."""
    if 2 * sum(len(match[0]) for match in _STRETCHED.finditer(text)) > len(text):
        return True
    said = words(text)
    numbers = sum(map(str.isdigit, said))
    return len(said) >= max(_LEAST_WORDS, 2 * numbers) and _loops(said)


def overlap(answer: str, before: str) -> float:
    """Share of the content words of `before` that `answer` has too; 1.0 if `before` has none."""
    wanted = Counter(word for word in words(before) if word not in _COMMON)
    if not wanted:
        return 1.0
    there = Counter(words(answer))
    return sum((wanted & there).values()) / wanted.total()


def scripts(text: str) -> Counter[str]:
    """How many letters each script has, by the first word of their Unicode names."""
    return Counter(
        unicodedata.name(letter, "?").partition(" ")[0] for letter in text if letter.isalpha()
    )


def few_words(answer: AnswerText, before: AnswerText) -> frozenset[str] | None:
    """The words of an answer with one or two different ones, where the base has at least six in
    all; None of any other. What is repeated within a word counts once: `0000` is `0`. Where there
    is no word, symbols are the words."""
    said = frozenset(_AGAIN.sub(r"\1", word) for word in words(answer.text))
    few = len(said) <= _FEW_WORDS
    said = said or _symbols(answer.text)
    return said if said and few and len(words(before.text)) // 2 > _FEW_WORDS else None


def foreign(text: str, *usual: Counter[str]) -> bool:
    """Whether most letters are of scripts that make up less than 2% of each of `usual`."""
    found, known = scripts(text), [each for each in usual if each]
    if not found or not known:
        return False
    strange = sum(
        number
        for script, number in found.items()
        if all(each[script] < 0.02 * each.total() for each in known)
    )
    return strange > 0.5 * found.total()


def _symbols(text: str) -> frozenset[str]:
    """Its symbols (an emoji, a tick, an arrow), without those of ASCII."""
    return frozenset(
        each for each in text if not each.isascii() and unicodedata.category(each)[0] == "S"
    )


def _loops(said: Sequence[str]) -> bool:
    """Whether an answer repeats itself, all of it or from its middle on."""
    later = said[len(said) // 2 :]
    parts = [said, later] if len(later) >= _LEAST_WORDS else [said]
    return any(repeated(part) > _MOST_REPEATED for part in parts)


def _broken(text: str) -> int:
    """Number of replacement and control characters."""
    return len(_BROKEN.findall(text))


def _longest_run(items: Sequence[str]) -> int:
    longest = run = 0
    for at, item in enumerate(items):
        run = run + 1 if at and item == items[at - 1] else 1
        longest = max(longest, run)
    return longest
