"""The token ids that were served, of receipts and of samples made from them."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """What is there has texts only."""
    op.add_column("receipts", sa.Column("prompt_tokens", sa.JSON(), nullable=True))
    op.add_column("samples", sa.Column("served", sa.JSON(), nullable=True))
