"""Requests about numbers: counting, small sums, comparing, order and number words.

All numbers are small enough for a tiny network to get right. Every answer is computed, so no
table can disagree with it.
"""

# ruff: noqa: SIM905 - word tables read better as running text

from collections.abc import Sequence
from random import Random

from demo.request import Kind, Request

_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen"
).split()
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()


def in_words(number: int) -> str:
    """The English words for 0 to 99, and for 100."""
    if number < 20:
        return _ONES[number]
    if number == 100:
        return "one hundred"
    tens, ones = divmod(number, 10)
    return _TENS[tens - 2] + (f"-{_ONES[ones]}" if ones else "")


def _series(kind: str, text: str, numbers: Sequence[int]) -> Request:
    listed = ", ".join(map(str, numbers))
    extra = f"That makes {len(numbers)} numbers, from {numbers[0]} to {numbers[-1]}."
    return Request(kind, text, listed, f"{listed}.", extra, must=(f"{listed}.",))


def _count_limit(rng: Random) -> int:
    pick = rng.random()
    if pick < 0.75:
        return rng.randint(3, 20)
    return rng.randint(21, 50) if pick < 0.97 else 100


def count_up(rng: Random) -> Request:
    """Count from one to a number."""
    last = _count_limit(rng)
    shown = in_words(last) if rng.random() < 0.15 else str(last)
    forms = (
        "Count to {n}.",
        "Count up to {n}.",
        "Can you count to {n}?",
        "Count from 1 to {n}.",
        "List the numbers from 1 to {n}.",
        "Say the numbers 1 to {n}.",
        "I want you to count to {n}.",
        "Write the numbers up to {n}.",
    )
    return _series("count_up", rng.choice(forms).format(n=shown), range(1, last + 1))


def count_down(rng: Random) -> Request:
    """Count from a number down to one."""
    first = rng.randint(3, 20) if rng.random() < 0.8 else rng.randint(21, 30)
    forms = (
        "Count down from {n}.",
        "Count backwards from {n}.",
        "Count from {n} down to 1.",
        "Give me a countdown from {n}.",
        "Start a countdown at {n}.",
        "Count back from {n} to 1.",
    )
    return _series("count_down", rng.choice(forms).format(n=first), range(first, 0, -1))


def count_between(rng: Random) -> Request:
    """Count from one number to another."""
    first = rng.randint(2, 60)
    last = first + rng.randint(3, 12)
    forms = (
        "Count from {a} to {b}.",
        "List the numbers from {a} to {b}.",
        "Can you count from {a} up to {b}?",
        "Say all numbers between {a} and {b}.",
        "Start at {a} and count to {b}.",
    )
    return _series(
        "count_between", rng.choice(forms).format(a=first, b=last), range(first, last + 1)
    )


def count_by(rng: Random) -> Request:
    """Count in steps."""
    step = rng.choice((2, 2, 5, 5, 10, 10, 3))
    last = step * rng.randint(3, 10)
    shown = rng.choice((str(step), {2: "twos", 3: "threes", 5: "fives", 10: "tens"}[step]))
    forms = (
        "Count by {s} to {n}.",
        "Count up to {n} by {s}.",
        "Count in {s} up to {n}.",
        "Skip count by {s} until {n}.",
    )
    text = rng.choice(forms).format(s=shown, n=last)
    return _series("count_by", text, range(step, last + 1, step))


def _sum(kind: str, rng: Random, a: int, sign: str, b: int, result: int) -> Request:
    word = {"+": "plus", "-": "minus", "*": "times"}[sign]
    forms = {
        "+": ("Add {a} and {b}.", "What is the sum of {a} and {b}?", "{a} and {b} makes?"),
        "-": ("Subtract {b} from {a}.", "Take {b} away from {a}.", "What is {a} less {b}?"),
        "*": ("Multiply {a} by {b}.", "What do you get for {a} times {b}?", "{a} times {b}?"),
    }[sign]
    common = (
        f"What is {{a}} {sign} {{b}}?",
        f"What is {{a}} {word} {{b}}?",
        f"How much is {{a}} {word} {{b}}?",
        f"{{a}} {sign} {{b}} = ?",
        f"{{a}}{sign}{{b}}",
        f"Calculate {{a}} {sign} {{b}}.",
        f"Tell me {{a}} {word} {{b}}.",
    )
    text = rng.choice(common + forms).format(a=a, b=b)
    full = f"{a} {word} {b} is {result}."
    extra = f"In words, the result is {in_words(result)}."
    return Request(kind, text, str(result), full, extra, must=(str(result),))


