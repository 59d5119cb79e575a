from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from databases import NoPostgres, postgres_schema, postgres_server
from tandem.store import Store


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    try:
        with postgres_server() as url:
            yield url
    except NoPostgres:
        pytest.skip("skipped: no PostgreSQL")


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """What `store.url` is set to; empty for SQLite."""
    if request.param == "sqlite":
        yield ""
        return
    yield request.getfixturevalue("postgres_url")


@pytest.fixture
def postgres_url(postgres: str) -> Iterator[str]:
    """A database in PostgreSQL."""
    with postgres_schema(postgres, f"test_{uuid.uuid4().hex}") as url:
        yield url


@pytest.fixture
def store(database_url: str, tmp_path: Path) -> Iterator[Store]:
    opened = Store.open(tmp_path / "state", database_url)
    yield opened
    opened.close()
