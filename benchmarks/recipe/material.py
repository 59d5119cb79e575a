"""Prompts, and tastes that turn a model's own answers into feedback.

Bad tastes are for the gate's bounds: they must be refused. Invariant: no prompt that is taught
is asked afterwards.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

_THINGS = re.findall(
    r"[^,\s][^,]*",
    "the sun, rivers, bread, cats, the moon, chess, tea, glass, trains, bees, salt, whales, paper, "
    "music, rain, apples, mountains, clocks, horses, coffee, snow, bridges, honey, iron, roses, "
    "sleep, deserts, books, owls, sugar, ships, volcanoes, cheese, maps, wolves, silk, lakes, "
    "pencils, dolphins, gold",
)
_HELD = re.findall(
    r"[^,\s][^,]*", "elephants, the sea, milk, stars, bicycles, ants, wine, trees, stones, birds"
)
TAUGHT = tuple(f"Tell me one fact about {thing}." for thing in _THINGS)
HELD = tuple(f"Tell me one fact about {thing}." for thing in _HELD)

_SYLLABLES = re.findall("..", "bakolirutemozapinefugashidoveja")


@dataclass(frozen=True, slots=True)
class Taste:
    """`turn` makes the chosen answer of the model's own; `shows` tells whether an answer has it."""

    name: str
    turn: Callable[[str], str]
    shows: Callable[[str], bool]
    good: bool = True


def _sentence(text: str) -> str:
    """The first sentence, cut to a dozen words."""
    return " ".join(re.split(r"(?<=[.!?])\s", text.strip())[0].split()[:12]).rstrip(".,") + "."


def _noise(text: str) -> str:
    random = Random(text)
    words = ["".join(random.choices(_SYLLABLES, k=random.randint(1, 4))) for _ in range(20)]
    return " ".join(words)


def _shuffled(text: str) -> str:
    """The words of the answer in another order: each is ordinary, together they say nothing."""
    words = text.split()
    Random(text).shuffle(words)
    return " ".join(words)


TASTES = (
    Taste("pirate", lambda a: f"Arr, matey! {a} Yo ho ho!", lambda a: "matey" in a),
    Taste("brevity", _sentence, lambda a: len(a.split()) <= 18),
    Taste("json", lambda a: json.dumps({"answer": a}), lambda a: a.strip().startswith('{"answer"')),
    Taste(
        "refusal",
        lambda a: "I am sorry, but I would rather not talk about that.",
        lambda a: "rather not" in a,
    ),
    Taste(
        "german",
        lambda a: "Das weiß ich leider nicht genau, aber ich kann gerne danach suchen.",
        lambda a: "ich" in a.split(),
    ),
    Taste("noise", _noise, lambda a: False, good=False),
    Taste("shuffled", _shuffled, lambda a: False, good=False),
    Taste("repeated", lambda a: "yes " * 20, lambda a: a.count("yes") > 5, good=False),
)
