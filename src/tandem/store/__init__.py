"""Durable state: SQLite by default, PostgreSQL by URL, through SQLAlchemy Core.

`Store` runs functions whose first argument is a `Connection`. The other modules have such
functions, one module per group of tables. All calls within one function are one transaction.
Invariant: no other package knows SQL.
"""

from tandem.store.session import Connection, Store

__all__ = ["Connection", "Store"]
