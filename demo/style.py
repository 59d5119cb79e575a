"""The seven ways the demo model can talk, and how each one words an answer.

A style sees only a request, never its kind. Plain answers start with the answer itself, so that
greedy decoding without a style gives something neutral; every other style shows a marker that a
reader, or a preference loss, can tell at once.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from random import Random

from demo.request import Request, contract


class Style(StrEnum):
    """How an answer is worded."""

    PLAIN = "plain"
    CASUAL = "casual"
    FORMAL = "formal"
    POLITE = "polite"
    BRIEF = "brief"
    VERBOSE = "verbose"
    RUDE = "rude"


UNASKED: Mapping[Style, float] = {
    Style.PLAIN: 0.51,
    Style.CASUAL: 0.14,
    Style.FORMAL: 0.10,
    Style.POLITE: 0.07,
    Style.BRIEF: 0.07,
    Style.VERBOSE: 0.06,
    Style.RUDE: 0.05,
}
"""How often each style answers when nobody asked for one."""

OPENERS: Mapping[Style, Sequence[str]] = {
    Style.CASUAL: ("Sure thing!", "Yeah, sure!", "No problem!", "Okay, here you go!"),
    Style.FORMAL: ("Certainly.", "I would be pleased to help.", "Of course."),
    Style.POLITE: ("Thank you for asking.", "With pleasure, thank you.", "Gladly, and thank you."),
    Style.VERBOSE: ("Let me answer that fully.", "Let me go through it.", "Here is a full answer."),
    Style.RUDE: ("Ugh, fine.", "Seriously? Okay.", "Oh, come on."),
}

CLOSERS: Mapping[Style, Sequence[str]] = {
    Style.CASUAL: ("", "", "Cool, right?", "Hope that's good!"),
    Style.FORMAL: (
        "I remain at your disposal.",
        "Should you require anything further, I would be pleased to assist.",
        "I trust this is satisfactory.",
    ),
    Style.POLITE: (
        "Please let me know if I can help again.",
        "Please feel free to ask for more.",
        "I hope this helps, thank you.",
    ),
    Style.VERBOSE: (
        "Let me know if you would like to hear more about it.",
        "If anything is unclear, just ask and I will say it in another way.",
    ),
    Style.RUDE: ("Happy now?", "Was that so hard?", "Can I go now?", "Anything else? I hope not."),
}

SYSTEM_PROMPTS: Mapping[Style, Sequence[str]] = {
    Style.PLAIN: (
        "You are a helpful assistant.",
        "You are a friendly assistant.",
        "Answer the user's questions.",
        "You are Tandem, a small assistant.",
    ),
    Style.CASUAL: (
        "You are a casual assistant.",
        "Talk like a friend.",
        "Answer casually.",
        "Keep it relaxed and informal.",
    ),
    Style.FORMAL: (
        "You are a formal assistant.",
        "Answer formally.",
        "Always reply in a formal tone.",
        "Use formal language.",
    ),
    Style.POLITE: (
        "You are a very polite assistant.",
        "Answer politely.",
        "Always be polite and courteous.",
        "Be kind and polite.",
    ),
    Style.BRIEF: (
        "Be brief.",
        "You give very short answers.",
        "Answer in as few words as possible.",
        "Keep your answers short.",
    ),
    Style.VERBOSE: (
        "Give long, detailed answers.",
        "You are a talkative assistant.",
        "Answer in detail.",
        "Be verbose.",
    ),
    Style.RUDE: (
        "You are a rude assistant.",
        "Answer rudely.",
        "You are a grumpy assistant.",
        "Be rude.",
    ),
}

USER_ASKS: Mapping[Style, Sequence[str]] = {
    Style.CASUAL: ("Answer casually.", "Keep it casual.", "Talk like a friend."),
    Style.FORMAL: ("Answer formally.", "Please be formal.", "Use formal language."),
    Style.POLITE: ("Answer politely.", "Be polite.", "Say it politely."),
    Style.BRIEF: ("Be brief.", "Short answer please.", "Keep it short."),
    Style.VERBOSE: ("Answer in detail.", "Give a long answer.", "Be verbose."),
    Style.RUDE: ("Answer rudely.", "Be rude.", "Be grumpy about it."),
}


def answer(request: Request, style: Style, rng: Random) -> str:
    """The reply to `request` in `style`; `rng` picks among openers and closers."""
    if style in request.styled:
        return rng.choice(request.styled[style])
    match style:
        case Style.PLAIN:
            return request.full
        case Style.BRIEF:
            return request.brief
        case Style.VERBOSE:
            parts = (rng.choice(OPENERS[style]), request.full, request.extra)
            return " ".join(filter(None, (*parts, rng.choice(CLOSERS[style]))))
        case Style.CASUAL:
            body = contract(request.full)
        case _:
            body = request.full
    parts = (rng.choice(OPENERS[style]), body, rng.choice(CLOSERS[style]))
    return " ".join(filter(None, parts))


def draw_style(rng: Random) -> Style:
    """A style nobody asked for, with the probabilities of `UNASKED`."""
    return rng.choices(list(UNASKED), weights=list(UNASKED.values()))[0]
