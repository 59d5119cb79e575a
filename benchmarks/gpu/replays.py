"""Recorded passes one after the other: what the device takes without the host between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from benchmarks.gpu.ceilings import Ceilings
from benchmarks.gpu.engine import Engine
from benchmarks.gpu.options import Options
from benchmarks.gpu.passes import Passes, Row, loaded_adapters
from tandem.executor.capture import Capture, CudaCapture

REPLAYS = 20


class Recorded:
    """A `Capture` that gives away what the last recording was."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self.last: Callable[[], None] = lambda: None

    def record(self, call: Callable[[], None]) -> Callable[[], None]:
        """See `Capture`."""
        self.last = self._capture.record(call)
        return self.last

    def device_ms(self) -> float:
        """Of the pass that was recorded last."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(REPLAYS):
            self.last()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / REPLAYS


def replays(engine: Engine, ceilings: Ceilings, options: Options) -> Iterator[Row]:
    """Decodes as in `decode` and `adapters`. Nothing without a CUDA device."""
    if options.device != "cuda":
        return
    recorded = Recorded(CudaCapture(torch.device("cuda")))
    engine.executor.capture_passes(recorded, 0.0)
    passes = Passes(engine, options)
    many = options.adapter_rows
    with loaded_adapters(engine.executor, many) as keys:
        kinds: list[tuple[str, list[str | None]]] = [("none", [None] * n) for n in options.batches]
        kinds += [("one, on all rows", [keys[0]] * many), (f"{many}, one a row", [*keys])]
        for kind, adapters in kinds:
            plan = passes.decode(adapters)
            context = sum(span.end for span in plan.spans)
            passes.times([plan])
            seconds = 1e-3 * recorded.device_ms()
            with_kv = engine.pass_bytes + context * engine.kv_token_bytes
            yield {
                "model": engine.name,
                "sequences": len(adapters),
                "context_tokens": context / len(adapters),
                "adapters": kind,
                "ms": 1e3 * seconds,
                "weights_share": engine.pass_bytes / seconds / ceilings.bytes_per_s,
                "stream_share": with_kv / seconds / ceilings.bytes_per_s,
            }
