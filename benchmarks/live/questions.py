"""Plain questions about well-known things: what the studies' users ask.

Subjects are split for good: questions about the held ones are never taught. Invariant: all
questions are different.
"""

from __future__ import annotations

from collections.abc import Sequence

_TAUGHT_TEXT = (
    "bamboo|honey|the Moon|coffee|elephants|chess|Paris|the violin|volcanoes|rice|the Pacific Ocean"
    "|penguins|glass|the Roman Empire|tea|bees|lightning|the Sahara|chocolate|dolphins|paper|Japan"
    "|the human heart|gold|football|rainbows|salt|owls|the printing press|bread|Mount Everest"
    "|butterflies|the telephone|cheese|the Nile|horses|ice|Mozart|tomatoes|earthquakes|spiders"
    "|the bicycle|potatoes|Saturn|whales|silk|London|the piano|cats|wind|sugar|the Amazon river"
    "|ants|copper|Brazil|the guitar|snow|apples|trains|camels"
)
_HELD_TEXT = (
    "wolves|milk|the Sun|Italy|the drum|sharks|cotton|steam engines|olives|the Great Wall of China"
    "|frogs|iron|Canada|the flute|clouds|bananas|ships|parrots|Mars|oranges|turtles|the compass"
    "|onions|Egypt|deserts|swans|diamonds|New York|lemons|tigers"
)
_TAUGHT, _HELD = (text.split("|") for text in (_TAUGHT_TEXT, _HELD_TEXT))
_FORMS = (
    "Tell me one fact about {}.",
    "Describe {} in two sentences.",
    "Say something short about {}.",
)

HELD_QUESTIONS: tuple[str, ...] = tuple(
    _FORMS[place % len(_FORMS)].format(subject) for place, subject in enumerate(_HELD)
)
"""One about each held subject."""

TAUGHT_QUESTIONS: tuple[str, ...] = tuple(
    _FORMS[(place + turn) % len(_FORMS)].format(subject)
    for turn in range(len(_FORMS))
    for place, subject in enumerate(_TAUGHT)
)
"""One about each taught subject, then a second one about each, and a third one."""

SHORT_QUESTIONS: tuple[str, ...] = tuple(
    form.format(subject)
    for form in ("What about {}?", "Do you know {}?", "{}, please.", "Why {}?", "Who needs {}?")
    for subject in _TAUGHT
)
"""Of a few tokens each, about the taught subjects."""


def subject_of(question: str) -> str:
    """The taught or held subject that a question is about; "it" if there is none."""
    known: Sequence[str] = sorted((*_TAUGHT, *_HELD), key=len, reverse=True)
    return next((subject for subject in known if subject in question), "it")
