"""A `Capture` without a GPU: records every call of torch and every Triton launch, with the very
tensors, and runs them again into the same tensors.

It refuses what cannot be captured on a GPU: reading a value on the host, and making a tensor from
Python's values. A Python value that was baked in, or an input that is not persistent, shows in the
next replay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tandem.model.gpu.launch import watched

_READS = {"item", "tolist", "numpy", "cpu", "nonzero", "masked_select", "unique"}
_READS |= {"__bool__", "__int__", "__float__", "__index__", "__array__"}
_MAKES = {"tensor", "as_tensor", "from_numpy", "asarray", "frombuffer"}
_INDEXES = {"index", "index_put", "index_put_"}
_WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "lift_fresh", "equal"}


class NotCapturable(RuntimeError):
    """What was recorded would wait for the device, or copy from the host."""


class _NoHost(TorchFunctionMode):
    """Refuses methods that never reach the dispatcher on a CPU."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Called instead of every function of torch."""
        name = function.__name__
        if name in _READS or name in _MAKES:
            raise NotCapturable(f"{name} in a captured pass")
        return function(*args, **(kwargs or {}))


class _Log(TorchDispatchMode):
    """Records calls while it is not paused."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], None]] = []
        self.paused = False

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Called instead of every ATen function."""
        kwargs = kwargs or {}
        output = function(*args, **kwargs)
        if self.paused:
            return output
        name = function.overloadpacket.__name__
        if name in _WAITS or (name in _INDEXES and _has_mask(args[1])):
            raise NotCapturable(f"{name} in a captured pass")
        given = {_place(each) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        made = [
            (place, each)
            for place, each in enumerate(tree_leaves(output))
            if isinstance(each, Tensor) and _place(each) not in given
        ]

        def again() -> None:
            found = tree_leaves(function(*args, **kwargs))
            for place, tensor in made:
                tensor.copy_(found[place])

        self.calls.append(again)
        return output

    def launch(
        self, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], meta: dict[str, Any]
    ) -> None:
        """A `Watcher`. What the interpreter calls itself is no part of the recording."""

        def again() -> None:
            kernel[grid](*args, **meta)

        self.paused = True
        try:
            again()
        finally:
            self.paused = False
        self.calls.append(again)


class FakeCapture:
    """A `Capture`. `records` counts recordings and `replays` what was done again."""

    def __init__(self) -> None:
        self.records = 0
        self.replays = 0

    def record(self, call: Callable[[], None]) -> Callable[[], None]:
        """See `Capture`."""
        log = _Log()
        with torch.no_grad(), _NoHost(), log, watched(log.launch):
            call()
        self.records += 1

        def replay() -> None:
            self.replays += 1
            with torch.no_grad():
                for again in log.calls:
                    again()

        return replay


def _has_mask(indices: Any) -> bool:
    """An index of truth values is counted on the host."""
    return any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in indices)


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
