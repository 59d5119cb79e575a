"""Real preference pairs for the DPO steps of ours and of TRL: the same ones in the same order.

Written once by the process that compares, read by workers in any environment: standard library
only. Invariant: the text of a pair and its token ids are the same to both.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STEP_PAIRS = 8
MICRO_PAIRS = 4
"""A step of the server's defaults: eight samples in two micro-batches."""


@dataclass(frozen=True)
class Pair:
    """Texts with the template's marks, completions without the end of turn; ids with it."""

    prompt: str
    chosen: str
    rejected: str
    prompt_ids: list[int]
    chosen_ids: list[int]
    rejected_ids: list[int]

    @property
    def tokens(self) -> int:
        """Of both sequences."""
        return 2 * len(self.prompt_ids) + len(self.chosen_ids) + len(self.rejected_ids)


def write(path: Path, pairs: list[dict[str, Any]]) -> None:
    """Whole steps of `pairs`, those that are left over not."""
    whole = pairs[: len(pairs) // STEP_PAIRS * STEP_PAIRS]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(whole))


def read(path: str) -> list[Pair]:
    """In the order in which they are trained on."""
    return [Pair(**each) for each in json.loads(Path(path).read_text())]


def whole_steps(pairs: list[Pair]) -> list[list[Pair]]:
    """The pairs of one step after the other, each once."""
    return [pairs[at : at + STEP_PAIRS] for at in range(0, len(pairs), STEP_PAIRS)]
