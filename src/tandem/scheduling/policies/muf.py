"""Batches of the answers that are expected to be longest (the baseline MUF of RT-LM, V-A)."""

from __future__ import annotations

from tandem.scheduling.bounded_batch import BoundedBatch, Options, expected_tokens
from tandem.scheduling.view import Policy


def create(options: Options = Options()) -> Policy:
    """The policy of this file."""
    return BoundedBatch(options, lambda seq, _: -expected_tokens(seq))
