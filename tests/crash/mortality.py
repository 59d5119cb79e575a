"""A file says where a process dies next: `POINT SCOPE NTH`. Used by the launchers beside it.

The file is removed before the kill, so that one order kills once, also after a restart. SIGKILL is
all there is: nothing is flushed, closed or told.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil

TREE = "tree"
ENGINE = "engine"
SERVER = "server"
ENGINE_MODULE = "mortal_engine.py"


class Mortality:
    """Dies at a point: with the whole process group, with the engine alone, or with the server
    alone (its engine then has to notice)."""

    def __init__(self, order: Path) -> None:
        self._order = order

    def at(self, point: str) -> None:
        """Called where a test may want the end."""
        try:
            name, scope, nth = self._order.read_text().split("|")
        except (FileNotFoundError, ValueError):  # none, or just being written
            return
        if name != point:
            return
        if int(nth) > 1:
            self._order.write_text(f"{name}|{scope}|{int(nth) - 1}")
            return
        self._order.unlink()
        if scope == TREE:
            os.killpg(0, signal.SIGKILL)
        os.kill(_engine_pid() if scope == ENGINE else os.getpid(), signal.SIGKILL)

    def before(self, point: str, call: Callable[..., object]) -> Callable[..., object]:
        """`call`, with the point before it."""

        def called(*args: object, **named: object) -> object:
            self.at(point)
            return call(*args, **named)

        return called

    def after(self, point: str, call: Callable[..., object]) -> Callable[..., object]:
        """`call`, with the point after it."""

        def called(*args: object, **named: object) -> object:
            result = call(*args, **named)
            self.at(point)
            return result

        return called


def _engine_pid() -> int:
    """This process if it is the engine, else its child that is."""
    own = psutil.Process()
    found = [p for p in (own, *own.children()) if any(ENGINE_MODULE in x for x in p.cmdline())]
    return found[0].pid
