"""What is kept of a prompt's last hidden state, beside the length of its answer."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Nothing is known of earlier prompts."""
    op.add_column(
        "answer_lengths", sa.Column("state", sa.Text(), nullable=False, server_default="")
    )
