"""Bytes on the device that the host rewrites before each pass, by one asynchronous copy.

Two mirrors on the host take turns. A mirror is written only after the copy that last read it has
ended. Invariant: the device's bytes keep their address, which a captured graph reads.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Staging:
    """`device` uint8 [nbytes]. On the CPU, mirrors are plain memory and copies are over at once."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self.device = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self._mirrors = tuple(
            torch.zeros(nbytes, dtype=torch.uint8, pin_memory=cuda) for _ in range(2)
        )
        # When the last copy of each mirror has ended; an event that was never recorded has.
        self._ended = tuple(torch.cuda.Event() for _ in range(2)) if cuda else ()
        self._turn = 0

    @property
    def mirrors(self) -> tuple[Tensor, ...]:
        """Both mirrors, uint8 [nbytes] each: for views that are made once."""
        return self._mirrors

    def begin(self) -> int:
        """Wait for a mirror that may be written, and return its number."""
        self._turn = 1 - self._turn
        if self._ended:
            self._ended[self._turn].synchronize()
        return self._turn

    def send(self, nbytes: int) -> None:
        """Copy the first bytes of the mirror that `begin` returned, in order of the stream."""
        mirror = self._mirrors[self._turn]
        self.device[:nbytes].copy_(mirror[:nbytes], non_blocking=True)
        if self._ended:
            self._ended[self._turn].record()
