"""Structured logs: one line per event, with `key=value` after the message.

Fields are passed as `extra={"fields": {...}}`. Knows nothing of requests. Invariant: neither this
module nor its callers put a prompt, an answer, a header or a key into a record.
"""

from __future__ import annotations

import json
import logging
import sys
from typing import Any, TextIO

ROOT = "tandem"


# Routes that monitoring and watching clients poll about every second.
_POLLED = frozenset(
    (
        *("/health", "/ready", "/metrics"),
        *("/v1/adapters/{name}", "/v1/adapters/{name}/events"),
        *("/v1/fine_tuning/jobs/{job_id}", "/v1/fine_tuning/jobs/{job_id}/events"),
    )
)


class QuietPolls(logging.Filter):
    """Hides successful polls unless the logger shows details. Failed polls are shown."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is shown."""
        fields: dict[str, Any] = record.__dict__.get("fields", {})
        looked = fields.get("method") == "GET" and fields.get("route") in _POLLED
        if not looked or fields.get("status", 500) >= 400:
            return True
        return logging.getLogger(ROOT).isEnabledFor(logging.DEBUG)


class FieldFormatter(logging.Formatter):
    """`time level logger message key=value ...`, with values quoted if needed."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """The line, with the record's fields at its end."""
        line = super().format(record)
        fields: dict[str, Any] = record.__dict__.get("fields", {})
        pairs = [f"{name}={_value(value)}" for name, value in fields.items()]
        return " ".join([line, *pairs])


def configure(level: str, stream: TextIO = sys.stderr) -> logging.Logger:
    """Set up the project's logger, once per process. Other libraries log from `warning` on.

    Raises `ValueError` for an unknown level.
    """
    handler = logging.StreamHandler(stream)
    handler.setFormatter(FieldFormatter())
    handler.addFilter(QuietPolls())
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
