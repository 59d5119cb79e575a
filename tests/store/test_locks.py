"""Two servers never write to one database, nor after the connection was lost."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import psycopg
import pytest

from databases import postgres_schema
from patience import PATIENCE_S
from tandem.core.errors import StoreError
from tandem.store import Connection, Store, locks, usage


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "WAIT_S", PATIENCE_S)


@contextmanager
def another_server() -> Iterator[None]:
    """Who opens or writes here is refused, and need not wait long for that."""
    refused = pytest.raises(StoreError, match="another server uses the database")
    with patch.object(locks, "WAIT_S", 0.3), refused:
        yield


def add(connection: Connection) -> int:
    return usage.add(connection, "a", "things", 1, 0.0)


def copy_of(store: Store, directory: Path) -> Path:
    """Another directory that belongs to the same database."""
    shutil.copytree(store.directory, directory)
    return directory


def cut_off(store: Store, url: str) -> None:
    """End the connection that writes, as a database does that starts again."""
    with store._writing.connect() as connection:
        pid = connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one()
    plain = url.replace("postgresql+psycopg://", "postgresql://")
    with psycopg.connect(plain, autocommit=True) as connection:
        assert connection.execute("SELECT pg_terminate_backend(%s, 5000)", (pid,)).fetchone()


async def test_a_database_has_one_server(postgres_url: str, tmp_path: Path) -> None:
    store = Store.open(tmp_path / "one", postgres_url)
    copy = copy_of(store, tmp_path / "two")
    with another_server():
        Store.open(copy, postgres_url)
    assert await store.write(add) == 1
    store.close()
    again = Store.open(copy, postgres_url)
    assert await again.write(add) == 2
    again.close()


async def test_schemas_are_databases_of_their_own(postgres: str, tmp_path: Path) -> None:
    with postgres_schema(postgres, "one") as one, postgres_schema(postgres, "two") as two:
        first = Store.open(tmp_path / "one", one)
        second = Store.open(tmp_path / "two", two)
        assert await first.write(add) == await second.write(add) == 1
        first.close()
        second.close()


async def test_a_lost_connection_is_made_again(
    postgres_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store.open(tmp_path / "one", postgres_url)
    assert await store.write(add) == 1
    cut_off(store, postgres_url)
    assert await store.write(add) == 2
    assert "is there again" in caplog.text
    with another_server():
        Store.open(copy_of(store, tmp_path / "two"), postgres_url)
    store.close()


async def test_whoever_lost_the_database_to_another_server_writes_no_more(
    postgres_url: str, tmp_path: Path
) -> None:
    store = Store.open(tmp_path / "one", postgres_url)
    assert await store.write(add) == 1
    cut_off(store, postgres_url)
    other = Store.open(copy_of(store, tmp_path / "two"), postgres_url)
    with another_server():
        await store.write(add)
    assert await other.write(add) == 2
    other.close()
    for _ in range(2):
        with pytest.raises(StoreError, match="has used it meanwhile"):
            await store.write(add)
    assert await store.read(usage.count, "a", "things") == 2
    store.close()
    again = Store.open(tmp_path / "one", postgres_url)
    assert await again.write(add) == 3
    again.close()
