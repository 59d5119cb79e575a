"""Completes the account of an engine's memory with the system's numbers for the process.

Knows no plan and no model. Invariant: on Linux, the purposes of a process that computes on the CPU
add up to its resident memory, except for what was swapped out.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")


def whole_account(account: Mapping[str, int], device: torch.device) -> dict[str, int]:
    """`account` by purpose, plus the remaining memory of the process.

    KV cache and recordings are the only shared mappings, so resident shared pages tell how much of
    the KV cache was written. If the system gives no numbers, or the device has its own memory, the
    result is `account`.
    """
    resident = _resident() if device.type == "cpu" else {}
    if not resident:
        return dict(account)
    found = dict(account)
    found["kv"] = min(account["kv"], max(0, resident["RssShmem"] - account["recordings"]))
    own = sum(found.values()) - found["kv"] - account["recordings"]
    found["libraries"] = resident["RssFile"]
    found["other"] = max(0, resident["RssAnon"] - own)
    return found


def _resident() -> dict[str, int]:
    """Resident bytes of this process by kind of page; empty if the system does not tell."""
    try:
        lines = _STATUS.read_text(encoding="ascii").splitlines()
    except OSError:
        return {}
    parts = (line.split() for line in lines if line.startswith(("RssAnon", "RssFile", "RssShmem")))
    found = {name.rstrip(":"): 1024 * int(count) for name, count, *_ in parts}
    return found if len(found) == 3 else {}
