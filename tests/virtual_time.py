"""An event loop whose clock moves only while everybody waits, so that sleeping takes no time.

For code that waits for times alone: a thread or another process would be overtaken.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Coroutine
from typing import Any, TypeVar
from unittest.mock import patch

T = TypeVar("T")


class _Skips(selectors.DefaultSelector):
    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(None if timeout is None else 0.0)
        if not ready:
            self.now_s += timeout or 0.0
        return ready


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._skips = _Skips()
        super().__init__(self._skips)

    def time(self) -> float:
        return self._skips.now_s


def virtually(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, for which the clocks of `time` are the loop's."""
    with asyncio.Runner(loop_factory=_Loop) as runner:
        now = runner.get_loop().time
        with patch.object(time, "monotonic", now), patch.object(time, "perf_counter", now):
            return runner.run(work)
