"""What the rows of `tandem profile` mean, in words.

Invariant: every term of the time model has its words (a test compares).
"""

from __future__ import annotations

FORWARD_WORDS = {
    "pass": "any pass: what it takes without rows",
    "decode": "a sequence that gets its next token",
    "context": "1,000 tokens of context that are read, over all sequences",
    "longest": "1,000 tokens of the longest context",
    "mean": "1,000 tokens of the mean context",
    "row": "a token of a prompt",
    "pairs": "a million pairs of a prompt's token and one that it attends to",
    "draw": "drawing a token",
    "scored": "a token whose log-probability is computed",
    "recording": "any pass that records for training",
    "recorded": "a token that is recorded",
    "whole": "any pass with a whole micro-batch, of which more is kept",
    "whole_row": "a token of it",
    "cold": "a pass whose weights are in no cache",
}
SLICE_WORDS = {
    "slice": "any slice of the backward",
    "layer": "a layer of it",
    "layer_row": "a token of a layer",
    "layer_pairs": "a million pairs of tokens of a layer",
    "layer_sequence": "a sequence of a layer",
    "again": "a layer whose forward is computed again",
    "again_row": "a token of it",
    "again_pairs": "a million pairs of tokens of it",
    "rest_row": "a token of a layer whose forward is partly computed again",
    "first": "the first slice of a micro-batch, with the loss",
    "first_row": "a token of it",
}
OTHER_WORDS = {
    "update": "an update of the optimiser",
    "longer after a sleep": "a pass after the engine slept takes so much longer",
    "less after passes: decodes": "decodes after other passes take so much less: warm caches",
    "less after passes: prompts": "prompts likewise",
    "share of that missing after each": "of that, what one pass more does not bring yet",
    "beside the work of an iteration": "scheduling and bookkeeping of an iteration",
    "rho (no unit)": "in a pass with both, the shorter of decodes and prompts counts so often",
}