def add(rng: Random) -> Request:
    """Add two numbers up to twenty."""
    top = 10 if rng.random() < 0.5 else 20
    a, b = rng.randint(0, top), rng.randint(0, top)
    return _sum("add", rng, a, "+", b, a + b)


def subtract(rng: Random) -> Request:
    """Take one number from a larger one."""
    a = rng.randint(1, 10 if rng.random() < 0.5 else 20)
    b = rng.randint(0, a)
    return _sum("subtract", rng, a, "-", b, a - b)


def multiply(rng: Random) -> Request:
    """Multiply two numbers up to ten."""
    a, b = rng.randint(1, 10), rng.randint(1, 10)
    return _sum("multiply", rng, a, "*", b, a * b)


def compare(rng: Random) -> Request:
    """Pick the larger or smaller of two numbers."""
    a, b = rng.sample(range(1, 100), 2)
    larger = rng.random() < 0.6
    result = max(a, b) if larger else min(a, b)
    word = rng.choice(("bigger", "larger", "greater") if larger else ("smaller", "less"))
    forms = (
        "Which is {w}, {a} or {b}?",
        "Which number is {w}: {a} or {b}?",
        "{a} or {b}, which one is {w}?",
        "What is {w}, {a} or {b}?",
    )
    text = rng.choice(forms).format(w=word, a=a, b=b)
    shown = "bigger" if larger else "smaller"
    full = f"{result} is {shown}."
    extra = f"The numbers {a} and {b} are {abs(a - b)} apart."
    return Request("compare", text, str(result), full, extra, must=(full[:-1],))


def even_odd(rng: Random) -> Request:
    """Tell even from odd."""
    number = rng.randint(1, 99)
    word = "odd" if number % 2 else "even"
    forms = (
        "Is {n} even or odd?",
        "Is {n} an odd or an even number?",
        "Tell me if {n} is odd or even.",
        "Odd or even: {n}?",
    )
    text = rng.choice(forms).format(n=number)
    extra = f"Its last digit is {number % 10}, and that decides it."
    return Request("even_odd", text, word.capitalize(), f"{number} is {word}.", extra, (word,))


def neighbour(rng: Random) -> Request:
    """Name the number before or after."""
    number = rng.randint(1, 99)
    after = rng.random() < 0.6
    result = number + 1 if after else number - 1
    word = "after" if after else "before"
    forms = (
        "What number comes {w} {n}?",
        "Which number is right {w} {n}?",
        "What comes {w} {n}?",
        "Tell me the number {w} {n}.",
    )
    text = rng.choice(forms).format(w=word, n=number)
    full = f"{result} comes {word} {number}."
    extra = f"You only need to {'add' if after else 'take away'} one."
    return Request("neighbour", text, str(result), full, extra, must=(str(result),))


def number_word(rng: Random) -> Request:
    """Write a number in words."""
    number = rng.randint(0, 100)
    word = in_words(number)
    forms = (
        "Write {n} in words.",
        "How do you write {n} as a word?",
        "What is {n} in words?",
        "Spell out the number {n}.",
    )
    text = rng.choice(forms).format(n=number)
    full = f"{number} in words is {word}."
    return Request("number_word", text, word, full, "Numbers can be read aloud.", (word,))


def double_half(rng: Random) -> Request:
    """Double or halve a number."""
    number = rng.randint(1, 20)
    if rng.random() < 0.5:
        text = rng.choice(("Double {n}.", "What is double {n}?", "What is twice {n}?"))
        name, given, result = "double", number, number * 2
    else:
        text = rng.choice(("What is half of {n}?", "Halve {n}.", "How much is half of {n}?"))
        name, given, result = "half", number * 2, number
    full = f"The {name} of {given} is {result}."
    extra = f"{min(given, result)} and {min(given, result)} make {max(given, result)}."
    return Request(
        "double_half", text.format(n=given), str(result), full, extra, must=(str(result),)
    )


KINDS: tuple[Kind, ...] = (
    count_up,
    count_down,
    count_between,
    count_by,
    add,
    subtract,
    multiply,
    compare,
    even_odd,
    neighbour,
    number_word,
    double_half,
)
