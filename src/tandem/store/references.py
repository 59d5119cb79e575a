"""A cache of log-probabilities under reference models, which never change.

`reference` identifies the model exactly: the base, or an adapter's content hash, "@" and the base.
`sequence` is what was scored (a sample's id and role, or a hash of tokens).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import sqlalchemy as sa

from tandem.store.session import Connection
from tandem.store.tables import REFERENCES, in_chunks
from tandem.store.upsert import upsert

_MOST_ROWS = 100_000


def get(connection: Connection, reference: str, sequences: Sequence[str]) -> dict[str, float]:
    """Known log-probabilities of `sequences`; unknown ones are left out."""
    known: dict[str, float] = {}
    for chunk in in_chunks(sequences):
        query = sa.select(REFERENCES.c.sequence, REFERENCES.c.logprob).where(
            REFERENCES.c.reference == reference, REFERENCES.c.sequence.in_(chunk)
        )
        known.update((row.sequence, row.logprob) for row in connection.execute(query))
    return known


def put(connection: Connection, reference: str, logprobs: Mapping[str, float]) -> None:
    """Store log-probabilities by sequence, replacing known ones."""
    rows = [
        {"reference": reference, "sequence": sequence, "logprob": logprob}
        for sequence, logprob in logprobs.items()
    ]
    upsert(connection, REFERENCES, rows)


def forget(connection: Connection, content_hash: str) -> None:
    """Delete all log-probabilities under an adapter that nobody is likely to ask again."""
    connection.execute(
        sa.delete(REFERENCES).where(REFERENCES.c.reference.startswith(f"{content_hash}@"))
    )


def bound(connection: Connection) -> None:
    """Forget all once they are many: they are computed again where they are needed."""
    count = sa.select(sa.func.count()).select_from(REFERENCES)
    if connection.execute(count).scalar_one() > _MOST_ROWS:
        connection.execute(sa.delete(REFERENCES))
