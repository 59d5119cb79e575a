"""Structured logs: one line an event, `key=value` after the message.

Fields are passed as `extra={"fields": {...}}`. Knows nothing of requests. Invariant: nothing here
or at its callers puts a prompt, an answer, a header or a key into a record.
"""

from __future__ import annotations

import json
import logging
import sys
from typing import Any, TextIO

ROOT = "tandem"


class FieldFormatter(logging.Formatter):
    """`time level logger message key=value ...`, with values quoted where they need it."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """The line, with the record's fields at its end."""
        line = super().format(record)
        fields: dict[str, Any] = record.__dict__.get("fields", {})
        pairs = [f"{name}={_value(value)}" for name, value in fields.items()]
        return " ".join([line, *pairs])


def configure(level: str, stream: TextIO = sys.stderr) -> logging.Logger:
    """Set up the project's logger once for a process; other libraries speak from `warning` on.

    Raises `ValueError` for an unknown level.
    """
    handler = logging.StreamHandler(stream)
    handler.setFormatter(FieldFormatter())
    logger = logging.getLogger(ROOT)
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
    return logger


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)
    plain = text.isprintable() and not any(character in text for character in ' "=')
    return text if plain and text else json.dumps(text)
