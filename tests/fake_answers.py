"""What the fake executor answers and scores: functions of the tokens before and of the weights that
they were read under, so that a test can say what must come out."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from tandem.core.plan import Draw, DrawResult

VOCAB = 50
STATE = bytes(16)  # of every prompt


def link(chain: int, token: int, weights: str | None) -> int:
    """Extend a prefix hash by one token."""
    return zlib.crc32(f"{chain},{token},{weights}".encode())


def logprob_of(chain: int, target: int) -> float:
    """The log-probability of a token after a prefix: in (-2, -1]."""
    return -1.0 - zlib.crc32(f"{chain},{target}".encode()) / 2**32


def expected_score(tokens: Sequence[int], prompt_tokens: int, weights: str | None) -> float:
    """What scoring `tokens[prompt_tokens:]` must sum up to."""
    chain, total = 0, 0.0
    for position, token in enumerate(tokens):
        if position >= prompt_tokens:
            total += logprob_of(chain, token)
        chain = link(chain, token, weights)
    return total


def draw_of(chain: int, draw: Draw) -> DrawResult:
    """The token after a prefix, for one draw."""
    key = f"{chain},{draw.sampling.seed},{draw.index}"
    token = zlib.crc32(key.encode()) % VOCAB
    while token in draw.banned:
        token = (token + 1) % VOCAB
    return DrawResult(draw.seq_id, token, state=STATE if draw.state else b"")


def expected_tokens(
    prompt: Sequence[int], draw: Draw, adapter: str | None, max_tokens: int, stop: frozenset[int]
) -> list[int]:
    """What a sequence must answer, from its prompt alone."""
    chain = 0
    for token in prompt:
        chain = link(chain, token, adapter)
    tokens: list[int] = []
    while len(tokens) < max_tokens:
        token = draw_of(chain, draw).token
        tokens.append(token)
        if token in stop:
            break
        chain = link(chain, token, adapter)
    return tokens
