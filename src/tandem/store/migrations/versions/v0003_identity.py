"""The id that a database shares with its directory (`store/identity.py` writes it)."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make its table."""
    op.create_table(
        "identity",
        sa.Column("database_id", sa.Text(), nullable=False),
        sa.Column("opened_by", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("database_id"),
    )
