"""A directory that is moved keeps everything; one of another database is left alone."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa
from hypothesis import given, settings
from hypothesis import strategies as st
from records import fill, make_version
from test_jobs_and_files import make_job

from tandem.core.errors import StoreError
from tandem.core.learning import AdapterRecord, CheckpointRecord, FileRecord
from tandem.store import Connection, Store, adapters, files, jobs
from tandem.store.identity import ADOPT, FILE

NAME = st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=8)


def name_all(connection: Connection, root: Path) -> None:
    """A version, a file, a job and its checkpoint, below `root`."""
    fill(connection, 0)
    assert adapters.allocate(connection, "formal") == 1
    adapters.publish(connection, make_version(1, path=str(root / "adapters/formal/1")))
    files.add(connection, FileRecord("file-1", 1.0, "n", "batch", 1, str(root / "files/file-1")))
    jobs.add(connection, replace(make_job("j"), checkpoint_path=str(root / "jobs/j/20")))
    jobs.add(connection, make_job("new"))
    checkpoint = CheckpointRecord("c", "j", 1.0, 10, str(root / "jobs/j/10"), "h", {})
    jobs.add_checkpoint(connection, checkpoint)


def named(connection: Connection) -> list[str]:
    """What they are called now."""
    version, job = adapters.version(connection, "formal", 1), jobs.find(connection, "j")
    file, new = files.find(connection, "file-1"), jobs.find(connection, "new")
    assert version and job and file and new and new.checkpoint_path == ""
    assert files.paths(connection) == {file.path}
    [checkpoint] = jobs.checkpoints(connection, "j")
    return [version.path, file.path, job.checkpoint_path, checkpoint.path]


def below(root: Path) -> list[str]:
    parts = ("adapters/formal/1", "files/file-1", "jobs/j/20", "jobs/j/10")
    return [str(root / part) for part in parts]


def make_files(root: Path) -> None:
    for path in map(Path, below(root)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("content")


async def used(directory: Path, url: str) -> None:
    """A pair that has been used."""
    store = Store.open(directory, url)
    await store.write(name_all, store.directory)
    make_files(store.directory)
    store.close()


async def age(store: Store, root: Path) -> None:
    """Close it as an older Tandem left it: whole paths below `root`, and no id."""

    def change(connection: Connection) -> None:
        for table, column in (
            ("versions", "path"),
            ("files", "path"),
            ("jobs", "checkpoint_path"),
            ("checkpoints", "path"),
        ):
            change = f"UPDATE {table} SET {column} = :root || {column} WHERE {column} != ''"
            connection.execute(sa.text(change), {"root": f"{root}/"})
        for table in ("identity", "answer_lengths", "batch_results", "batches"):
            connection.exec_driver_sql(f"DROP TABLE {table}")
        connection.exec_driver_sql("DROP INDEX feedback_by_same")
        for table, column in (
            ("jobs", "start_version"),
            ("receipts", "prompt_tokens"),
            ("samples", "served"),
            ("files", "expires_s"),
            ("versions", "watched"),
            ("feedback", "same"),
            ("feedback", "superseded_by"),
            ("uses", "replayed"),
        ):
            connection.exec_driver_sql(f"ALTER TABLE {table} DROP COLUMN {column}")
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '0002'")

    await store.write(change)
    store.close()
    (store.directory / FILE).unlink()


def contents(directory: Path) -> set[tuple[str, str]]:
    """Names and contents of all but the database's own files."""
    return {
        (str(path.relative_to(directory)), path.read_text())
        for path in directory.rglob("*")
        if path.is_file() and not path.name.startswith("tandem.db")
    }


async def test_a_moved_directory_keeps_its_files(database_url: str, tmp_path: Path) -> None:
    await used(tmp_path / "old", database_url)
    (tmp_path / "old").rename(tmp_path / "new")
    store = Store.open(tmp_path / "new", database_url)
    assert await store.read(named) == below(tmp_path / "new")
    store.close()


async def test_a_link_may_lead_elsewhere(database_url: str, tmp_path: Path) -> None:
    await used(tmp_path / "old", database_url)
    shutil.copytree(tmp_path / "old", tmp_path / "copy")
    link = tmp_path / "link"
    for target in ("old", "copy"):
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        store = Store.open(link, database_url)
        assert await store.read(named) == below(tmp_path / target)
        store.close()


async def test_rows_of_an_older_tandem_are_taken_over(database_url: str, tmp_path: Path) -> None:
    store = Store.open(tmp_path, database_url)
    await store.write(name_all, store.directory)
    await age(store, tmp_path)
    for _ in range(2):
        store = Store.open(tmp_path, database_url)
        assert await store.read(named) == below(tmp_path)
        store.close()


