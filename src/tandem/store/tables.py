"""The tables, as the newest migration leaves them, and the conversion of rows and records.

A table has the fields of its record (`core/learning.py`) as columns, plus columns that only the
store needs. Text by users is stored as JSON, because PostgreSQL's text type refuses the character
U+0000, which a model may generate. Invariant: a test compares this file with the result of the
migrations.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import sqlalchemy as sa

Record = TypeVar("Record")
Key = TypeVar("Key")

_CHUNK = 1000  # databases limit the parameters of a statement

METADATA = sa.MetaData()


def _table(name: str, *items: sa.schema.SchemaItem) -> sa.Table:
    return sa.Table(name, METADATA, *items)


def _text(name: str, **options: Any) -> sa.Column[str]:
    return sa.Column(name, sa.Text, nullable=False, **options)


def _json(name: str) -> sa.Column[Any]:
    return sa.Column(name, sa.JSON, nullable=False)


def _double(name: str) -> sa.Column[float]:
    return sa.Column(name, sa.Double, nullable=False)


def _integer(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger, nullable=False)


def _counter(name: str) -> sa.Column[int]:
    """A row counter. SQLite counts up only for this type."""
    kind = sa.BigInteger().with_variant(sa.Integer, "sqlite")
    return sa.Column(name, kind, primary_key=True, autoincrement=True)


RECEIPTS = _table(
    "receipts",
    _text("completion_id", primary_key=True),
    _double("created_s"),
    _text("tenant"),
    sa.Column("adapter", sa.Text),
    _text("version"),
    _text("user"),
    _json("messages"),
    _json("prompt"),
    _json("choices"),
    _json("sampling"),
    sa.Column("prompt_tokens", sa.JSON),
    sa.Index("receipts_by_age", "created_s"),
    sa.Index("receipts_by_user", "user"),
)

FEEDBACK = _table(
    "feedback",
    _counter("row"),
    _text("feedback_id", unique=True),
    _double("created_s"),
    _text("adapter"),
    _text("kind"),
    _json("messages"),
    _json("prompt"),
    _json("chosen"),
    _json("rejected"),
    sa.Column("rating", sa.Double),
    _json("comment"),
    _double("weight"),
    _text("signal"),
    _text("conversation"),
    _text("user"),
    _text("key_id"),
    _text("completion_id"),
    _text("version"),
    _json("metadata"),
    sa.Column("superseded_by", sa.Text),
    sa.Column("same", sa.Text),
    sa.Column("idempotency_key", sa.Text),
    _text("digest"),
    sa.UniqueConstraint("key_id", "idempotency_key", name="feedback_once"),
    sa.Index("feedback_by_adapter", "adapter", "row"),
    sa.Index("feedback_by_user", "user", "row"),
    sa.Index("feedback_by_completion", "completion_id"),
    sa.Index("feedback_by_same", "same"),
)

SAMPLES = _table(
    "samples",
    _counter("row"),
    _text("sample_id", unique=True),
    sa.Column(
        "feedback_id",
        sa.Text,
        sa.ForeignKey("feedback.feedback_id", ondelete="CASCADE"),
        nullable=False,
    ),
    _text("adapter"),
    _text("kind"),
    _double("created_s"),
    _json("messages"),
    _json("prompt"),
    _json("chosen"),
    _json("rejected"),
    sa.Column("desirable", sa.Boolean, nullable=False),
    _double("weight"),
    _text("split"),
    _text("conversation"),
    _text("user"),
    _text("key_id"),
    _text("state"),
    sa.Column("version", sa.BigInteger),
    _integer("uses"),
    sa.Column("loss", sa.Double),
    _text("problem"),
    sa.Column("served", sa.JSON),
    sa.Index("samples_by_state", "adapter", "split", "state", "row"),
    sa.Index("samples_by_feedback", "feedback_id"),
    sa.Index("samples_by_conversation", "adapter", "conversation"),
)

ADAPTERS = _table(
    "adapters",
    _text("name", primary_key=True),
    _double("created_s"),
    _integer("current"),
    _integer("next_number"),
    _json("settings"),
)

DELETED_ADAPTERS = _table(
    "deleted_adapters",
    _text("name", primary_key=True),
    _integer("next_number"),
)

VERSIONS = _table(
    "versions",
    sa.Column(
        "adapter",
        sa.Text,
        sa.ForeignKey("adapters.name", ondelete="CASCADE"),
        primary_key=True,
    ),
    sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
    _text("content_hash"),
    _text("path"),
    _double("created_s"),
    _text("state"),
    _integer("parent"),
    _text("origin"),
    _json("metrics"),
    _json("reason"),
    sa.Column("tainted", sa.Boolean, nullable=False),
    sa.Column("watched", sa.Boolean, nullable=False, server_default=sa.false()),
)

USES = _table(
    "uses",
    _text("adapter", primary_key=True),
    sa.Column("version", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column(
        "sample_id",
        sa.Text,
        sa.ForeignKey("samples.sample_id", ondelete="CASCADE"),
        primary_key=True,
    ),
    sa.Column("replayed", sa.Boolean, nullable=False, server_default=sa.false()),
    sa.ForeignKeyConstraint(
        ["adapter", "version"], ["versions.adapter", "versions.number"], ondelete="CASCADE"
    ),
    sa.Index("uses_by_sample", "sample_id"),
)

EVENTS = _table(
    "events",
    _counter("number"),
    _text("subject"),
    _double("created_s"),
    _text("level"),
    _json("message"),
    _json("data"),
    sa.Index("events_by_subject", "subject", "number"),
)

JOBS = _table(
    "jobs",
    _counter("row"),
    _text("job_id", unique=True),
    _double("created_s"),
    _text("tenant"),
    _text("model"),
    _text("adapter"),
    _text("status"),
    _json("method"),
    _text("training_file"),
    _text("validation_file"),
    _json("result_files"),
    _text("suffix"),
    _integer("seed"),
    _integer("step"),
    _integer("total_steps"),
    _integer("trained_tokens"),
    _text("checkpoint_path"),
    sa.Column("start_version", sa.BigInteger),
    sa.Column("finished_s", sa.Double),
    _json("error"),
    _json("metadata"),
    sa.Index("jobs_by_status", "status", "row"),
)

CHECKPOINTS = _table(
    "checkpoints",
    _counter("row"),
    _text("checkpoint_id", unique=True),
    sa.Column("job_id", sa.Text, sa.ForeignKey("jobs.job_id", ondelete="CASCADE"), nullable=False),
    _double("created_s"),
    _integer("step"),
    _text("path"),
    _text("content_hash"),
    _json("metrics"),
    sa.Index("checkpoints_by_job", "job_id", "row"),
)

FILES = _table(
    "files",
    _counter("row"),
    _text("file_id", unique=True),
    _double("created_s"),
    _json("filename"),
    _text("purpose"),
    _integer("num_bytes"),
    _text("path"),
    _text("tenant"),
    _text("status"),
    sa.Column("expires_s", sa.Double),
    sa.Index("files_by_tenant", "tenant", "row"),
)

BATCHES = _table(
    "batches",
    _counter("row"),
    _text("batch_id", unique=True),
    _double("created_s"),
    _text("tenant"),
    _text("endpoint"),
    _text("input_file"),
    _text("completion_window"),
    _double("expires_s"),
    _text("status"),
    _integer("start"),
    _json("model"),
    sa.Column("adapter", sa.Text),
    sa.Column("version", sa.BigInteger),
    sa.Column("pinned", sa.Boolean, nullable=False),
    _integer("total"),
    _integer("completed"),
    _integer("failed"),
    _integer("input_tokens"),
    _integer("cached_tokens"),
    _integer("output_tokens"),
    _text("output_file"),
    _text("error_file"),
    sa.Column("output_kept_s", sa.Double),
    _json("errors"),
    _json("stamps"),
    _json("metadata"),
    sa.Index("batches_by_tenant", "tenant", "row"),
    sa.Index("batches_by_status", "status", "row"),
)

BATCH_RESULTS = _table(
    "batch_results",
    sa.Column(
        "batch_id",
        sa.Text,
        sa.ForeignKey("batches.batch_id", ondelete="CASCADE"),
        primary_key=True,
    ),
    sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("ok", sa.Boolean, nullable=False),
    _json("content"),
)

ANSWER_LENGTHS = _table(
    "answer_lengths",
    _counter("row"),
    _text("model"),
    _text("adapter"),
    _text("endpoint"),
    _integer("max_tokens"),
    _integer("input_tokens"),
    _json("scores"),
    _text("batch"),
    _integer("output_tokens"),
    _text("state"),
    sa.Index("answer_lengths_by_adapter", "model", "adapter", "row"),
)

REFERENCES = _table(
    "reference_logprobs",
    _text("reference", primary_key=True),
    _text("sequence", primary_key=True),
    _double("logprob"),
)

IDENTITY = _table(
    "identity",
    _text("database_id", primary_key=True),
    _text("opened_by"),
)

KEY_USAGE = _table(
    "key_usage",
    _text("key_id", primary_key=True),
    _text("what", primary_key=True),
    _integer("count"),
    _double("changed_s"),
)


def to_row(record: object) -> dict[str, Any]:
    """The columns of a record, with nested values as in JSON."""
    row: dict[str, Any] = msgspec.to_builtins(record)
    return row


def from_row(kind: type[Record], row: Mapping[Any, Any]) -> Record:
    """The record of a row. Columns that are not fields are left out."""
    return msgspec.convert({str(name): value for name, value in row.items()}, kind)


def in_chunks(keys: Sequence[Key]) -> Iterator[Sequence[Key]]:
    """`keys` in pieces that fit one statement."""
    for start in range(0, len(keys), _CHUNK):
        yield keys[start : start + _CHUNK]
