"""Log-probabilities of given tokens under a packed head, and their slopes, as one kernel call.

No [rows, vocabulary] tensor is made. Callable if `kernels.amx_linear()`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.model.kernels.layer import Panels


def score_rows(
    hidden: Tensor, targets: Tensor, head: Panels, vocab: int, back: Panels | None
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities [rows], float32, of `targets` int64 [rows] under dense `hidden`.

    `head` has `vocab` outputs. With `back`, its transposed weight, also their derivative with
    respect to `hidden`, [rows, width] in bfloat16. A row is NaN if a logit is not finite. Raises
    RuntimeError for a target outside of the vocabulary.
    """
    logprobs, slopes = torch.ops.tandem.score_rows.default(
        hidden, targets, head.packed, head.bias, vocab, back.packed if back is not None else None
    )
    return logprobs, slopes if back is not None else None