async def test_an_old_sqlite_directory_may_have_been_moved(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    await store.write(name_all, store.directory)
    await age(store, Path("/far/adapters/away_%"))
    store = Store.open(tmp_path)
    assert await store.read(named) == below(tmp_path)
    store.close()


@settings(max_examples=20)
@given(root=st.lists(NAME, max_size=3).map(lambda parts: Path("/", *parts)))
async def test_any_former_root_is_taken_off(
    root: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("state")
    store = Store.open(directory)
    await store.write(name_all, directory)
    await age(store, Path(str(root).rstrip("/")))
    store = Store.open(directory)
    assert await store.read(named) == below(directory)
    store.close()


async def test_another_database_is_refused_and_nothing_touched(
    database_url: str, tmp_path: Path
) -> None:
    await used(tmp_path / "one", database_url)
    await used(tmp_path / "two", "")
    before = contents(tmp_path / "one")
    if database_url:  # the directory of a PostgreSQL database, with a new SQLite one
        with pytest.raises(StoreError, match=f"belong together.*write the word '{ADOPT}' into"):
            Store.open(tmp_path / "one")
        with pytest.raises(StoreError, match="names another one"):
            Store.open(tmp_path / "two", database_url)
    else:  # with another SQLite one, and with a new one
        database = tmp_path / "one" / "tandem.db"
        mine = database.read_bytes()
        shutil.copy(tmp_path / "two" / "tandem.db", database)
        with pytest.raises(StoreError, match="names another one"):
            Store.open(tmp_path / "one")
        database.unlink()
        for _ in range(2):
            with pytest.raises(StoreError, match="names another one"):
                Store.open(tmp_path / "one")
        database.write_bytes(mine)
    assert contents(tmp_path / "one") == before
    store = Store.open(tmp_path / "one", database_url)
    assert await store.read(named) == below(tmp_path / "one")
    store.close()


async def test_an_empty_directory_is_not_that_of_a_used_database(
    database_url: str, tmp_path: Path
) -> None:
    await used(tmp_path / "state", database_url)
    (tmp_path / "empty").mkdir()
    if not database_url:
        shutil.copy(tmp_path / "state" / "tandem.db", tmp_path / "empty")
    with pytest.raises(StoreError, match="mounted"):
        Store.open(tmp_path / "empty", database_url)
    assert contents(tmp_path / "empty") == {("lock", "")}


async def test_what_an_older_tandem_left_is_not_given_to_a_new_database(
    postgres_url: str, tmp_path: Path
) -> None:
    make_files(tmp_path / "one")  # no id yet, nor anywhere else to see whose they are
    with pytest.raises(StoreError, match="holds the files of another database"):
        Store.open(tmp_path / "one", postgres_url)
    with pytest.raises(StoreError, match="holds the files of another database"):
        Store.open(tmp_path / "one")
    Store.open(tmp_path / "feedback").close()
    (tmp_path / "feedback" / FILE).unlink()  # a database with feedback, and no files yet
    with pytest.raises(StoreError, match="holds the files of another database"):
        Store.open(tmp_path / "feedback", postgres_url)
    store = Store.open(tmp_path / "two", postgres_url)
    await store.write(name_all, store.directory)
    await age(store, tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="holds the files of another database"):
        Store.open(tmp_path / "two", postgres_url)
    (tmp_path / "two" / FILE).write_text(ADOPT)
    store = Store.open(tmp_path / "two", postgres_url)
    assert await store.read(named) == below(tmp_path / "two")
    store.close()


async def test_an_older_copy_of_the_database_is_refused(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    for name in ("formal", "deleted"):
        assert await store.write(adapters.begin_version, AdapterRecord(name, 1.0)) == 1
    await store.write(adapters.delete, "deleted")
    store.close()
    backup = (tmp_path / "tandem.db").read_bytes()

    def opened() -> Store:
        (tmp_path / "tandem.db").write_bytes(backup)
        return Store.open(tmp_path)

    waste = ("formal/1", "formal/2.tmp", "formal/0.tmp", "deleted/1", "unknown/0.tmp")  # of crashes
    for path in waste:
        (tmp_path / "adapters" / path).mkdir(parents=True)
    opened().close()
    for path in ("formal/2", "deleted/2", "unknown/1"):
        (tmp_path / "adapters" / path).mkdir()
        with pytest.raises(StoreError, match="which is newer than the database"):
            opened()
        (tmp_path / FILE).write_text(ADOPT)
        opened().close()
        with pytest.raises(StoreError, match="which is newer than the database"):
            opened()  # nobody has removed it
        (tmp_path / "adapters" / path).rmdir()


async def test_two_are_joined_on_purpose(database_url: str, tmp_path: Path) -> None:
    await used(tmp_path / "one", database_url)
    shutil.copytree(tmp_path / "one", tmp_path / "restored")
    file = tmp_path / "restored" / FILE
    file.write_text("another's\n")
    with pytest.raises(StoreError, match="names another one"):
        Store.open(tmp_path / "restored", database_url)
    file.write_text(f"{ADOPT}\n")
    for _ in range(2):
        store = Store.open(tmp_path / "restored", database_url)
        assert await store.read(named) == below(tmp_path / "restored")
        store.close()
        assert file.read_text() == (tmp_path / "one" / FILE).read_text()


def test_a_crash_at_the_first_start_changes_nothing(database_url: str, tmp_path: Path) -> None:
    (tmp_path / f"{FILE}.tmp").write_text("never committed")
    Store.open(tmp_path, database_url).close()
    file = tmp_path / FILE
    mine = file.read_text()
    assert "never" not in mine
    file.rename(tmp_path / f"{FILE}.tmp")  # committed, and not renamed yet
    Store.open(tmp_path, database_url).close()
    assert file.read_text() == mine and not (tmp_path / f"{FILE}.tmp").exists()


def test_a_directory_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / f"{FILE}.tmp").mkdir()
    with pytest.raises(StoreError, match="cannot use the directory"):
        Store.open(tmp_path)
