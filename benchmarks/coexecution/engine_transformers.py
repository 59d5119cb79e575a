"""transformers' continuous batching under the closed loop: the serving peer where vLLM is missing.

Its manager hands out finished requests, with a time for each token. What runs at the end is let
finish, so that every token's time is known.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from math import inf
from typing import Any

import torch

from benchmarks.coexecution.workload import Ask, ClosedLoop, Serving
from benchmarks.peers.engine_transformers import start as start_batching
from benchmarks.peers.engine_transformers import versions

__all__ = ["TransformersServing", "start", "versions"]

POLL_S = 0.005


class TransformersServing:
    """A running manager on the cores that it was started on."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        self._manager = start_batching(model, options).manager
        self._stop = threading.Event()
        signal.signal(signal.SIGUSR1, lambda *_: self._stop.set())

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        """Serve until time is up or SIGUSR1 came, then until all requests have ended."""
        serving = Serving(**job["serve"])
        loop = ClosedLoop(serving)
        self._stop.clear()
        ends_s = time.perf_counter() + (serving.seconds or inf)
        asks = {self._add(ask): ask for ask in loop.first()}
        while asks:
            output = self._manager.get_result(timeout=POLL_S)
            if output is None or not output.is_finished():
                continue
            ask = asks.pop(output.request_id)
            for at_s in output.timestamps:
                loop.note(ask.name, 1, at_s)
            if not self._stop.is_set() and time.perf_counter() < ends_s:
                ask = loop.next()
                asks[self._add(ask)] = ask
        return {"serve": loop.answer()}

    def _add(self, ask: Ask) -> str:
        name: str = self._manager.add_request(
            ask.prompt, max_new_tokens=ask.output_tokens, record_timestamps=True
        )
        return name


def start(model: str, options: dict[str, Any]) -> TransformersServing:
    """Load `model` in a process that may run on `options["cores"]` only."""
    os.sched_setaffinity(0, options["cores"])
    torch.set_num_threads(options["threads"])
    return TransformersServing(model, options)
