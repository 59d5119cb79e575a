"""Offline work of a simulation: the requests of a batch file, or of fixed lengths without end.

Knows the lines of OpenAI's batch files. Invariant: prompts with equal beginnings get equal first
tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from random import Random
from typing import Annotated
from zlib import crc32

import msgspec

from tandem.core.errors import InvalidRequest
from tandem.core.request import Request
from tandem.core.sampling import SamplingParams
from tandem.core.slo import WorkClass

_OUTPUT_TOKENS = 128  # of a line that does not say
# Approximates the token count of an English tokenizer.
_TOKEN = re.compile(r"\s?\w{1,6}|\s?[^\w\s]|\s")


_Limit = Annotated[int, msgspec.Meta(ge=0)] | None


class _Part(msgspec.Struct):
    text: str = ""


class _Turn(msgspec.Struct):
    content: str | list[_Part] | None = None

    @property
    def text(self) -> str:
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return "".join(part.text for part in self.content)


class _Body(msgspec.Struct):
    messages: list[_Turn] = msgspec.field(default_factory=list)
    prompt: str | list[int | str] = ""
    max_tokens: _Limit = None
    max_completion_tokens: _Limit = None


class _Line(msgspec.Struct):
    body: _Body


def read_batch(path: Path, vocabulary: int) -> list[Request]:
    """The requests of a batch file in its order. Token counts of texts are estimated. Every answer
    has the length of its limit, or 128 tokens if the line has none. Raises `InvalidRequest`."""
    try:
        lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").splitlines()
    except OSError as error:
        raise InvalidRequest(f"cannot read the batch {path}: {error}") from error
    found = list[Request]()
    for place, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            body = msgspec.json.decode(line, type=_Line).body
            found.append(_request(len(found), body, vocabulary))
        except (msgspec.MsgspecError, InvalidRequest) as error:
            raise InvalidRequest(f"line {place} of the batch {path}: {error}") from error
    if not found:
        raise InvalidRequest(f"the batch {path} has no lines")
    return found


def endless(
    prompt_tokens: int, output_tokens: int, vocabulary: int, seed: int
) -> Iterator[Request]:
    """Requests of one size that share nothing."""
    rng = Random(f"{seed}/offline")
    for number in count():
        prompt = tuple(rng.randrange(vocabulary) for _ in range(prompt_tokens))
        yield _offline(number, prompt, output_tokens)


def again(requests: list[Request]) -> Iterator[Request]:
    """The same requests again and again, endlessly."""
    for number in count():
        request = requests[number % len(requests)]
        yield _offline(number, request.prompt, request.sampling.max_tokens)


def _request(number: int, body: _Body, vocabulary: int) -> Request:
    turns = "\n".join(turn.text for turn in body.messages)
    prompts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    given: list[int | str] = [*prompts, turns]
    tokens = list[int]()
    for each in given:
        tokens += [each] if isinstance(each, int) else map(_number, _TOKEN.findall(each))
    if not tokens:
        raise InvalidRequest("neither 'prompt' nor 'messages' has a text")
    limits = (body.max_completion_tokens, body.max_tokens, _OUTPUT_TOKENS)
    longest = next(limit for limit in limits if limit is not None)
    prompt = tuple(token % vocabulary for token in tokens)
    return _offline(number, prompt, max(1, longest))  # 0: a line that is only scored


def _number(token: str) -> int:
    return crc32(token.encode())


def _offline(number: int, prompt: tuple[int, ...], output_tokens: int) -> Request:
    sampling = SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True)
    name = f"offline-{number}"
    return Request(name, prompt, sampling, work_class=WorkClass.OFFLINE)
