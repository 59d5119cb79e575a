"""Records what a function gives to the device once, to do it again with one call.

What is recorded is a sequence of kernels over fixed tensors: only the contents of the tensors may
differ between two calls, never a shape or a Python value. Knows no model. Invariant: a recording
that failed leaves the device as usable as before.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import torch


class Capture(Protocol):
    """A way to record."""

    def record(self, call: Callable[[], None]) -> Callable[[], None]:
        """A function that does on the device what `call` does, in the order of the current stream.

        `call` runs at least once, and its last run may have no effect until the result is called.
        It must not wait for the device, and must keep every tensor that others are to read. Raises
        `RuntimeError` if it cannot be recorded.
        """
        ...


class CudaCapture:
    """Records CUDA graphs that share one pool of memory.

    So two of them must not run at the same time, and a tensor that a graph allocates is undefined
    after another one has run.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, call: Callable[[], None]) -> Callable[[], None]:
        """See `Capture`. The first run compiles kernels and lets libraries prepare, which cannot be
        done while a graph is captured."""
        current = torch.cuda.current_stream(self._stream.device)
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                call()
                self._stream.synchronize()
                self._capture(graph, call)
        finally:  # what was given before an error may still run
            current.wait_stream(self._stream)
        return graph.replay

    def _capture(self, graph: torch.cuda.CUDAGraph, call: Callable[[], None]) -> None:
        # Other threads read adapters to the device meanwhile: they must not be disturbed.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            call()
        except BaseException:
            with suppress(RuntimeError):  # that it is invalid is known already
                graph.capture_end()
            self._leave_pool()
            raise
        graph.capture_end()

    def _leave_pool(self) -> None:
        """Take a new pool. A capture that ends with an error leaves torch's allocator recording
        into the old one."""
        with suppress(RuntimeError):  # it may have stopped
            torch._C._cuda_endAllocateToPool(self._stream.device.index, self._pool)
        self._pool = torch.cuda.graph_pool_handle()
