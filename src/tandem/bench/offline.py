"""Offline work of a simulation: the requests of a batch file, or of fixed lengths without end.

Knows the lines of OpenAI's batch files. Invariant: prompts that begin alike have equal tokens
there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from random import Random
from zlib import crc32

import msgspec

from tandem.core.errors import InvalidRequest
from tandem.core.request import Request
from tandem.core.sampling import SamplingParams
from tandem.core.slo import WorkClass

_OUTPUT_TOKENS = 128  # of a line that does not say
# About what tokenizers of English make of a text, without having one.
_TOKEN = re.compile(r"\s?\w{1,6}|\s?[^\w\s]|\s")


class _Turn(msgspec.Struct):
    content: str


class _Body(msgspec.Struct):
    messages: list[_Turn] = msgspec.field(default_factory=list)
    prompt: str | list[int] = ""
    max_tokens: int | None = None
    max_completion_tokens: int | None = None


class _Line(msgspec.Struct):
    body: _Body


def read_batch(path: Path, vocabulary: int) -> list[Request]:
    """The requests of a batch file in its order. A text has about as many tokens as English has,
    and every answer is as long as it may be. Raises `InvalidRequest`."""
    try:
        lines = [line for line in path.read_bytes().splitlines() if line.strip()]
        bodies = [msgspec.json.decode(line, type=_Line).body for line in lines]
    except (OSError, msgspec.MsgspecError) as error:
        raise InvalidRequest(f"cannot read the batch {path}: {error}") from error
    if not bodies:
        raise InvalidRequest(f"the batch {path} has no lines")
    return [_request(number, body, vocabulary) for number, body in enumerate(bodies)]


def endless(
    prompt_tokens: int, output_tokens: int, vocabulary: int, seed: int
) -> Iterator[Request]:
    """Requests of one size that share nothing."""
    rng = Random(f"{seed}/offline")
    for number in count():
        prompt = tuple(rng.randrange(vocabulary) for _ in range(prompt_tokens))
        yield _offline(number, prompt, output_tokens)


def again(requests: list[Request]) -> Iterator[Request]:
    """The same requests again and again, for as long as somebody asks."""
    for number in count():
        request = requests[number % len(requests)]
        yield _offline(number, request.prompt, request.sampling.max_tokens)


def _request(number: int, body: _Body, vocabulary: int) -> Request:
    text = body.prompt or "\n".join(turn.content for turn in body.messages)
    if isinstance(text, str):
        tokens = tuple(crc32(part.encode()) % vocabulary for part in _TOKEN.findall(text))
    else:
        tokens = tuple(token % vocabulary for token in text)
    longest = body.max_completion_tokens or body.max_tokens or _OUTPUT_TOKENS
    return _offline(number, tokens or (0,), longest)


def _offline(number: int, prompt: tuple[int, ...], output_tokens: int) -> Request:
    sampling = SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True)
    name = f"offline-{number}"
    return Request(name, prompt, sampling, work_class=WorkClass.OFFLINE)
