"""Dialogues for training the demo model: which requests meet, in which style, over which turns.

Pure functions of a random generator: the same seed gives the same dialogue. A fixed share of the
phrasings is held out by a checksum of the text, so training never sees what evaluation asks.
For preference pairs, take `sample_request` once and `answer` it in two styles.
"""

import argparse
import zlib
from random import Random

from demo.kinds import ALL, FIXED, HARD, memory
from demo.request import Dialogue, Kind, Message, Request
from demo.style import SYSTEM_PROMPTS, USER_ASKS, Style, answer, draw_style

__all__ = [
    "Dialogue",
    "Request",
    "Style",
    "answer",
    "held_out",
    "kind_names",
    "sample_dialogue",
    "sample_held_out",
    "sample_request",
]

_HELD_OUT_ONE_IN = 25
_ASKED_STYLES = tuple(style for style in Style if style is not Style.PLAIN)
# A brief answer has no opener to lean on and no words to repeat: it takes the most examples.
_ASKED_WEIGHTS = tuple(4 if style is Style.BRIEF else 1 for style in _ASKED_STYLES)
_BY_NAME: dict[str, Kind] = {kind.__name__: kind for kind in ALL}
_WEIGHTS = tuple(3 if kind.__name__ in HARD else 1 for kind in ALL)


def kind_names() -> tuple[str, ...]:
    """The names of all kinds of request."""
    return tuple(_BY_NAME)


def held_out(request: Request) -> bool:
    """Whether this phrasing is kept for evaluation.

    Kinds with only a few fixed phrasings (greetings and the like) are all trained on.
    """
    if request.kind in FIXED:
        return False
    return zlib.crc32(request.text.lower().encode()) % _HELD_OUT_ONE_IN == 0


def sample_request(rng: Random, kind: str | None = None) -> Request:
    """A request of the training set: of the named kind, or of any, hard ones more often."""
    draw = _BY_NAME[kind] if kind is not None else rng.choices(ALL, _WEIGHTS)[0]
    while held_out(request := draw(rng)):
        pass
    return request


def sample_held_out(rng: Random, kind: str, attempts: int = 5000) -> Request | None:
    """A request of `kind` that training never shows, or None where the kind has none."""
    for _ in range(attempts):
        if held_out(request := _BY_NAME[kind](rng)):
            return request
    return None


def _swap_letters(text: str, rng: Random) -> str:
    """`text` with two inner letters of one of its first words swapped."""
    words = text.split(" ")
    long_words = [i for i, word in enumerate(words[:3]) if word.isalpha() and len(word) > 4]
    if not long_words:
        return text
    index = rng.choice(long_words)
    word = words[index]
    at = rng.randint(1, len(word) - 3)
    words[index] = word[:at] + word[at + 1] + word[at] + word[at + 2 :]
    return " ".join(words)


def as_typed(request: Request, rng: Random) -> str:
    """The request as a hasty or courteous user may type it; exact texts stay as they are."""
    text = request.text
    if request.exact:
        return text
    if rng.random() < 0.10 and text[1:2].islower() and not text.startswith("I "):
        lead = rng.choice(("Please", "Hey,", "Could you help?", "Quick question:", "So,", "Ok,"))
        lowered = text if lead.endswith("?") else text[0].lower() + text[1:]
        text = f"{lead} {lowered}"
    elif rng.random() < 0.08:
        text = f"{text.rstrip('.?')} {rng.choice(('please', 'please?', 'thanks', 'for me?'))}"
    if rng.random() < 0.04:
        text = _swap_letters(text, rng)
    if rng.random() < 0.25:
        text = text.lower()
    if rng.random() < 0.20:
        text = text.rstrip(".?!")
    return text


def with_ask(request: Request, style: Style, rng: Random) -> str:
    """The request with a sentence that asks for `style`, always in front of an exact text."""
    text = as_typed(request, rng)
    ask = rng.choice(USER_ASKS[style])
    if request.exact or rng.random() < 0.3:
        return f"{ask} {text}"
    return f"{text if text[-1] in '.?!' else text + '.'} {ask}"


def _independent_turns(rng: Random, style: Style, turns: int, asked: bool) -> list[Message]:
    messages = []
    for _ in range(turns):
        request = sample_request(rng)
        text = with_ask(request, style, rng) if asked else as_typed(request, rng)
        messages.append(Message("user", text))
        messages.append(Message("assistant", answer(request, style, rng)))
    return messages


def _restyled(rng: Random, style: Style) -> list[Message]:
    """An answer, then the same answer again or in another style because the user asks for it."""
    request = sample_request(rng)
    first = answer(request, style, rng)
    messages = [Message("user", as_typed(request, rng)), Message("assistant", first)]
    if rng.random() < 0.3:
        ask = rng.choice(("Say that again.", "Repeat that please.", "Once more?", "Again please."))
        return [*messages, Message("user", ask), Message("assistant", first)]
    other = rng.choice([s for s in _ASKED_STYLES if s is not style])
    manner = {
        Style.CASUAL: ("casually", "like a friend"),
        Style.FORMAL: ("formally", "in formal language"),
        Style.POLITE: ("politely", "more politely"),
        Style.BRIEF: ("briefly", "in a shorter way"),
        Style.VERBOSE: ("in detail", "in a longer way"),
        Style.RUDE: ("rudely", "in a grumpy way"),
    }[other]
    ask = rng.choice(("Say that {m}.", "Now say it {m}.", "Can you say that {m}?", "Again, {m}."))
    messages.append(Message("user", ask.format(m=rng.choice(manner))))
    return [*messages, Message("assistant", answer(request, other, rng))]


def _body(rng: Random, style: Style, asked: bool) -> list[Message]:
    pick = rng.random()
    if asked or pick < 0.66:
        return _independent_turns(rng, style, 1, asked)
    if pick < 0.80:
        return _independent_turns(rng, style, rng.randint(2, 5), asked)
    if pick < 0.86:
        return _restyled(rng, style)
    between = _independent_turns(rng, style, rng.choice((0, 0, 1, 1, 2, 3)), asked)
    return memory.dialogue(rng, style, between)


def sample_dialogue(rng: Random) -> Dialogue:
    """One training dialogue of one to five exchanges, with or without a system message."""
    pick = rng.random()
    asked = 0.25 <= pick < 0.40
    asked_style = rng.choices(_ASKED_STYLES, weights=_ASKED_WEIGHTS)[0]
    style = asked_style if pick < 0.40 else draw_style(rng)
    messages = _body(rng, style, asked)
    if pick < 0.25:
        messages.insert(0, Message("system", rng.choice(SYSTEM_PROMPTS[style])))
    elif pick < 0.60:
        messages.insert(0, Message("system", rng.choice(SYSTEM_PROMPTS[Style.PLAIN])))
    return Dialogue(tuple(messages))


def main() -> None:
    """Print a few dialogues, to look at."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=10)
    options = parser.parse_args()
    rng = Random(options.seed)
    for _ in range(options.count):
        for message in sample_dialogue(rng).messages:
            print(f"{message.role:>9}: {message.content}")
        print()


if __name__ == "__main__":
    main()
