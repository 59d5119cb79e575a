"""When a file is removed by itself."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Files that are there stay."""
    op.add_column("files", sa.Column("expires_s", sa.Double(), nullable=True))
