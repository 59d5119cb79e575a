"""Batches, and what became of their lines."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """There are none yet."""
    counter = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
    op.create_table(
        "batches",
        sa.Column("row", counter, primary_key=True, autoincrement=True),
        sa.Column("batch_id", sa.Text(), nullable=False, unique=True),
        sa.Column("created_s", sa.Double(), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("endpoint", sa.Text(), nullable=False),
        sa.Column("input_file", sa.Text(), nullable=False),
        sa.Column("completion_window", sa.Text(), nullable=False),
        sa.Column("expires_s", sa.Double(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("start", sa.BigInteger(), nullable=False),
        sa.Column("model", sa.JSON(), nullable=False),
        sa.Column("adapter", sa.Text(), nullable=True),
        sa.Column("version", sa.BigInteger(), nullable=True),
        sa.Column("pinned", sa.Boolean(), nullable=False),
        sa.Column("total", sa.BigInteger(), nullable=False),
        sa.Column("completed", sa.BigInteger(), nullable=False),
        sa.Column("failed", sa.BigInteger(), nullable=False),
        sa.Column("input_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cached_tokens", sa.BigInteger(), nullable=False),
        sa.Column("output_tokens", sa.BigInteger(), nullable=False),
        sa.Column("output_file", sa.Text(), nullable=False),
        sa.Column("error_file", sa.Text(), nullable=False),
        sa.Column("output_kept_s", sa.Double(), nullable=True),
        sa.Column("errors", sa.JSON(), nullable=False),
        sa.Column("stamps", sa.JSON(), nullable=False),
        sa.Column("metadata", sa.JSON(), nullable=False),
    )
    op.create_index("batches_by_tenant", "batches", ["tenant", "row"])
    op.create_index("batches_by_status", "batches", ["status", "row"])
    op.create_table(
        "batch_results",
        sa.Column(
            "batch_id",
            sa.Text(),
            sa.ForeignKey("batches.batch_id", ondelete="CASCADE"),
            primary_key=True,
        ),
        sa.Column("number", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("ok", sa.Boolean(), nullable=False),
        sa.Column("content", sa.JSON(), nullable=False),
    )
