"""Log-probabilities and losses that the fake engine makes up, so that a test can recognise them."""

from __future__ import annotations

import zlib

from tandem.core.plan import TokenLogprob
from tandem.core.training import Role, TrainingSequence


def logprob_of(token: int, alternatives: int) -> TokenLogprob:
    """A made-up but recognisable log-probability: -token / 1000, alternatives token, token + 1.."""
    top = tuple((token + k, -(token + k) / 1000) for k in range(alternatives))
    return TokenLogprob(token, -token / 1000, 1, top)


def loss_of(revision: int) -> float:
    """The loss that the fake reports for the step that leads to `revision`: falls with each."""
    return 1.0 / (1.0 + revision)


def score_of(tokens: tuple[int, ...], prompt_tokens: int, under: str | None) -> float:
    """A made-up log-probability: below 0, fixed by the tokens and the weights' name, a sum over the
    completion of values in [-2, -1); an adapter makes each token likelier by up to a tenth."""
    prefix = ",".join(map(str, tokens[:prompt_tokens]))
    completion = tokens[prompt_tokens:]
    gain = 0.0 if under is None else 0.05 * (1.0 + zlib.crc32(under.encode()) / 2**32)
    return gain * len(completion) - sum(
        1.0 + zlib.crc32(f"{prefix}|{place}|{token}".encode()) / 2**32
        for place, token in enumerate(completion)
    )


def logprob_at(sequence: TrainingSequence, revision: int) -> float:
    """Chosen and good completions become likelier with each update, the others less likely."""
    before = score_of(sequence.tokens, sequence.prompt_tokens, None)
    better = sequence.role in (Role.TARGET, Role.CHOSEN, Role.DESIRABLE)
    return before / (1.0 + 0.1 * revision) if better else before * (1.0 + 0.1 * revision)
