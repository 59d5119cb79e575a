"""Adapter versions: which LoRA weights wrote an answer.

A version is identified by the hash of its content. Two loads of the same files share KV blocks. New
files under an old name never do.
"""

from __future__ import annotations

from dataclasses import dataclass

INTERNAL = "~"
"""Prefix of names inside the engine that clients never see, such as those of candidates."""

PINNED = f"{INTERNAL}batch/"
"""Prefix of the names under which batches pin the versions that answer their lines."""


@dataclass(frozen=True, slots=True)
class AdapterVersion:
    """One immutable set of LoRA weights under a name.

    `content_hash` is a hex digest of configuration and weights; it is part of the KV keys. `number`
    counts the loads of this name from 1 (0: none yet). `path` is the PEFT directory.
    """

    name: str
    number: int
    content_hash: str
    path: str

    @property
    def internal(self) -> bool:
        """Whether it is hidden from clients."""
        return self.name.startswith(INTERNAL)

    @property
    def label(self) -> str:
        """Text for headers and fingerprints, e.g. `formal@3`."""
        return f"{self.name}@{self.number}"
