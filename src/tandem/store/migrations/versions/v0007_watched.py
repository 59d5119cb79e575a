"""Which versions the gate alone has published, so that they may be rolled back by themselves."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Those that are there are left alone."""
    op.add_column(
        "versions",
        sa.Column("watched", sa.Boolean(), nullable=False, server_default=sa.false()),
    )
