"""Log-probabilities under versions name the base that they were computed on."""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Nobody knows the base of earlier ones. They are a cache, and are computed again."""
    scores = sa.table("reference_logprobs", sa.column("reference", sa.Text()))
    of_version = ~scores.c.reference.startswith("base:")
    op.execute(sa.delete(scores).where(of_version, ~scores.c.reference.contains("@")))
