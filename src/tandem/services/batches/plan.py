"""The input file of a batch: is it well formed, where does each line lie, in which order are they
answered.

A line is looked at once and then found again by its offset, so that a file of any size needs little
memory. Lines that begin alike are neighbours in the plan: the engine computes a shared beginning
once. Knows JSON Lines, not what a body means. Invariant: the same file gives the same plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO
from zlib import crc32

import msgspec

from tandem.core.batches import BatchError

MOST_ERRORS = 50
_KEY_CHARS = 600  # of a prompt's beginning that are kept to sort lines
_MOST_ID_CHARS = 512
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Line:
    """One request: `number` counts from 1, `size` is in bytes from `offset` on."""

    number: int
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Plan:
    """A file's lines in the order in which they are answered, and the model that all of them ask
    for; `errors` (at most 50) if the file is not well formed."""

    lines: Sequence[Line]
    model: str = ""
    errors: Sequence[BatchError] = ()


@dataclass(frozen=True, slots=True)
class Ask:
    """What a line asks: its client's name for it, and the body as JSON."""

    custom_id: str
    body: bytes


class _Request(msgspec.Struct):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


def read_plan(path: Path, endpoint: str, most_lines: int, most_bytes: int) -> Plan:
    """Look at every line of up to `most_bytes`. Blocks. Raises `OSError`."""
    reader = _Reader(endpoint, most_bytes)
    for line, raw in _lines(path, most_bytes):
        if line.number > most_lines:
            problem = f"the file has more than {most_lines} lines; send it in parts"
            return Plan((), errors=[BatchError("too_many_tasks", problem)])
        reader.take(line, raw)
        if len(reader.errors) >= MOST_ERRORS:
            break
    return reader.plan()


def read_asks(path: Path, lines: Sequence[Line]) -> list[Ask]:
    """Lines of a file that was found well formed. Blocks. Raises `OSError`, also if the file is not
    what it was."""
    with path.open("rb") as stream:
        return [_ask(stream, line) for line in lines]


def _ask(stream: BinaryIO, line: Line) -> Ask:
    stream.seek(line.offset)
    raw = stream.read(line.size)
    try:
        request = msgspec.json.decode(raw.removeprefix(_BOM), type=_Request)
    except msgspec.MsgspecError as error:
        raise OSError(f"line {line.number} of the input file has changed") from error
    return Ask(request.custom_id, bytes(request.body))


class _Reader:
    """Takes line by line what `plan` then tells."""

    def __init__(self, endpoint: str, most_bytes: int) -> None:
        self.errors: list[BatchError] = []
        self._endpoint = endpoint
        self._most_bytes = most_bytes
        self._model = ""
        self._ids: set[str] = set()
        self._keyed: list[tuple[str, Line]] = []

    def take(self, line: Line, raw: bytes) -> None:
        """Look at a line."""
        if line.size > self._most_bytes:
            self._wrong(line, "invalid_json_line", f"it has more than {self._most_bytes} bytes")
            return
        try:
            found = msgspec.json.decode(raw)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            self._wrong(line, "invalid_json_line", f"it is not valid JSON: {error}")
            return
        if not isinstance(found, dict):
            self._wrong(line, "invalid_json_line", "it is not a JSON object")
            return
        if not self._is_request(line, found):
            return
        try:
            msgspec.json.decode(raw, type=_Request)  # as it is read again later
        except msgspec.MsgspecError:
            self._wrong(line, "invalid_json_line", "a field stands in it twice")
            return
        self._ids.add(found["custom_id"])
        self._keyed.append((_key(found["body"]), line))

    def plan(self) -> Plan:
        """Of all that was taken."""
        if self.errors:
            return Plan((), self._model, tuple(self.errors))
        if not self._keyed:
            return Plan((), errors=[BatchError("empty_file", "the file has no requests")])
        self._keyed.sort(key=lambda each: (each[0], each[1].number))
        return Plan([line for _, line in self._keyed], self._model)

    def _is_request(self, line: Line, found: dict[str, Any]) -> bool:
        before = len(self.errors)
        custom_id, body = found.get("custom_id"), found.get("body")
        if not isinstance(custom_id, str) or not 0 < len(custom_id) <= _MOST_ID_CHARS:
            told = f"'custom_id' must be a text of 1 to {_MOST_ID_CHARS} characters"
            self._wrong(line, "missing_required_parameter", told, "custom_id")
        elif custom_id in self._ids:
            told = f"the custom_id {custom_id[:100]!r} stands in an earlier line, too"
            self._wrong(line, "duplicate_custom_id", told, "custom_id")
        if found.get("method") != "POST":
            self._wrong(line, "invalid_method", "'method' must be POST", "method")
        if found.get("url") != self._endpoint:
            told = f"'url' must be the batch's endpoint, {self._endpoint}"
            self._wrong(line, "url_mismatch", told, "url")
        if not isinstance(body, dict):
            told = "'body' must be the request as a JSON object"
            self._wrong(line, "missing_required_parameter", told, "body")
        else:
            self._check_model(line, body.get("model"))
        return len(self.errors) == before

    def _check_model(self, line: Line, model: object) -> None:
        if not isinstance(model, str) or not model:
            told = "'body.model' must name the model"
            self._wrong(line, "missing_required_parameter", told, "body.model")
        elif not self._model:
            self._model = model
        elif model != self._model:
            told = f"a batch has one model; earlier lines ask for {self._model[:200]!r}"
            self._wrong(line, "model_mismatch", told, "body.model")

    def _wrong(self, line: Line, code: str, told: str, param: str | None = None) -> None:
        if len(self.errors) < MOST_ERRORS:
            self.errors.append(BatchError(code, told, line.number, param))


def _lines(path: Path, most_bytes: int) -> Iterator[tuple[Line, bytes]]:
    """Lines without their ends; blank ones at the end of the file are none, and of others that
    follow each other the first is told. Of a longer line the beginning alone is read, but its whole
    size is told."""
    blank: Line | None = None  # the first of those that were not told yet
    with path.open("rb") as stream:
        number = offset = 0
        while raw := stream.readline(most_bytes + 2):
            number += 1
            size = len(raw)
            while not raw.endswith(b"\n") and (more := stream.readline(most_bytes)):
                size += len(more)
                if more.endswith(b"\n"):
                    break
            text = raw.rstrip(b"\r\n")
            if number == 1:
                text = text.removeprefix(_BOM)
            line = Line(number, offset, size if size > len(raw) else len(raw.rstrip(b"\r\n")))
            offset += size
            if not text.strip():
                blank = blank or line
                continue
            if blank is not None:
                yield blank, b""
                blank = None
            yield line, text


def _key(body: dict[str, Any]) -> str:
    """How what a body renders to begins: the first characters, then marks of parts that grow, so
    that prompts with a long common beginning are neighbours, too."""
    prompt, tools = body.get("messages", body.get("prompt")), body.get("tools")
    parts = [prompt] if isinstance(prompt, str) else prompt if isinstance(prompt, list) else []
    text = "\n".join([*([repr(tools)] if tools else []), *map(_text, parts)])
    marks, start = list[str](), _KEY_CHARS
    while start < len(text):
        marks.append(f"{crc32(text[start : 3 * start].encode(errors='replace')):08x}")
        start *= 3
    return text[:_KEY_CHARS] + "".join(marks)


def _text(part: object) -> str:
    """Of a message, a prompt among several, or token ids."""
    content = part.get("content") if isinstance(part, dict) else part
    if isinstance(content, list) and content and isinstance(content[0], dict):
        content = content[0].get("text")
    return content if isinstance(content, str) else "" if content is None else repr(content)
