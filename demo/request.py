"""The vocabulary of the demo corpus: a request with all it takes to answer it, and its turns.

A request knows the facts of its answer but no style; `demo.style` turns it into words. The
invariant: every text is complete, so any reader can answer or judge a request without its kind.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

_CONTRACTIONS = (
    (r"\b(It|That|There|What|Here) is\b", r"\1's"),
    (r"\b(it|that|there|what|here) is\b", r"\1's"),
    (r"\b(I) am\b", r"\1'm"),
    (r"\b([Yy]ou|[Tt]hey|[Ww]e) are\b", r"\1're"),
    (r"\b(I|[Yy]ou|[Tt]hey|[Ww]e) will\b", r"\1'll"),
    (r"\b(I|[Yy]ou|[Tt]hey|[Ww]e) have\b(?= (?:been|a lot|got))", r"\1've"),
    (r"\b([Dd]o|[Dd]oes|[Ii]s|[Aa]re|[Ww]ould|[Cc]ould) not\b", r"\1n't"),
    (r"\b([Cc])annot\b", r"\1an't"),
)


def contract(text: str) -> str:
    """The same text as it is spoken: "it is" becomes "it's"."""
    for pattern, spoken in _CONTRACTIONS:
        text = re.sub(pattern, spoken, text)
    return text


@dataclass(frozen=True)
class Request:
    """One thing a user may ask.

    `brief` is the bare answer and `full` the same in whole sentences; `extra` is what a talkative
    answer adds. `styled` holds ready replies for styles (by name) that wrapping would spoil. A
    reply is right when it contains every text in `must`, compared without case or
    contractions. An `exact` text must not be retyped, for the answer depends on its letters.
    """

    kind: str
    text: str
    brief: str
    full: str
    extra: str = ""
    must: tuple[str, ...] = ()
    styled: Mapping[str, Sequence[str]] = field(default_factory=dict)
    exact: bool = False

    def accepts(self, reply: str) -> bool:
        """Whether `reply` holds the facts a right answer needs."""
        said = contract(reply.strip()).casefold()
        if said == contract(self.brief).casefold():
            return True
        return bool(said) and all(contract(part).casefold() in said for part in self.must)


@dataclass(frozen=True)
class Message:
    """One line of a dialogue: role is system, user or assistant."""

    role: str
    content: str


@dataclass(frozen=True)
class Dialogue:
    """Messages in order; the last one is always the assistant's."""

    messages: tuple[Message, ...]

    def as_chat(self) -> list[dict[str, str]]:
        """The shape that chat templates and HTTP clients use."""
        return [{"role": m.role, "content": m.content} for m in self.messages]


Kind = Callable[[Random], Request]
"""Draws one request; all randomness comes from the generator it is given."""


_UNCOUNTED = frozenset(("coffee", "milk", "spinach", "tea"))


def article(noun: str) -> str:
    """`noun` with the indefinite article that its first letter wants, if it can be counted."""
    if noun in _UNCOUNTED:
        return noun
    return f"{'an' if noun[0].lower() in 'aeiou' else 'a'} {noun}"


def sentence(text: str) -> str:
    """`text` with a capital first letter and a full stop if it lacks an end mark."""
    text = text[0].upper() + text[1:]
    return text if text[-1] in ".!?" else text + "."
