from __future__ import annotations

import os
from pathlib import Path

import pytest

from tandem.services.durable import make_directory


def test_new_directories_are_flushed_into_their_parents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[str] = []
    flush = os.fsync

    def note(descriptor: int) -> None:
        flushed.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    make_directory(tmp_path / "adapters" / "formal")
    assert flushed == [str(tmp_path), str(tmp_path / "adapters")]
    make_directory(tmp_path / "adapters" / "formal")
    assert len(flushed) == 2 and (tmp_path / "adapters" / "formal").is_dir()
