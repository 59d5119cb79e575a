"""Zips of strangers are bounded before and while they are unpacked."""

from __future__ import annotations

import json
import random
import zipfile
from pathlib import Path

import pytest

from tandem.adapters import archives
from tandem.adapters.archives import pack, unpack
from tandem.adapters.configuration import MOST_CONFIG_BYTES
from tandem.core.errors import AdapterError, DiskError, NotFound

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MOST_BYTES = 100_000


def zipped(folder: Path, files: dict[str, bytes]) -> Path:
    archive = folder / "a.zip"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, content in files.items():
            packed.writestr(name, content)
    return archive


def left(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_what_is_packed_is_unpacked(tmp_path: Path) -> None:
    files = {f"deep/{CONFIG}": b"{}", f"deep/{WEIGHTS}": b"w" * MOST_BYTES, "README.md": b"x"}
    unpack(zipped(tmp_path, files), tmp_path / "out", MOST_BYTES)
    assert (tmp_path / "out" / WEIGHTS).read_bytes() == b"w" * MOST_BYTES
    again = pack(tmp_path / "out", tmp_path / "packed")
    unpack(again, tmp_path / "again", MOST_BYTES)
    again.unlink()
    assert (tmp_path / "again" / CONFIG).read_bytes() == b"{}"


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({CONFIG: b"{}", WEIGHTS: bytes(MOST_BYTES + 1)}, WEIGHTS),
        ({CONFIG: b"{}", WEIGHTS: bytes(300 * MOST_BYTES)}, "--max-file"),
        ({CONFIG: b" " * (MOST_CONFIG_BYTES + 1), WEIGHTS: b"w"}, CONFIG),
        ({CONFIG: b"{}"}, f"no {WEIGHTS}"),
        ({CONFIG: b"{}", WEIGHTS: b"w", f"checkpoint-9/{WEIGHTS}": b"v"}, f"2 files {WEIGHTS}"),
    ],
    ids=range(5),
)
def test_what_unpacks_to_too_much_is_refused_before_it_is_written(
    tmp_path: Path, files: dict[str, bytes], named: str
) -> None:
    archive = zipped(tmp_path, files)
    with pytest.raises(AdapterError, match=named):
        unpack(archive, tmp_path / "out", MOST_BYTES)
    assert left(tmp_path / "out") <= MOST_BYTES + MOST_CONFIG_BYTES


def test_a_list_of_very_many_files_is_not_read(tmp_path: Path) -> None:
    archive = tmp_path / "many.zip"
    with zipfile.ZipFile(archive, "w") as packed:
        for number in range(80):
            packed.writestr(f"{number:060000}", b"")
    with pytest.raises(AdapterError, match="too many files"):
        unpack(archive, tmp_path / "out", MOST_BYTES)


def test_damaged_zips_are_refused_without_a_path(tmp_path: Path) -> None:
    whole = zipped(tmp_path, {CONFIG: json.dumps({"r": 8}).encode(), WEIGHTS: b"w" * 1000})
    raw, rng = whole.read_bytes(), random.Random(1)
    for number in range(100):
        damaged = bytearray(raw)
        for _ in range(rng.randint(1, 8)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        archive = tmp_path / "damaged.zip"
        archive.write_bytes(damaged[: rng.choice((len(damaged), rng.randrange(len(damaged))))])
        try:
            unpack(archive, tmp_path / f"out{number}", MOST_BYTES)
        except AdapterError as error:
            assert str(tmp_path) not in str(error)


def test_a_disk_that_is_full_is_not_the_archives_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(number: int) -> None:
        raise OSError(28, "No space left on device")

    archive = zipped(tmp_path, {CONFIG: b"{}", WEIGHTS: b"w"})
    monkeypatch.setattr(archives.os, "fsync", full)
    with pytest.raises(DiskError, match="No space left on device"):
        unpack(archive, tmp_path / "out", MOST_BYTES)


def test_an_export_of_files_that_are_gone_says_so_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    scratch = tmp_path / "scratch"
    with pytest.raises(NotFound, match="gone"):
        pack(tmp_path / "nowhere", scratch)
    assert list(scratch.iterdir()) == []
