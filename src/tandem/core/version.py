"""Adapter versions: which LoRA weights wrote an answer.

A version is identified by the hash of its content, so that two loads of the same files share KV
blocks and a reload in place under the same name never does.
"""

from __future__ import annotations

from dataclasses import dataclass

INTERNAL = "~"
"""Begins names in the engine that clients never see, such as those of candidates."""


@dataclass(frozen=True, slots=True)
class AdapterVersion:
    """One immutable set of LoRA weights under a name.

    `content_hash` is a hex digest over configuration and weights; it keys KV
    blocks. `number` counts the loads of that name from 1 (0: it has none yet). `path` is the PEFT
    directory.
    """

    name: str
    number: int
    content_hash: str
    path: str

    @property
    def internal(self) -> bool:
        """Whether clients never see it."""
        return self.name.startswith(INTERNAL)

    @property
    def label(self) -> str:
        """Text for headers and fingerprints, e.g. `formal@3`."""
        return f"{self.name}@{self.number}"
