"""Paths in rows are relative to the store's directory, which may be moved or mounted elsewhere.

Records have whole paths, rows have the part below the directory, and texts for clients do not show
where it is. Looks at no file. Invariant: a path outside of the directory is kept unchanged.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from tandem.store.tables import from_row, to_row

DIRECTORY = "store_directory"
"""Execution option of a connection: the store's directory."""

Record = TypeVar("Record")

_FIELDS = ("path", "checkpoint_path")


def to_kept(connection: Connection, record: object) -> dict[str, Any]:
    """The columns of a record, with paths relative to the store's directory."""
    row, directory = to_row(record), _directory(connection)
    for name in _FIELDS:
        if name in row and Path(row[name]).is_relative_to(directory):
            row[name] = str(Path(row[name]).relative_to(directory))
    return row


def from_kept(connection: Connection, kind: type[Record], row: sa.RowMapping) -> Record:
    """The record of a row with relative paths."""
    columns = {str(name): value for name, value in row.items()}
    for name in _FIELDS:
        if columns.get(name):
            columns[name] = whole(connection, columns[name])
    return from_row(kind, columns)


def whole(connection: Connection, path: str) -> str:
    """The absolute path of a row's path."""
    return str(_directory(connection) / path)


def without_directory(connection: Connection, text: str) -> str:
    """A text for clients: "the store" instead of the store's directory."""
    own = re.escape(str(_directory(connection)))
    return re.sub(rf"{own}(?![\w.-])", "the store", text)


def _directory(connection: Connection) -> Path:
    directory = connection.get_execution_options()[DIRECTORY]
    assert isinstance(directory, Path)
    return directory
