"""Which samples a version only replayed, so that its refusal does not count against them."""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Of those that are there: the samples that an earlier version had consumed."""
    op.add_column(
        "uses",
        sa.Column("replayed", sa.Boolean(), nullable=False, server_default=sa.false()),
    )
    uses = sa.table("uses", sa.column("sample_id"), sa.column("version"), sa.column("replayed"))
    samples = sa.table("samples", sa.column("sample_id"), sa.column("state"), sa.column("version"))
    before = sa.exists().where(
        samples.c.sample_id == uses.c.sample_id,
        samples.c.state == "consumed",
        samples.c.version < uses.c.version,
    )
    op.execute(sa.update(uses).where(before).values(replayed=sa.true()))
