"""When a device's work is done: one that computes behind the CPU has to be waited for.

Invariant: no clock is read for a result before what the result took has been computed.
"""

from __future__ import annotations

import torch


def wait_for(device: torch.device) -> None:
    """Return once `device` has computed everything that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
