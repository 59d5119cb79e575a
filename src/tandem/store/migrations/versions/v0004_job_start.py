"""The version that a fine-tuning job began from."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Jobs that run already do not know it."""
    op.add_column("jobs", sa.Column("start_version", sa.BigInteger(), nullable=True))
