"""Dialogues in which the user tells something and asks for it later.

Between telling and asking other turns may stand; the caller supplies them in the same style.
"""

# ruff: noqa: SIM905 - word tables read better as running text

from collections.abc import Sequence
from random import Random

from demo.request import Message, Request
from demo.style import Style, answer

NAMES: tuple[str, ...] = tuple(
    (
        "Anna Ben Carla David Emma Felix Grace Henry Irene Jack Karen Leo Maria Noah Olivia Paul "
        "Quinn Rosa Sam Tina Uma Victor Wendy Xavier Yara Zoe Alice Bob Clara Daniel Elena Frank "
        "Gina Hugo Isabel James Kate Liam Mona Nina Oscar Peter Rita Simon Tom Ursula Vera Will "
        "Alex Bella Chris Diana Eric Fiona George Hannah Ivan Julia Kevin Laura Mark Nora Omar "
        "Priya Ravi Sofia Theo Vikram Wei Yuki Aisha Bruno Chen Diego Fatima Hana Igor Jonas Kofi "
        "Lena Max Mei Mike Lucy Sarah John Mary Robert Linda Steve Amy Tim Eva Ali Ada Alan Ines"
    ).split()
)

_FAVOURITES: dict[str, tuple[str, ...]] = {
    "colour": ("red", "blue", "green", "yellow", "purple", "orange", "pink", "black", "white"),
    "animal": ("cat", "dog", "horse", "owl", "fox", "rabbit", "tiger", "dolphin", "bear"),
    "food": ("pizza", "soup", "rice", "pasta", "salad", "bread", "cheese", "cake", "curry"),
    "season": ("spring", "summer", "autumn", "winter"),
    "number": ("3", "4", "7", "8", "9", "12", "21", "42"),
    "sport": ("football", "tennis", "swimming", "chess", "running", "cycling", "golf"),
}


def _told_name(rng: Random) -> tuple[Request, Request]:
    name = rng.choice(NAMES)
    greeting = rng.choice(("", "", "Hi! ", "Hello! ", "Hey! "))
    tell = rng.choice(("My name is {n}.", "I am {n}.", "I'm {n}.", "Call me {n}.", "{n} here."))
    told = Request(
        "tell_name",
        greeting + tell.format(n=name),
        f"Hello, {name}.",
        f"Nice to meet you, {name}. How can I help?",
        must=(name,),
        styled={
            "casual": (f"Hey {name}! What's up?", f"Hi {name}, cool to meet you!"),
            "formal": (f"Good day, {name}. How may I assist you?",),
            "polite": (f"Thank you for telling me, {name}. It is lovely to meet you.",),
            "rude": (f"Okay, {name}. What do you want?", f"Fine, {name}. Now what?"),
            "verbose": (
                f"Hello, {name}, it is very nice to meet you. I will keep your name in mind while "
                "we talk. What would you like to do first?",
            ),
        },
        exact=True,
    )
    ask = ("What is my name?", "What's my name?", "Do you remember my name?", "Who am I?")
    asked = Request(
        "ask_name",
        rng.choice(ask),
        name,
        f"Your name is {name}.",
        "You told me earlier in this talk.",
        must=(name,),
    )
    return told, asked


def _told_favourite(rng: Random) -> tuple[Request, Request]:
    topic = rng.choice(tuple(_FAVOURITES))
    choice = rng.choice(_FAVOURITES[topic])
    word = "favorite" if rng.random() < 0.4 else "favourite"
    tell = rng.choice(("My {w} {t} is {c}.", "{c} is my {w} {t}.", "Remember, my {w} {t} is {c}."))
    full = f"I will remember that your favourite {topic} is {choice}."
    told = Request(
        "tell_favourite",
        tell.format(w=word, t=topic, c=choice),
        "Noted.",
        full,
        "It is good to know what you like.",
        must=(choice,),
    )
    ask = ("What is my {w} {t}?", "What's my {w} {t}?", "Do you remember my {w} {t}?")
    asked = Request(
        "ask_favourite",
        rng.choice(ask).format(w=word, t=topic),
        choice,
        f"Your favourite {topic} is {choice}.",
        "You told me earlier in this talk.",
        must=(choice,),
    )
    return told, asked


def told_and_asked(rng: Random) -> tuple[Request, Request]:
    """A request that tells something and one that asks for it."""
    return _told_name(rng) if rng.random() < 0.65 else _told_favourite(rng)


def dialogue(rng: Random, style: Style, between: Sequence[Message]) -> list[Message]:
    """Tell, the turns `between`, ask; all in one style."""
    told, asked = told_and_asked(rng)
    return [
        Message("user", told.text),
        Message("assistant", answer(told, style, rng)),
        *between,
        Message("user", asked.text if rng.random() < 0.8 else asked.text.lower()),
        Message("assistant", answer(asked, style, rng)),
    ]
