"""The child process of one engine: jobs come as JSON lines on stdin, timings go back on stdout.

Runs inside any engine's own environment, so it imports nothing but the standard library and the
engine named on the command line. Whatever an engine prints goes to stderr.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, Protocol, cast


class Engine(Protocol):
    """One engine with a loaded model."""

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        """Do `job` and return what was measured; see `token_times`."""
        ...


def token_times(started_s: float, times_s: list[list[float]]) -> dict[str, Any]:
    """The answer to a `generate` job: when each token of each sequence came out.

    Seconds since the job was handed to the engine, on a monotonic clock.
    """
    return {"token_s": [[at - started_s for at in sequence] for sequence in times_s]}


def main(name: str, model: str, options: dict[str, Any]) -> None:
    """Load the engine in the module `name`, then do jobs until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    module = importlib.import_module(name)
    start = cast(Callable[[str, dict[str, Any]], Engine], module.start)
    began = time.perf_counter()
    engine = start(model, options)
    ready = {"load_s": time.perf_counter() - began, "versions": module.versions()}
    print(json.dumps(ready), file=answers, flush=True)
    for line in sys.stdin:
        try:
            answer = engine.run(json.loads(line))
        except BaseException:
            traceback.print_exc()
            os._exit(1)  # threads of the engine would keep the process, and the driver would wait
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
