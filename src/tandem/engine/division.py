"""Which cores each of two engines computes on: `--overflow`.

Knows numbers of cores only. Invariant: with `cores:N` no core belongs to both engines, and each has
at least one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.core.errors import InvalidRequest

_PARAM = "scheduling.overflow"
_CORES = re.compile(r"cores:(\d{1,4})")
# Beside a GPU: one for the loop of the main engine, one for HTTP.
_LEFT_CORES = 2


@dataclass(frozen=True, slots=True)
class Division:
    """Cores of the main engine (empty: all) and of the overflow engine, which is on the CPU.
    `gpu`: whether the main engine is on a GPU."""

    main: tuple[int, ...]
    overflow: tuple[int, ...]
    gpu: bool


def divide(wanted: str, cores: Sequence[int], *, gpu: bool, threads: int = 0) -> Division | None:
    """What `wanted` says of `cores`, those that this process may use; None if it is empty.

    `gpu`: whether the main engine computes on one. `threads` are those that it was told to compute
    with (0: one for each core). Raises `InvalidRequest`.
    """
    if not wanted:
        return None
    ordered = tuple(sorted(cores))
    if wanted == "cpu":
        if not gpu:
            raise InvalidRequest(
                "--overflow cpu needs a main engine on a GPU; on a CPU give the overflow engine "
                "some of the cores: --overflow cores:N",
                param=_PARAM,
            )
        return Division((), ordered[_LEFT_CORES:] or ordered[-1:], gpu)
    found = _CORES.fullmatch(wanted)
    if found is None:
        raise InvalidRequest(f"--overflow {wanted!r:.50}: write cores:N, or cpu", param=_PARAM)
    count = int(found[1])
    if not 0 < count < len(ordered):
        most = f"1 to {len(ordered) - 1}" if len(ordered) > 1 else "none, for there is only one"
        raise InvalidRequest(
            f"--overflow {wanted}: the main engine needs a core, too, and this process may use "
            f"{len(ordered)} (possible for the overflow engine: {most})",
            param=_PARAM,
        )
    main = ordered[:-count]
    if not gpu and threads > len(main):
        raise InvalidRequest(
            f"--overflow {wanted} leaves {len(main)} cores to the main engine, and --threads "
            f"{threads} needs more",
            param=_PARAM,
        )
    return Division(main, ordered[-count:], gpu)
