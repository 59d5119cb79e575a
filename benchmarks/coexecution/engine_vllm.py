"""vLLM's CPU engine under the closed loop, driven step by step in this process."""

from __future__ import annotations

import os
import signal
import threading
import time
from math import inf
from typing import Any

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from benchmarks.coexecution.workload import Ask, ClosedLoop, Serving
from benchmarks.peers.engine_vllm import load, versions

__all__ = ["VllmServing", "start", "versions"]


class VllmServing:
    """A loaded engine that stays on the cores it was started on."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        self._engine = load(model, options).llm_engine
        self._stop = threading.Event()
        signal.signal(signal.SIGUSR1, lambda *_: self._stop.set())

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        """Serve until time is up or SIGUSR1 came; what runs then is aborted."""
        serving = Serving(**job["serve"])
        loop = ClosedLoop(serving)
        self._stop.clear()
        ends_s = time.perf_counter() + (serving.seconds or inf)
        for ask in loop.first():
            self._add(ask)
        while not self._stop.is_set() and time.perf_counter() < ends_s:
            outputs = self._engine.step()
            now_s = time.perf_counter()
            for output in outputs:
                if loop.note(output.request_id, len(output.outputs[0].token_ids), now_s):
                    self._add(loop.next())
        self._engine.abort_request(loop.open())
        while self._engine.has_unfinished_requests():
            self._engine.step()
        return {"serve": loop.answer()}

    def _add(self, ask: Ask) -> None:
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=ask.output_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self._engine.add_request(ask.name, {"prompt_token_ids": ask.prompt}, sampling)


def start(model: str, options: dict[str, Any]) -> VllmServing:
    """Load `model` in a process that may run on `options["cores"]` only."""
    os.sched_setaffinity(0, options["cores"])
    return VllmServing(model, options)
