"""llama.cpp, driven batch by batch through its C interface, so that every token's time is seen.

Runs in an environment of its own that has `llama-cpp-python`.
"""

from __future__ import annotations

import time
from typing import Any

import llama_cpp as llama
import numpy as np

from benchmarks.peers.worker import token_times

BATCH_TOKENS = 2048
SEQUENCES = 32
# Of a sequence: the longest prompt of any job and its output.
CONTEXT_TOKENS = 1152


class LlamaCpp:
    """One context with a place for each of 32 sequences."""

    def __init__(self, file: str, threads: int) -> None:
        llama.llama_backend_init()
        weights = llama.llama_model_default_params()
        weights.n_gpu_layers = 0
        self._model = llama.llama_model_load_from_file(file.encode(), weights)
        assert self._model, file
        settings = llama.llama_context_default_params()
        settings.n_ctx = SEQUENCES * CONTEXT_TOKENS
        settings.n_seq_max = SEQUENCES
        settings.n_batch = BATCH_TOKENS
        settings.n_threads = settings.n_threads_batch = threads
        self._context = llama.llama_init_from_model(self._model, settings)
        assert self._context, "no context"
        self._words = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self._model))
        self._batch = llama.llama_batch_init(BATCH_TOKENS, 0, 1)

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        """Generate greedily; a token's time is the end of the batch that returned it."""
        prompts, wanted = job["prompts"], job["output_tokens"]
        llama.llama_memory_clear(llama.llama_get_memory(self._context), True)
        times: list[list[float]] = [[] for _ in prompts]
        places = [0] * len(prompts)
        started = time.perf_counter()
        work = [
            (sequence, token, last)
            for sequence, prompt in enumerate(prompts)
            for token, last in zip(prompt, [False] * (len(prompt) - 1) + [True], strict=True)
        ]
        while work:
            following: list[tuple[int, int, bool]] = []
            for first in range(0, len(work), BATCH_TOKENS):
                drawn = self._step(work[first : first + BATCH_TOKENS], places)
                now = time.perf_counter()
                for sequence, token in drawn:
                    times[sequence].append(now)
                    if len(times[sequence]) < wanted:
                        following.append((sequence, token, True))
            work = following
        assert all(len(each) == wanted for each in times)
        return token_times(started, times)

    def _step(self, rows: list[tuple[int, int, bool]], places: list[int]) -> list[tuple[int, int]]:
        """Compute (sequence, token, whether its output counts); the next token of those."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for row, (sequence, token, last) in enumerate(rows):
            batch.token[row], batch.pos[row] = token, places[sequence]
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence
            batch.logits[row] = last
            places[sequence] += 1
        status = llama.llama_decode(self._context, batch)
        assert status == 0, f"llama_decode returned {status}"
        drawn = []
        for row, (sequence, _, last) in enumerate(rows):
            if last:
                logits = llama.llama_get_logits_ith(self._context, row)
                drawn.append(
                    (sequence, int(np.ctypeslib.as_array(logits, shape=(self._words,)).argmax()))
                )
        return drawn


def start(model: str, options: dict[str, Any]) -> LlamaCpp:
    """Load the file that the study made of `model`."""
    return LlamaCpp(options["file"], options["threads"])


def versions() -> dict[str, str]:
    """Versions of what decides the speed."""
    return {"llama-cpp-python": llama.__version__}
