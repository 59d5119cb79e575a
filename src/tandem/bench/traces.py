"""Recorded workloads: Azure LLM inference, Mooncake (FAST'25), vidur's length tables, and
lengths of answers with the scores of their prompts (docs/lengths.md).

Parses files (plain or .gz) into records; `workload` uses them. Invariant: records of a timed trace
are sorted by arrival, and lengths are at least 1.
"""

from __future__ import annotations

import csv
import gzip
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain, islice
from pathlib import Path
from typing import TextIO

import msgspec

from tandem.core.errors import InvalidRequest

MOONCAKE_BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class TraceRecord:
    """One recorded request. Lengths are in tokens.

    `at_s` is None in length tables. `prefix` names the successive blocks of `block_tokens` tokens
    of the prompt: two records with equal leading names had equal leading tokens. Only lengths of
    answers have `scores` of the prompt's text, and the limit `max_tokens` (0: not known).
    """

    at_s: float | None
    prompt_tokens: int
    output_tokens: int
    prefix: tuple[int, ...] = ()
    block_tokens: int = MOONCAKE_BLOCK_TOKENS
    scores: tuple[float, ...] = ()
    max_tokens: int = 0


class _MooncakeLine(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


class _AnswerLine(msgspec.Struct):
    input_tokens: int
    output_tokens: int
    scores: tuple[float, ...]
    max_tokens: int


def read_trace(path: Path, limit: int | None = None) -> list[TraceRecord]:
    """The first `limit` records of `path`, in any known format.

    Raises `InvalidRequest` if it cannot be read or no format fits.
    """
    try:
        with _open_text(path) as file:
            first = file.readline()
            records = list(islice(_records(first, file), limit))
    except (OSError, ValueError, KeyError, EOFError, zlib.error) as error:
        raise InvalidRequest(f"cannot read the trace {path}: {error}") from error
    if records and records[0].at_s is not None:
        records.sort(key=lambda record: record.at_s or 0.0)
    return records


def _open_text(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return path.open("rt", encoding="utf-8-sig", newline="")


def _records(first: str, rest: Iterable[str]) -> Iterator[TraceRecord]:
    """Choose the parser by the first line."""
    if first.startswith("{"):
        return map(_answer if '"output_tokens"' in first else _mooncake, chain([first], rest))
    columns = first.strip().split(",")
    rows = csv.DictReader(rest, fieldnames=columns)
    if {"TIMESTAMP", "ContextTokens", "GeneratedTokens"} <= set(columns):
        return map(_azure, rows)
    if {"num_prefill_tokens", "num_decode_tokens"} <= set(columns):
        return map(_vidur, rows)
    raise ValueError(
        "no Azure CSV, Mooncake JSONL, vidur lengths or lengths of answers (docs/benchmarks.md)"
    )


def _azure(row: dict[str, str]) -> TraceRecord:
    # The seconds have seven decimals, one more than datetime accepts.
    moment = datetime.fromisoformat(row["TIMESTAMP"][:26]).replace(tzinfo=UTC)
    prompt, output = int(row["ContextTokens"]), int(row["GeneratedTokens"])
    return TraceRecord(moment.timestamp(), max(1, prompt), max(1, output))


def _mooncake(line: str) -> TraceRecord:
    row = msgspec.json.decode(line, type=_MooncakeLine)
    prompt, output = max(1, row.input_length), max(1, row.output_length)
    return TraceRecord(row.timestamp / 1e3, prompt, output, row.hash_ids)


def _answer(line: str) -> TraceRecord:
    row = msgspec.json.decode(line, type=_AnswerLine)
    tokens = max(1, row.input_tokens), max(1, row.output_tokens)
    return TraceRecord(None, *tokens, scores=row.scores, max_tokens=row.max_tokens)


def _vidur(row: dict[str, str]) -> TraceRecord:
    prompt, output = int(row["num_prefill_tokens"]), int(row["num_decode_tokens"])
    return TraceRecord(None, max(1, prompt), max(1, output))
