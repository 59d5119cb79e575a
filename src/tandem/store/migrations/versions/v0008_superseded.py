"""Which feedback took the place of which, and a hash by which it is found."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """What is there already supersedes nothing, and nothing supersedes it."""
    op.add_column("feedback", sa.Column("superseded_by", sa.Text(), nullable=True))
    op.add_column("feedback", sa.Column("same", sa.Text(), nullable=True))
    op.create_index("feedback_by_same", "feedback", ["same"])
