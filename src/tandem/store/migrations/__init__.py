"""Alembic's folder: revisions of the tables, one module each, in `versions`."""
