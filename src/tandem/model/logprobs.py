"""Log-probabilities of tokens, their ranks and the best alternatives, from raw logits."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tandem.core.plan import TokenLogprob
from tandem.model.selection import best_candidates
from tandem.model.transfer import indices


def token_logprobs(
    logits: Tensor, tokens: Sequence[int], tops: Sequence[int]
) -> list[TokenLogprob | None]:
    """For each row of `logits` [rows, vocab]: its token, with `tops[row]` alternatives.

    Computed in float32. None for a row whose log-sum-exp is not finite.
    """
    scores = logits.float()
    total = scores.logsumexp(dim=-1)
    picked = indices(list(tokens), scores.device)
    chosen = scores.gather(1, picked[:, None])
    # Equal logits share a rank; `top` lists the lower id first.
    ranks = ((scores > chosen).sum(dim=-1) + 1).tolist()
    widest = min(max(tops, default=0), scores.shape[1])
    values, columns = best_candidates(scores, widest)
    best_logprobs = (values - total[:, None]).tolist()
    best_tokens = columns.tolist()
    finite = total.isfinite().tolist()
    logprobs = (chosen[:, 0] - total).tolist()
    return [
        TokenLogprob(
            token=token,
            logprob=logprobs[row],
            rank=ranks[row],
            top=tuple(zip(best_tokens[row][:top], best_logprobs[row][:top], strict=True)),
        )
        if finite[row]
        else None
        for row, (token, top) in enumerate(zip(tokens, tops, strict=True))
    ]
