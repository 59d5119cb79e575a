"""The study of structured output: its schemas, and what it says of answers, on the demo model."""

from __future__ import annotations

import asyncio
from typing import Any

import jsonschema
import pytest

from benchmarks.structured.__main__ import page, problems
from benchmarks.structured.answers import Answered, Writer, cut, different, wrong
from benchmarks.structured.hostile import hostile
from benchmarks.structured.schemas import HOSTILE, schema_of
from engine_serving import live_engine
from tandem.config import ModelConfig, Settings
from tandem.services.answering.grammars import check_schema

GOOD: dict[str, Any] = {
    "schemas": 2, "cut": 0, "wrong": [], "alone": 1, "other_alone": [], "preemptions": 3,
    "other_preempted": [],
    "masks": [{"rows": 8, "masks": 80, "mean": 60.0, "median": 50.0, "p95": 90.0, "p99": 99.0}],
    "hostile": {
        "alone_s": 0.1, "beside_s": 0.2,
        "rows": {"deep": {"status": 400, "seconds": 0.2, "message": "no | no"}},
    },
}  # fmt: skip


def test_schemas_are_schemas_that_may_be_sent_and_stay_the_same() -> None:
    for number in range(300):
        schema = schema_of(number)
        jsonschema.Draft202012Validator.check_schema(schema)
        check_schema(schema, "schema")
        assert schema == schema_of(number)
    assert len({str(schema_of(number)) for number in range(300)}) > 280


def test_what_is_not_as_it_must_be_is_told() -> None:
    assert problems(GOOD) == [] and "no \\| no" in page({"device": "cpu"}, "demo", GOOD)
    slow = {"rows": 8, "mean": 100.0}
    late = {
        "rows": {"deep": {"status": 400, "seconds": 1.1}, "wide": {"status": 200, "seconds": 0}}
    }
    said = problems(GOOD | {"wrong": ["text"], "masks": [slow], "hostile": late})
    assert len(said) == 4


def test_answers_are_judged_by_their_schema() -> None:
    schema = {"type": "string", "format": "ipv4"}
    assert wrong(schema, Answered('"1.2.3.4"', (1,), True)) is None
    assert wrong(schema, Answered('"1.2.3"', (1,), True)) is not None
    assert wrong(schema, Answered('"1.2', (1,), True)) is not None
    cut_off = Answered('"1.2', (1,), False)
    assert wrong(schema, cut_off) is None and cut([cut_off]) == 1
    assert different([cut_off], [Answered("", (2,), False)]) == [0]


@pytest.mark.full
def test_answers_match_alone_together_and_preempted() -> None:
    """Greedy text does not depend on neighbours or on what was taken away meanwhile."""
    check_model("demo", 14, 60, kv_bytes=6 << 20)


@pytest.mark.full
def test_answers_of_a_real_model_match_alone_together_and_preempted() -> None:
    check_model("smollm2", 21, 160, kv_bytes=96 << 20)


def check_model(model: str, schemas: int, max_tokens: int, kv_bytes: int) -> None:
    asked = [schema_of(number) for number in range(schemas)]
    writer, tight = Writer(model), Writer(model, kv_bytes=kv_bytes, policy="fcfs")
    together = writer.answers(asked, max_tokens)
    assert [said for pair in zip(asked, together, strict=True) if (said := wrong(*pair))] == []
    assert cut(together) < schemas
    alone = [writer.answers([schema], max_tokens)[0] for schema in asked[:4]]
    assert different(together[:4], alone) == []
    assert different(together, tight.answers(asked, max_tokens)) == []
    assert tight.preemptions > 0
    assert writer.mask_microseconds(asked, together, 2)["masks"] > 0


@pytest.mark.full
def test_hostile_grammars_are_refused_while_others_decode_on() -> None:
    with live_engine(Settings(model=ModelConfig(model="demo"))) as url:
        found = asyncio.run(hostile(url, "demo"))
    assert {name: row["status"] for name, row in found["rows"].items()} == dict.fromkeys(
        HOSTILE, 400
    )
    assert all(row["param"].startswith("structured_outputs.") for row in found["rows"].values())
