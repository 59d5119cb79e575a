"""Durable state: SQLite by default, PostgreSQL by URL, through SQLAlchemy Core.

`Store` runs functions that take a `Connection` first; the modules beside it hold such functions,
one module for each group of tables. Several of them called from one function are one transaction.
Nothing outside of this package knows SQL.
"""

from tandem.store.session import Connection, Store

__all__ = ["Connection", "Store"]
