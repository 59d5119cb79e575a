"""What a job reports: one event for each step, and a CSV of them at the end.

The events are the durable record; the CSV is made of them. Invariant: a step that was repeated
after a crash appears once, with its last numbers.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tandem.core.learning import EventRecord

COLUMNS = ("step", "train_loss", "train_accuracy", "valid_loss", "valid_accuracy")
_DIGITS = 6


def step_event(
    job_id: str, now_s: float, total_steps: int, numbers: Mapping[str, Any]
) -> EventRecord:
    """The event of an applied step; `numbers` has `step` and what was measured."""
    shown = {
        name: round(value, _DIGITS) if isinstance(value, float) else value
        for name, value in numbers.items()
        if value is not None
    }
    message = f"Step {shown['step']}/{total_steps}: training loss={shown['train_loss']:.4f}"
    if "valid_loss" in shown:
        message += f", validation loss={shown['valid_loss']:.4f}"
    return EventRecord(job_id, now_s, "info", message, {"type": "metrics", **shown})


def as_csv(events: Iterable[EventRecord]) -> bytes:
    """The result file of a job, from its events in any order."""
    rows: dict[int, EventRecord] = {}
    for event in events:
        if event.data.get("type") == "metrics":
            step = int(event.data["step"])
            if step not in rows or rows[step].number < event.number:
                rows[step] = event
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for step in sorted(rows):
        writer.writerow(_row(rows[step].data))
    return text.getvalue().encode()


def _row(data: Mapping[str, Any]) -> Sequence[Any]:
    return [data.get(name, "") for name in COLUMNS]
