"""What an adapter's versions were measured at, as JSON Lines and as TensorBoard's event file.

Writes both formats itself: TensorBoard's is a few fields of protobuf in records with checksums, and
reading it needs no package of ours. Invariant: a point is a number of the gate or of training at a
version; what was not measured has no point.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

_VERSION = "brain.Event:2"
_MASK = 0xA282EAD8
_CASTAGNOLI = 0x82F63B78


def write_curves(
    name: str, versions: Sequence[dict[str, Any]], folder: Path
) -> tuple[Path, Path, int]:
    """Write the versions of adapter `name`, as the API lists them, into `folder`, oldest first: the
    two files, and how many points they have. A file of an earlier time is replaced."""
    ordered = sorted(versions, key=lambda version: int(version["version"]))
    lines, events = folder / f"{name}.jsonl", folder / name / "events.out.tfevents.tandem"
    events.parent.mkdir(parents=True, exist_ok=True)
    lines.write_text("".join(f"{json.dumps(_line(version))}\n" for version in ordered))
    points = [
        (float(version["created_at"]), int(version["version"]), tag, value)
        for version in ordered
        for tag, value in _numbers(version)
    ]
    with events.open("wb") as file:
        began_s = points[0][0] if points else 0.0
        file.write(_record(_double(1, began_s) + _text(3, _VERSION)))
        for time_s, step, tag, value in points:
            file.write(_record(_event(time_s, step, f"learning/{tag}", value)))
    return lines, events, len(points)


def _line(version: dict[str, Any]) -> dict[str, Any]:
    about = ("version", "created_at", "state", "current", "parent", "origin", "reason")
    return {**{key: version[key] for key in about}, **dict(_numbers(version))}


def _numbers(version: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in sorted(version["metrics"].items()):
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield name, float(value)


def _event(time_s: float, step: int, tag: str, value: float) -> bytes:
    """An `Event` with one scalar of its `Summary`."""
    scalar = _text(1, tag) + _key(2, 5) + struct.pack("<f", value)
    summary = _bytes(1, scalar)
    return _double(1, time_s) + _key(2, 0) + _varint(step) + _bytes(5, summary)


def _record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + _checksum(length) + data + _checksum(data)


def _checksum(data: bytes) -> bytes:
    crc = crc32c(data)
    masked = (((crc >> 15) | (crc << 17)) + _MASK) & 0xFFFFFFFF
    return struct.pack("<I", masked)


def crc32c(data: Iterable[int]) -> int:
    """The CRC of Castagnoli's polynomial (RFC 3720), bit by bit: the files are small."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (_CASTAGNOLI if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def _key(field: int, wire_type: int) -> bytes:
    return _varint(field << 3 | wire_type)


def _double(field: int, value: float) -> bytes:
    return _key(field, 1) + struct.pack("<d", value)


def _text(field: int, text: str) -> bytes:
    return _bytes(field, text.encode())


def _bytes(field: int, data: bytes) -> bytes:
    return _key(field, 2) + _varint(len(data)) + data


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)
