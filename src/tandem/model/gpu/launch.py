"""Launches Triton kernels: the only place that does.

A test may watch launches, since torch's own modes do not see them. Knows no kernel. Invariant:
without a watcher, `launch` only launches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

# Gets a call of `launch` instead of the device: kernel, grid, arguments, compile-time values.
Watcher = Callable[[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]], None]

_WATCHER: ContextVar[Watcher | None] = ContextVar("watcher of launches", default=None)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
    """Run `kernel` over `grid` on the current stream."""
    watcher = _WATCHER.get()
    if watcher is not None:
        watcher(kernel, grid, args, meta)
    else:
        kernel[grid](*args, **meta)


@contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Give launches of this thread to `watcher` inside. It has to run them."""
    token = _WATCHER.set(watcher)
    try:
        yield
    finally:
        _WATCHER.reset(token)
