"""Iterations of a whole engine, ours through its loop and transformers' continuous batching.

Both get the same jobs: random prompts, all at once, greedy. Invariant: an iteration is the time
between two tokens of a sequence while every sequence of the job decodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from random import Random
from statistics import median
from typing import Any

import torch

from benchmarks.gpu.ceilings import Ceilings
from benchmarks.gpu.engine import Engine
from benchmarks.gpu.options import Options
from benchmarks.peers.engine_transformers import ContinuousBatching

Row = dict[str, object]
Run = Callable[[dict[str, Any]], dict[str, Any]]
WARM_UP_TOKENS = 8
PAGE_TOKENS = 256
# What transformers' engine is tried with; it chooses by itself where nothing is said.
VARIANTS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "CUDA graphs": {"cuda_graph": True},
    "CUDA graphs, asynchronous": {"cuda_graph": True, "async": True},
}


def iterations(engine: Engine, ceilings: Ceilings, options: Options) -> Iterator[Row]:
    """Ours, at each number of sequences."""
    for sequences in options.batches:
        gaps = measured(engine.tandem.run, sequences, engine.loaded.vocab_size, options)
        yield {
            "model": engine.name,
            "sequences": sequences,
            "ms": 1e3 * median(gaps),
            "p90_ms": 1e3 * sorted(gaps)[len(gaps) * 9 // 10],
            "weights_share": engine.pass_bytes / median(gaps) / ceilings.bytes_per_s,
            "tokens_per_s": sequences / median(gaps),
        }


def peers(engine: Engine, _: Ceilings, options: Options) -> Iterator[Row]:
    """transformers' on the same weights, with ours measured again beside it."""
    vocabulary = engine.loaded.vocab_size
    ours = {
        sequences: median(measured(engine.tandem.run, sequences, vocabulary, options))
        for sequences in options.peer_batches
    }
    model = engine.fresh_model(options)
    model.set_attn_implementation("sdpa")
    tried = VARIANTS if options.device == "cuda" else {"as it comes": {}}
    for variant, settings in tried.items():
        row: Row = {"model": engine.name, "engine": f"transformers, {variant}"}
        try:
            yield from _peer(model, row, options, ours, settings)
        except (RuntimeError, ValueError, AssertionError, TypeError) as error:
            yield {**row, "problem": f"{type(error).__name__}: {error}"}


def _peer(
    model: Any, row: Row, options: Options, ours: dict[int, float], settings: dict[str, Any]
) -> Iterator[Row]:
    length = options.context_tokens + options.output_tokens
    pages = max(options.peer_batches) * -(-length // PAGE_TOKENS) + 16
    usual = {
        "page_size": PAGE_TOKENS,
        "num_blocks": pages,
        "max_batch_tokens": options.max_batch_tokens // 2,
        "patience_s": 20.0,
    }
    engine = ContinuousBatching(model, {**usual, **settings})
    try:
        for sequences in options.peer_batches:
            gaps = measured(engine.run, sequences, model.config.vocab_size, options)
            yield {
                **row,
                "sequences": sequences,
                "ms": 1e3 * median(gaps),
                "tokens_per_s": sequences / median(gaps),
                "ours_ms": 1e3 * ours[sequences],
                "ratio": median(gaps) / ours[sequences],
            }
    finally:
        engine.close()
        if options.device == "cuda":
            torch.cuda.empty_cache()


def measured(run: Run, sequences: int, vocabulary: int, options: Options) -> list[float]:
    """Iterations of one job after a short one; contexts reach `context_tokens` half way."""
    rng = Random(options.seed + sequences)
    prompt_tokens = options.context_tokens - options.output_tokens // 2

    def job(output_tokens: int) -> dict[str, Any]:
        prompts = [rng.choices(range(vocabulary), k=prompt_tokens) for _ in range(sequences)]
        return {"prompts": prompts, "output_tokens": output_tokens}

    run(job(min(WARM_UP_TOKENS, options.output_tokens)))
    return gaps_of(run(job(options.output_tokens))["token_s"])


def gaps_of(token_s: list[list[float]]) -> list[float]:
    """Seconds between a sequence's tokens, from when every sequence has one until the first has
    ended; all later ones if they never decode together."""
    first_s = max(times[0] for times in token_s)
    ends_s = min(times[-1] for times in token_s)
    if ends_s <= first_s:
        ends_s = max(times[-1] for times in token_s)
    return [
        after - before
        for times in token_s
        for before, after in pairwise(times)
        if before >= first_s and after <= ends_s
    ]
