"""Checks that a request can run to its end here."""

from __future__ import annotations

from tandem.core.errors import InvalidRequest
from tandem.core.request import Request
from tandem.core.sequence import Sequence


def ends_at(seq: Sequence, length: int, max_model_len: int) -> bool:
    """Whether a sequence ends with its token number `length`, whatever that is."""
    made = length - seq.prompt_tokens
    return made >= seq.request.sampling.max_tokens or length >= max_model_len


def check_request(request: Request, max_model_len: int, cache_tokens: int) -> None:
    """Raise `InvalidRequest`, with advice, if a request could never run to its end.

    `cache_tokens` is the capacity of the whole KV cache.
    """
    prompt, wanted = len(request.prompt), request.sampling.max_tokens
    if request.n < 1:
        raise InvalidRequest(f"n is {request.n}; ask for at least one choice", param="n")
    if prompt == 0:
        raise InvalidRequest("the prompt is empty; send at least one token", param="prompt")
    if prompt + 1 > max_model_len:
        raise InvalidRequest(
            f"the prompt has {prompt} tokens, but the model's context is {max_model_len} tokens, "
            "at least one of them for the answer; shorten it",
            param="prompt",
            code="context_length_exceeded",
        )
    if min(prompt + wanted, max_model_len) > cache_tokens:
        raise InvalidRequest(
            f"prompt ({prompt} tokens) and max_tokens ({wanted}) need more than the KV cache of "
            f"{cache_tokens} tokens; lower max_tokens or give the cache more memory",
            param="max_tokens",
            code="context_length_exceeded",
        )
