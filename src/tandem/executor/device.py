"""Waits for a device that computes asynchronously.

Invariant: no clock is read for a result before the work of the result is done.
"""

from __future__ import annotations

import torch


def wait_for(device: torch.device) -> None:
    """Return once `device` has computed everything it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
