"""Requests about the letters and words of a given text: repeat, reverse, spell, count, change.

The text a user gives must survive typing, so these requests are exact. Every answer is computed.
"""

from random import Random

from demo.request import Kind, Request
from demo.things import WORDS

_TEMPLATES = (
    "The {a} is near the {b}.",
    "I like {a} and {b}.",
    "We saw a {a} by the {b}.",
    "My {a} is new.",
    "Good morning, {a}!",
    "{a} {b}",
    "the {a} and the {b}",
    "One {a} is enough.",
    "A {a} never meets a {b}.",
    "Bring the {a} home.",
)


def _quoted(text: str, rng: Random) -> str:
    return rng.choice((text, f'"{text}"', f"'{text}'", text))


def _short_text(rng: Random) -> str:
    a, b = rng.sample(WORDS, 2)
    return rng.choice(_TEMPLATES).format(a=a, b=b)


def repeat(rng: Random) -> Request:
    """Say the given text again."""
    said = _short_text(rng)
    forms = (
        "Repeat after me: {t}",
        "Say: {t}",
        "Repeat this: {t}",
        "Please repeat: {t}",
        "Echo: {t}",
        "Say exactly this: {t}",
        "repeat after me: {t}",
    )
    text = rng.choice(forms).format(t=said)
    extra = "I repeated it word for word."
    return Request("repeat", text, said, said, extra, (said,), exact=True)


def reverse(rng: Random) -> Request:
    """Give the letters of a word from its end."""
    word = rng.choice([w for w in WORDS if len(w) <= 6])
    turned = word[::-1]
    forms = (
        "Reverse the word {w}.",
        "Write {w} backwards.",
        "What is {w} spelled backwards?",
        "Can you reverse {w}?",
        "Turn the word {w} around.",
        "reverse {w}",
    )
    letters = "-".join(turned)
    text = rng.choice(forms).format(w=_quoted(word, rng))
    full = f"{letters}, so {turned}."
    return Request(
        "reverse", text, letters, full, f"Read from the end, {word} becomes {turned}.",
        must=(letters,), exact=True,
    )  # fmt: skip


def spell(rng: Random) -> Request:
    """Give the letters of a word."""
    word = rng.choice(WORDS)
    letters = "-".join(word.upper())
    forms = (
        "Spell {w}.",
        "How do you spell {w}?",
        "Spell the word {w}.",
        "Can you spell {w} for me?",
        "Give me the letters of {w}.",
        "spell {w}",
    )
    text = rng.choice(forms).format(w=_quoted(word, rng))
    extra = f"It starts with {word[0].upper()} and ends with {word[-1].upper()}."
    return Request("spell", text, letters, f"{letters}.", extra, (letters,), exact=True)


def uppercase(rng: Random) -> Request:
    """Write a text in capital letters."""
    said = rng.choice(WORDS) if rng.random() < 0.6 else " ".join(rng.sample(WORDS, 2))
    forms = (
        "Write {t} in capital letters.",
        "Put {t} in uppercase.",
        "Make this uppercase: {t}",
        "Uppercase {t}.",
        "Say {t} in all caps.",
        "Shout the words: {t}",
    )
    text = rng.choice(forms).format(t=said)
    extra = "Now all letters are capitals."
    return Request("uppercase", text, said.upper(), said.upper() + ".", extra, (said.upper(),),
                   exact=True)  # fmt: skip


def first_letter(rng: Random) -> Request:
    """Name the first or last letter of a word."""
    word = rng.choice(WORDS)
    first = rng.random() < 0.6
    letter = word[0 if first else -1].upper()
    name = "first" if first else "last"
    forms = (
        "What is the {n} letter of {w}?",
        "Tell me the {n} letter of the word {w}.",
        "Which letter comes {n} in {w}?",
        "{n} letter of {w}?",
    )
    text = rng.choice(forms).format(n=name, w=_quoted(word, rng))
    full = f"The {name} letter of {word} is {letter}."
    extra = f"The whole word is {'-'.join(word.upper())}."
    return Request("first_letter", text, letter, full, extra, (f" is {letter}",), exact=True)


def count_letters(rng: Random) -> Request:
    """Count the letters of a word."""
    word = rng.choice(WORDS)
    forms = (
        "How many letters are in {w}?",
        "Count the letters in {w}.",
        "How long is the word {w}?",
        "How many letters does {w} have?",
    )
    text = rng.choice(forms).format(w=_quoted(word, rng))
    full = f"{'-'.join(word)} has {len(word)} letters."
    return Request("count_letters", text, str(len(word)), full, "I counted them one by one.",
                   (f"{len(word)}",), exact=True)  # fmt: skip


def count_words(rng: Random) -> Request:
    """Count the words of a text."""
    words = rng.sample(WORDS, rng.randint(2, 6))
    said = " ".join(words)
    forms = (
        "How many words are in: {t}",
        "Count the words: {t}",
        "How many words is this? {t}",
        "Count the words in this text: {t}",
    )
    full = f"There are {len(words)} words."
    extra = f"The last of them is {words[-1]}."
    return Request("count_words", rng.choice(forms).format(t=said), str(len(words)), full, extra,
                   (str(len(words)),), exact=True)  # fmt: skip


def last_word(rng: Random) -> Request:
    """Name the first or last word of a text."""
    words = rng.sample(WORDS, rng.randint(3, 6))
    first = rng.random() < 0.4
    word, name = (words[0], "first") if first else (words[-1], "last")
    forms = (
        "What is the {n} word of: {t}",
        "Give me the {n} word in this text: {t}",
        "Which word comes {n}? {t}",
    )
    text = rng.choice(forms).format(n=name, t=" ".join(words))
    full = f"The {name} word is {word}."
    extra = f"The text has {len(words)} words."
    return Request("last_word", text, word, full, extra, (word,), exact=True)


def next_letter(rng: Random) -> Request:
    """Name the letter before or after in the alphabet."""
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    at = rng.randint(1, 24)
    after = rng.random() < 0.7
    name, letter = ("after", alphabet[at + 1]) if after else ("before", alphabet[at - 1])
    forms = (
        "Which letter comes {n} {c}?",
        "What letter is {n} {c} in the alphabet?",
        "What comes {n} the letter {c}?",
        "Tell me the letter {n} {c}.",
    )
    text = rng.choice(forms).format(n=name, c=alphabet[at])
    full = f"{letter} comes {name} {alphabet[at]}."
    extra = f"The alphabet has 26 letters, and {letter} is one of them."
    return Request("next_letter", text, letter, full, extra, (full[:-1],), exact=True)


KINDS: tuple[Kind, ...] = (
    repeat,
    reverse,
    spell,
    uppercase,
    first_letter,
    count_letters,
    count_words,
    last_word,
    next_letter,
)
