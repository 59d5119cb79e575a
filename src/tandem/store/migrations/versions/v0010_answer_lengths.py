"""How long finished answers were, without their text."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Nothing is known of earlier answers."""
    counter = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
    op.create_table(
        "answer_lengths",
        sa.Column("row", counter, primary_key=True, autoincrement=True),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("adapter", sa.Text(), nullable=False),
        sa.Column("endpoint", sa.Text(), nullable=False),
        sa.Column("max_tokens", sa.BigInteger(), nullable=False),
        sa.Column("input_tokens", sa.BigInteger(), nullable=False),
        sa.Column("scores", sa.JSON(), nullable=False),
        sa.Column("batch", sa.Text(), nullable=False),
        sa.Column("output_tokens", sa.BigInteger(), nullable=False),
    )
    op.create_index("answer_lengths_by_adapter", "answer_lengths", ["model", "adapter", "row"])
