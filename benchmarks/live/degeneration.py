"""Whether an answer is broken: the studies' own measure, independent of the product's gate.

Form only: repetition, runs, noise, broken characters, no end. Knows no model. Invariant: what the
base model's answer to the same question shows too is not held against another answer.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable

from benchmarks.live.api import Answer

GRAM = 4
REPEATED_SHARE = 0.5
RUN = 6
CHARACTER_RUN = 12
SHORT_WORDS = 2
NOISE_SHARE = 0.3
NOISE_CHARACTERS = 15
NOISE_LETTERS = 0.6
SCRIPT_SHARE = 0.5
PROSE_WORDS = 8
PROSE_SHARE = 0.2
SALAD_SHARE = 0.08

_WORD = re.compile(r"[^\W_]+(?:['’][^\W_]+)*")
_LETTERS_RUN = re.compile(rf"([^\W\d_]{{1,4}}?)\1{{{RUN - 1},}}", re.IGNORECASE)
_CHARACTER_RUN = re.compile(rf"(\S)\1{{{CHARACTER_RUN - 1},}}")
_ODD = re.compile(r"(?i:[bcdfghjklmnpqrstvwxz]{5})|[a-z][A-Z]|[A-Za-z]\d|\d[A-Za-z]|.{25}")
_VOWEL = re.compile("[aeiouyAEIOUY0-9]")
_MARKUP = "|-*#"
_SMALL = (
    "a about also an and are as at be been but by can for from had has have he her his i if in into"
    " is it its like may more most not of on one or our she so some such than that the their them"
    " there these they this to up used was we were what when which who will with would you your"
)
# Of German, French, Spanish and Italian: a sentence in another language is no salad.
_SMALL_ELSEWHERE = (
    "aber auf das der die ein eine es ich ist mit nicht sehr und zu"
    " dans de des du elle est et il je la le les mais ne pas pour que qui un une"
    " con el en es la las lo los me mi muy no para pero por se su una y"
    " che di e gli ha ho il io ma mi non per sono"
)
_FUNCTION_WORDS = frozenset(f"{_SMALL} {_SMALL_ELSEWHERE}".split())


def words(text: str) -> list[str]:
    """In lower case, in order."""
    return [word.lower() for word in _WORD.findall(text)]


def problem(answer: Answer, base: Answer | None = None, *, brief: bool = False) -> str:
    """What is wrong with the form of `answer`; empty if nothing is.

    `base` is the base model's answer to the same question. `brief`: one or two words are welcome.
    """
    for name, found in _CHECKS.items():
        if brief and name == "short":
            continue
        if found(answer, base) and not (base is not None and found(base, None)):
            return name
    return ""


def overlap(text: str, other: str, asked: str = "") -> float:
    """Distinct words of four letters or more that both have, over those of the one with fewer.
    Words of the question `asked` do not count: any sentence about its subject has them."""
    one, two = (_content(each) - _content(asked) for each in (text, other))
    return len(one & two) / min(len(one), len(two)) if one and two else 0.0


def _content(text: str) -> set[str]:
    return {word for word in words(text) if len(word) >= 4}


def _empty(answer: Answer, base: Answer | None) -> bool:
    return not words(answer.text)


def _broken(answer: Answer, base: Answer | None) -> bool:
    """A replacement character or a control character."""
    return any(
        letter == "\ufffd" or (unicodedata.category(letter) == "Cc" and letter not in "\n\r\t")
        for letter in answer.text
    )


def _run(answer: Answer, base: Answer | None) -> bool:
    """One word, or up to four letters, six times in a row; any one character twelve times."""
    if _LETTERS_RUN.search(answer.text) or _CHARACTER_RUN.search(answer.text):
        return True
    said, length = words(answer.text), 1
    for word, before in zip(said[1:], said, strict=False):
        length = length + 1 if word == before else 1
        if length >= RUN:
            return True
    return False


def _repetition(answer: Answer, base: Answer | None) -> bool:
    """Over half of the sequences of four words (of characters, without spaces) came before."""
    said = words(answer.text)
    units = said if len(said) >= 2 * GRAM else list("".join(answer.text.split()))
    if len(units) < 3 * GRAM:
        return False
    grams = [tuple(units[at : at + GRAM]) for at in range(len(units) - GRAM + 1)]
    return len(set(grams)) < (1.0 - REPEATED_SHARE) * len(grams)


def _short(answer: Answer, base: Answer | None) -> bool:
    """Two words at most, again and again or not, where the base has more to say."""
    longer = base is None or len(words(base.text)) > SHORT_WORDS
    return len(set(words(answer.text))) <= SHORT_WORDS and longer


def _endless(answer: Answer, base: Answer | None) -> bool:
    """No end within the limit, within which the base ends."""
    return base is not None and base.ended and not answer.ended


def _noise(answer: Answer, base: Answer | None) -> bool:
    """Few letters among the characters that mark up no text, or many words that nobody can
    pronounce: without a vowel, five consonants in a row, digits or capitals inside, too long."""
    marks = [letter for letter in answer.text if not letter.isspace() and letter not in _MARKUP]
    letters = sum(letter.isalpha() for letter in marks)
    if len(marks) >= NOISE_CHARACTERS and letters < NOISE_LETTERS * len(marks):
        return True
    longer = [word for word in _WORD.findall(answer.text) if len(word) >= 3 and word.isascii()]
    odd = sum(bool(_ODD.search(word)) or not _VOWEL.search(word) for word in longer)
    return len(longer) >= 4 and odd > NOISE_SHARE * len(longer)


def _salad(answer: Answer, base: Answer | None) -> bool:
    """Words without the small ones that make sentences, where the base makes sentences."""
    if base is None or _small_words(base.text) < PROSE_SHARE:
        return False
    return len(words(answer.text)) >= PROSE_WORDS and _small_words(answer.text) < SALAD_SHARE


def _small_words(text: str) -> float:
    said = words(text)
    return sum(word in _FUNCTION_WORDS for word in said) / len(said) if said else 0.0


def _script(answer: Answer, base: Answer | None) -> bool:
    """Mostly letters of another script than the base's Latin ones."""
    return base is not None and _foreign(answer.text) > SCRIPT_SHARE > _foreign(base.text)


def _foreign(text: str) -> float:
    letters = [letter for letter in text if letter.isalpha()]
    if not letters:
        return 0.0
    return sum("LATIN" not in unicodedata.name(each, "") for each in letters) / len(letters)


_CHECKS: dict[str, Callable[[Answer, Answer | None], bool]] = {
    "empty": _empty,
    "broken": _broken,
    "run": _run,
    "repetition": _repetition,
    "short": _short,
    "noise": _noise,
    "salad": _salad,
    "script": _script,
    "endless": _endless,
}
