"""Our own engine: the loop that serves, in this process, stepped as `tandem.llm` does.

The scheduler, the cache and the executor are those of the server; only HTTP and text are absent.
"""

from __future__ import annotations

import time
from importlib.metadata import version
from typing import Any

from benchmarks.peers.worker import token_times
from tandem.build import build_loop
from tandem.config import resolve
from tandem.core.request import Request
from tandem.core.sampling import SamplingParams
from tandem.engine.loop import EngineLoop

KV_BYTES = 1 << 30


class Tandem:
    """A loop without prefix cache, so that no engine has one."""

    def __init__(self, loop: EngineLoop) -> None:
        self.loop = loop
        self._jobs = 0

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        """Generate greedily; a token's time is the end of the iteration that returned it."""
        sampling = SamplingParams(max_tokens=job["output_tokens"], temperature=0.0, ignore_eos=True)
        self._jobs += 1
        names = [f"{self._jobs}-{index}" for index in range(len(job["prompts"]))]
        times: dict[str, list[float]] = {name: [] for name in names}
        started = time.perf_counter()
        for name, prompt in zip(names, job["prompts"], strict=True):
            self.loop.add(Request(name, tuple(prompt), sampling))
        while self.loop.has_work:
            events = self.loop.step()
            now = time.perf_counter()
            for event in events:
                assert event.error is None, event.error
                times[event.request_id] += [now] * len(event.tokens)
        assert all(len(each) == job["output_tokens"] for each in times.values())
        return token_times(started, [times[name] for name in names])


def start(model: str, options: dict[str, Any]) -> Tandem:
    """Load `model` and join the parts."""
    settings = resolve(
        {
            "model": {
                "model": model,
                "device": options["device"],
                "dtype": options.get("dtype", "bfloat16"),
                "threads": options["threads"],
                "kernels": options.get("kernels"),
            },
            "cache": {"memory_bytes": KV_BYTES, "prefix_caching": False},
            "scheduling": {"max_batch_tokens": options.get("max_batch_tokens")},
        }
    )
    return Tandem(build_loop(settings))


def versions() -> dict[str, str]:
    """Versions of what decides the speed."""
    return {name: version(name) for name in ("tandem", "torch", "transformers")}
