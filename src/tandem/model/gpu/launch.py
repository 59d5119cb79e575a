"""Launches Triton kernels: the only place that does. Knows no kernel."""

from __future__ import annotations

from typing import Any


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
    """Run `kernel` over `grid` on the current stream."""
    kernel[grid](*args, **meta)
