"""Records to store, with as little said as possible."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tandem.core.learning import (
    AdapterRecord,
    Feedback,
    FeedbackKind,
    Sample,
    SampleKind,
    VersionRecord,
    VersionState,
)
from tandem.store import Connection, adapters, feedback

MESSAGES = ({"role": "user", "content": "Hi \u0000 \U0001f600"},)


def make_feedback(name: str, **fields: Any) -> Feedback:
    plain = Feedback(
        feedback_id=name,
        created_s=1.5,
        adapter="formal",
        kind=FeedbackKind.PREFERENCE,
        messages=MESSAGES,
        chosen="good\u0000",
        rejected="bad",
        metadata={"a": "b"},
    )
    return replace(plain, **fields)


def make_sample(name: str, **fields: Any) -> Sample:
    plain = Sample(
        sample_id=name,
        feedback_id="f1",
        adapter="formal",
        kind=SampleKind.DPO,
        created_s=1.5,
        messages=MESSAGES,
        prompt="",
        chosen="good\u0000",
        rejected="bad",
    )
    return replace(plain, **fields)


def make_version(number: int, **fields: Any) -> VersionRecord:
    plain = VersionRecord(
        adapter="formal",
        number=number,
        content_hash=f"hash{number}",
        path=f"/versions/{number}",
        created_s=2.0,
        state=VersionState.CANDIDATE,
        parent=number - 1,
        metrics={"loss": 0.5},
    )
    return replace(plain, **fields)


def fill(connection: Connection, number: int, **fields: Any) -> list[str]:
    """An adapter `formal` and feedback `f1` with samples `s0`, `s1`, ...; their ids."""
    adapters.create(connection, AdapterRecord("formal", 1.0))
    made = [make_sample(f"s{index}", **fields) for index in range(number)]
    feedback.add(connection, make_feedback("f1"), made)
    return [sample.sample_id for sample in made]
