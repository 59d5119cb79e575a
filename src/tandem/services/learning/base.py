"""Notices that the server was started with another base model than its versions learned on.

A file in the store's directory names the weights of the last start. Knows no model. Invariant: the
history of every adapter that answers says so before the new weights are written down.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from tandem.core.learning import VersionRecord
from tandem.services.durable import replace_text
from tandem.services.learning.tools import LearningTools

_FILE = "base-model.sha256"


async def compare_base(
    tools: LearningTools, directory: Path, current: Sequence[VersionRecord]
) -> None:
    """Warn, once, about each of `current` if the weights are others than at the last start."""
    file, weights = directory / _FILE, tools.client.info.weights_hash
    before = await asyncio.to_thread(_read, file)
    if before == weights:
        return
    for version in current if before else ():
        message = (
            f"the base model's weights are others than before: version {version.number} was made "
            "for those; let it learn again, roll back, or serve the old weights"
        )
        await tools.tell(version.adapter, "warning", message, {"before": before, "now": weights})
    await asyncio.to_thread(replace_text, file, weights)


def _read(file: Path) -> str:
    return file.read_text(encoding="ascii") if file.is_file() else ""
