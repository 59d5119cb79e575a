"""Databases to test the store with: an SQLite file, and a schema of its own in PostgreSQL.

The PostgreSQL server is the one at TANDEM_TEST_POSTGRES_URL, or a private one that is started for
the test run where the program is found.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg

SCRIPT = Path(__file__).parents[1] / ".ci" / "postgres.sh"
NO_POSTGRES = 3


class NoPostgres(Exception):
    """There is no PostgreSQL on this machine."""


@contextmanager
def postgres_server() -> Iterator[str]:
    """The URL of a server. Raises `NoPostgres`."""
    given = os.environ.get("TANDEM_TEST_POSTGRES_URL")
    if given:
        yield given
        return
    directory = tempfile.mktemp(prefix="tandem-postgres-", dir="/tmp")
    started = subprocess.run(
        [str(SCRIPT), "start", directory], stdout=subprocess.PIPE, text=True, check=False
    )
    if started.returncode == NO_POSTGRES:
        raise NoPostgres
    started.check_returncode()
    try:
        yield started.stdout.strip()
    finally:
        subprocess.run([str(SCRIPT), "stop", directory], check=True)


@contextmanager
def postgres_schema(server: str, name: str) -> Iterator[str]:
    """The URL of an empty schema, which is dropped afterwards."""
    plain = server.replace("postgresql+psycopg://", "postgresql://")
    with psycopg.connect(plain, autocommit=True) as connection:
        connection.execute(f'CREATE SCHEMA "{name}"')
    joint = "&" if "?" in server else "?"
    try:
        yield f"{server}{joint}options=-csearch_path%3D{name}"
    finally:
        with psycopg.connect(plain, autocommit=True) as connection:
            connection.execute(f'DROP SCHEMA "{name}" CASCADE')
