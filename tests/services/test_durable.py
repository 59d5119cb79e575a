from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tandem.services.durable import make_directory, replace_text


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


def test_a_small_file_is_replaced_as_a_whole_by_many_at_once(tmp_path: Path) -> None:
    file, texts = tmp_path / "file.json", [str(n) * 10_000 for n in range(10)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda text: replace_text(file, text), texts * 20))
    assert file.read_text() in texts
    assert list(tmp_path.iterdir()) == [file]
