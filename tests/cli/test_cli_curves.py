"""`tandem adapters curves`: what it writes can be read back."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from typer.testing import CliRunner

from fake_engine import FakeEngine
from serving import live, make_app
from tandem.cli import app
from tandem.cli.curves import crc32c, write_curves


def version(number: int, **metrics: Any) -> dict[str, Any]:
    return {
        "version": number, "created_at": 1_700_000_000 + number, "state": "published",
        "current": number == 2, "parent": number - 1, "origin": "feedback", "reason": None,
        "metrics": metrics,
    }  # fmt: skip


def records(content: bytes) -> Iterator[bytes]:
    """The records of a file in TensorFlow's format, whose checksums are right."""
    while content:
        [length] = struct.unpack_from("<Q", content)
        data = content[12 : 12 + length]
        for part, place in ((content[:8], 8), (data, 12 + length)):
            crc = crc32c(part)
            masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) % 2**32
            assert struct.unpack_from("<I", content, place) == (masked,)
        yield data
        content = content[16 + length :]


def fields(message: bytes) -> dict[int, Any]:
    """A protobuf message by field number: integers, doubles, floats and bytes."""
    found: dict[int, Any] = {}
    place = 0

    def varint() -> int:
        nonlocal place
        value = shift = 0
        while True:
            byte = message[place]
            place += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while place < len(message):
        field, kind = divmod(varint(), 8)
        if kind == 0:
            found[field] = varint()
            continue
        size = varint() if kind == 2 else {1: 8, 5: 4}[kind]
        part, place = message[place : place + size], place + size
        found[field] = part if kind == 2 else struct.unpack("<d" if kind == 1 else "<f", part)[0]
    return found


def test_the_checksum_is_castagnolis() -> None:
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA  # RFC 3720, B.4


def test_both_files_have_every_number_at_its_version(tmp_path: Path) -> None:
    versions = [version(2, loss=0.25, win_rate=0.75, tainted=True), version(1, loss=0.5, note="x")]
    lines, events, points = write_curves("formal", versions, tmp_path)
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [(row["version"], row["loss"]) for row in rows] == [(1, 0.5), (2, 0.25)]
    assert "win_rate" not in rows[0] and rows[1]["win_rate"] == 0.75
    first, *scalars = (fields(record) for record in records(events.read_bytes()))
    assert first == {1: 1_700_000_001.0, 3: b"brain.Event:2"}
    found = []
    for event in scalars:
        value = fields(fields(event[5])[1])
        found.append((event[1], event[2], value[1].decode(), value[2]))
    assert found == [
        (1_700_000_001.0, 1, "learning/loss", 0.5),
        (1_700_000_002.0, 2, "learning/loss", 0.25),
        (1_700_000_002.0, 2, "learning/win_rate", 0.75),
    ]
    assert points == 3


def test_curves_come_from_a_server_or_say_that_there_are_none(tmp_path: Path) -> None:
    words = ["adapters", "curves", "formal", "--out", str(tmp_path / "c")]
    with live(make_app(FakeEngine())) as url:
        run = [*words, "--url", url]
        httpx.post(f"{url}/v1/adapters/formal", json={"settings": {}}).raise_for_status()
        nothing = CliRunner().invoke(app, run)
    assert nothing.exit_code == 1 and "has no versions yet" in nothing.output
    assert not (tmp_path / "c").exists()
