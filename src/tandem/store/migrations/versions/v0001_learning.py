"""The first tables: receipts, feedback, samples, adapters, versions, jobs, files and caches."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_COUNTER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Make them."""
    op.create_table(
        "adapters",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("created_s", sa.Double(), nullable=False),
        sa.Column("current", sa.BigInteger(), nullable=False),
        sa.Column("next_number", sa.BigInteger(), nullable=False),
        sa.Column("settings", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("name"),
    )
    op.create_table(
        "events",
        sa.Column("number", _COUNTER, autoincrement=True, nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("created_s", sa.Double(), nullable=False),
        sa.Column("level", sa.Text(), nullable=False),
        sa.Column("message", sa.JSON(), nullable=False),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("number"),
    )
    op.create_index("events_by_subject", "events", ["subject", "number"])
    op.create_table(
        "feedback",
        sa.Column("row", _COUNTER, autoincrement=True, nullable=False),
        sa.Column("feedback_id", sa.Text(), nullable=False),
        sa.Column("created_s", sa.Double(), nullable=False),
        sa.Column("adapter", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("messages", sa.JSON(), nullable=False),
        sa.Column("prompt", sa.JSON(), nullable=False),
        sa.Column("chosen", sa.JSON(), nullable=False),
        sa.Column("rejected", sa.JSON(), nullable=False),
        sa.Column("rating", sa.Double(), nullable=True),
        sa.Column("comment", sa.JSON(), nullable=False),
        sa.Column("weight", sa.Double(), nullable=False),
        sa.Column("signal", sa.Text(), nullable=False),
        sa.Column("conversation", sa.Text(), nullable=False),
        sa.Column("user", sa.Text(), nullable=False),
        sa.Column("key_id", sa.Text(), nullable=False),
        sa.Column("completion_id", sa.Text(), nullable=False),
        sa.Column("version", sa.Text(), nullable=False),
        sa.Column("metadata", sa.JSON(), nullable=False),
        sa.Column("idempotency_key", sa.Text(), nullable=True),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("row"),
        sa.UniqueConstraint("feedback_id"),
        sa.UniqueConstraint("key_id", "idempotency_key", name="feedback_once"),
    )
    op.create_index("feedback_by_adapter", "feedback", ["adapter", "row"])
    op.create_index("feedback_by_completion", "feedback", ["completion_id"])
    op.create_index("feedback_by_user", "feedback", ["user", "row"])
    op.create_table(
        "files",
        sa.Column("row", _COUNTER, autoincrement=True, nullable=False),
        sa.Column("file_id", sa.Text(), nullable=False),
        sa.Column("created_s", sa.Double(), nullable=False),
        sa.Column("filename", sa.JSON(), nullable=False),
        sa.Column("purpose", sa.Text(), nullable=False),
        sa.Column("num_bytes", sa.BigInteger(), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("row"),
        sa.UniqueConstraint("file_id"),
    )
    op.create_index("files_by_tenant", "files", ["tenant", "row"])
    op.create_table(
        "jobs",
        sa.Column("row", _COUNTER, autoincrement=True, nullable=False),
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("created_s", sa.Double(), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("adapter", sa.Text(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("method", sa.JSON(), nullable=False),
        sa.Column("training_file", sa.Text(), nullable=False),
        sa.Column("validation_file", sa.Text(), nullable=False),
        sa.Column("result_files", sa.JSON(), nullable=False),
        sa.Column("suffix", sa.Text(), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("total_steps", sa.BigInteger(), nullable=False),
        sa.Column("trained_tokens", sa.BigInteger(), nullable=False),
        sa.Column("checkpoint_path", sa.Text(), nullable=False),
        sa.Column("finished_s", sa.Double(), nullable=True),
        sa.Column("error", sa.JSON(), nullable=False),
        sa.Column("metadata", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("row"),
        sa.UniqueConstraint("job_id"),
    )
    op.create_index("jobs_by_status", "jobs", ["status", "row"])
    op.create_table(
        "key_usage",
        sa.Column("key_id", sa.Text(), nullable=False),
        sa.Column("what", sa.Text(), nullable=False),
        sa.Column("count", sa.BigInteger(), nullable=False),
        sa.Column("changed_s", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("key_id", "what"),
    )
    op.create_table(
        "receipts",
        sa.Column("completion_id", sa.Text(), nullable=False),
        sa.Column("created_s", sa.Double(), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("adapter", sa.Text(), nullable=True),
        sa.Column("version", sa.Text(), nullable=False),
        sa.Column("user", sa.Text(), nullable=False),
        sa.Column("messages", sa.JSON(), nullable=False),
        sa.Column("prompt", sa.JSON(), nullable=False),
        sa.Column("choices", sa.JSON(), nullable=False),
        sa.Column("sampling", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("completion_id"),
    )
    op.create_index("receipts_by_age", "receipts", ["created_s"])
    op.create_index("receipts_by_user", "receipts", ["user"])
    op.create_table(
        "reference_logprobs",
        sa.Column("reference", sa.Text(), nullable=False),
        sa.Column("sequence", sa.Text(), nullable=False),
        sa.Column("logprob", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("reference", "sequence"),
    )
    op.create_table(
        "checkpoints",
        sa.Column("row", _COUNTER, autoincrement=True, nullable=False),
        sa.Column("checkpoint_id", sa.Text(), nullable=False),
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("created_s", sa.Double(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("content_hash", sa.Text(), nullable=False),
        sa.Column("metrics", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.job_id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("row"),
        sa.UniqueConstraint("checkpoint_id"),
    )
    op.create_index("checkpoints_by_job", "checkpoints", ["job_id", "row"])
    op.create_table(
        "samples",
        sa.Column("row", _COUNTER, autoincrement=True, nullable=False),
        sa.Column("sample_id", sa.Text(), nullable=False),
        sa.Column("feedback_id", sa.Text(), nullable=False),
        sa.Column("adapter", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("created_s", sa.Double(), nullable=False),
        sa.Column("messages", sa.JSON(), nullable=False),
        sa.Column("prompt", sa.JSON(), nullable=False),
        sa.Column("chosen", sa.JSON(), nullable=False),
        sa.Column("rejected", sa.JSON(), nullable=False),
        sa.Column("desirable", sa.Boolean(), nullable=False),
        sa.Column("weight", sa.Double(), nullable=False),
        sa.Column("split", sa.Text(), nullable=False),
        sa.Column("conversation", sa.Text(), nullable=False),
        sa.Column("user", sa.Text(), nullable=False),
        sa.Column("key_id", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=True),
        sa.Column("uses", sa.BigInteger(), nullable=False),
        sa.Column("loss", sa.Double(), nullable=True),
        sa.Column("problem", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["feedback_id"], ["feedback.feedback_id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("row"),
        sa.UniqueConstraint("sample_id"),
    )
    op.create_index("samples_by_feedback", "samples", ["feedback_id"])
    op.create_index("samples_by_state", "samples", ["adapter", "split", "state", "row"])
    op.create_table(
        "versions",
        sa.Column("adapter", sa.Text(), nullable=False),
        sa.Column("number", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("content_hash", sa.Text(), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("created_s", sa.Double(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("parent", sa.BigInteger(), nullable=False),
        sa.Column("origin", sa.Text(), nullable=False),
        sa.Column("metrics", sa.JSON(), nullable=False),
        sa.Column("reason", sa.JSON(), nullable=False),
        sa.Column("tainted", sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(["adapter"], ["adapters.name"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("adapter", "number"),
    )
    op.create_table(
        "uses",
        sa.Column("adapter", sa.Text(), nullable=False),
        sa.Column("version", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("sample_id", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["adapter", "version"], ["versions.adapter", "versions.number"], ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(["sample_id"], ["samples.sample_id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("adapter", "version", "sample_id"),
    )
    op.create_index("uses_by_sample", "uses", ["sample_id"])
