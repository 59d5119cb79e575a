"""Finds out what a PEFT adapter directory contains, without reading tensors into memory.

The content hash over configuration and weights identifies a version. Equal files share KV blocks;
changed files do not. Invariant: nothing here trusts the directory.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from tandem.adapters.configuration import read_configuration
from tandem.core.errors import AdapterError

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
_CHUNK_BYTES = 1 << 20
# Entries of the configuration that tell its origin but do not affect the computation.
_NOTES = frozenset(
    ("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision")
)


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """A readable PEFT directory. `content_hash` is 32 hex digits of a SHA-256."""

    path: Path
    content_hash: str


def holds(path: str | Path, content_hash: str) -> bool:
    """Whether the adapter at `path` exists and still has this content. Blocks."""
    try:
        return inspect_adapter(path).content_hash == content_hash
    except AdapterError:
        return False


def inspect_adapter(path: str | Path) -> AdapterFiles:
    """Check that `path` looks like a LoRA adapter and hash it. Raises `AdapterError`."""
    directory = Path(path)
    config, weights = directory / CONFIG_NAME, directory / WEIGHTS_NAME
    if not directory.is_dir():
        raise AdapterError(f"there is no adapter directory at {directory}", param="path")
    if not weights.is_file() and (directory / "adapter_model.bin").is_file():
        raise AdapterError(
            f"{directory} holds a pickled adapter_model.bin, which is never loaded; save it again "
            "with safe_serialization=True",
            param="path",
        )
    for file in (config, weights):
        if not file.is_file():
            raise AdapterError(f"{directory} has no {file.name}", param="path")
    content = read_configuration(config)
    arithmetic = {key: value for key, value in content.items() if key not in _NOTES}
    digest = hashlib.sha256(json.dumps(arithmetic, sort_keys=True).encode())
    try:
        with weights.open("rb") as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                digest.update(chunk)
    except OSError as error:
        raise AdapterError(f"cannot read {weights.name}: {error.strerror}") from error
    return AdapterFiles(directory.resolve(), digest.hexdigest()[:32])
