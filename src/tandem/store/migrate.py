"""Brings the tables up to date with the Alembic revisions in `migrations/versions`.

Runs at every start, in the caller's transaction, on the connection that holds the database lock.
Invariant: either all missing revisions are applied or none.
"""

from __future__ import annotations

from pathlib import Path

from alembic.migration import MigrationContext
from alembic.operations import Operations
from alembic.script import ScriptDirectory
from alembic.script.revision import RevisionError
from sqlalchemy.engine import Connection

from tandem.core.errors import StoreError

_FOLDER = Path(__file__).parent / "migrations"


def migrate(connection: Connection) -> bool:
    """Apply missing revisions; returns whether the database was new.

    Raises `StoreError` if it is from a newer Tandem.
    """
    scripts = ScriptDirectory(str(_FOLDER))
    context = MigrationContext.configure(connection)
    current = context.get_current_revision()
    try:
        missing = list(scripts.iterate_revisions("head", current))
    except RevisionError as error:
        raise StoreError(
            f"the database has tables of revision {current}, which this Tandem does not know; "
            "start the newer one that made them"
        ) from error
    with Operations.context(context):
        for revision in reversed(missing):
            revision.module.upgrade()
    if missing:
        context.stamp(scripts, "head")
    return current is None
