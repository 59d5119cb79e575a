from __future__ import annotations

import asyncio
import stat
import threading
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.operations import Operations
from alembic.script import ScriptDirectory
from records import fill, make_feedback, make_sample, make_version

from patience import PATIENCE_S
from tandem.core.errors import StoreError
from tandem.core.learning import EventRecord, SampleState
from tandem.store import (
    Connection,
    Store,
    adapters,
    events,
    feedback,
    locks,
    migrations,
    samples,
    usage,
)
from tandem.store.feedback import Filter
from tandem.store.migrate import migrate
from tandem.store.paths import DIRECTORY
from tandem.store.tables import METADATA, USES


def add(connection: Connection, key: str, number: int = 1) -> int:
    return usage.add(connection, key, "things", number, 0.0)


async def test_what_was_written_is_read(store: Store) -> None:
    assert await store.write(add, "a", 3) == 3
    assert await store.write(add, "a", number=4) == 7
    assert await store.read(usage.count, "a", "things") == 7
    assert await store.read(usage.count, "b", "things") == 0


def test_a_directory_that_is_made_is_the_users_alone(tmp_path: Path) -> None:
    """It holds what everybody said; one that is there stays as it is."""
    (tmp_path / "there").mkdir(mode=0o755)
    for name, mode in (("made", 0o700), ("there", 0o755)):
        Store.open(tmp_path / name).close()
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == mode


async def test_many_writes_share_a_commit_and_all_happen(store: Store) -> None:
    commits = 0

    @sa.event.listens_for(store._writing, "commit")
    def count(_: object) -> None:
        nonlocal commits
        commits += 1

    totals = await asyncio.gather(*(store.write(add, "a") for _ in range(500)))
    assert sorted(totals) == list(range(1, 501))
    assert commits < 250


async def test_a_failing_write_undoes_itself_and_nothing_else(store: Store) -> None:
    def half(connection: Connection) -> None:
        add(connection, "half")
        raise ValueError("no")

    def wrong_sql(connection: Connection) -> None:
        add(connection, "wrong")
        connection.execute(sa.text("SELECT * FROM nowhere"))

    results = await asyncio.gather(
        *(store.write(add, f"good{i}") for i in range(20)),
        store.write(half),
        store.write(wrong_sql),
        *(store.write(add, f"fine{i}") for i in range(20)),
        return_exceptions=True,
    )
    assert [type(result) for result in results if result != 1] == [ValueError, StoreError]
    for key in ("half", "wrong"):
        assert await store.read(usage.count, key, "things") == 0
    assert await store.read(usage.count, "fine19", "things") == 1


async def test_a_full_disk_takes_back_nothing_that_was_answered(tmp_path: Path) -> None:
    """SQLite then rolls back the whole transaction on its own, and the writes that share it."""
    store = Store.open(tmp_path)

    def bound(connection: Connection, more: int) -> None:
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
        connection.exec_driver_sql(f"PRAGMA max_page_count = {pages + more}")

    await store.write(bound, 2)
    keys = [f"small{i}" for i in range(4)] + ["large" * 100_000] + [f"late{i}" for i in range(4)]
    began, go_on = threading.Event(), threading.Event()

    def block(connection: Connection) -> bool:
        began.set()
        return go_on.wait(PATIENCE_S)

    blocked = asyncio.ensure_future(store.write(block))
    while not began.is_set():
        await asyncio.sleep(0.001)
    writes = [asyncio.ensure_future(store.write(add, key)) for key in keys]
    while store._queue.qsize() < len(keys):
        await asyncio.sleep(0.001)
    go_on.set()
    results = await asyncio.gather(*writes, return_exceptions=True)
    assert await blocked and isinstance(results[4], StoreError)
    await store.write(bound, 1000)
    for key, result in zip(keys, results, strict=True):
        there = await store.read(usage.count, key, "things")
        assert there == (0 if isinstance(result, StoreError) else 1), key[:20]
    assert await store.write(add, "after") == 1
    store.close()


async def test_the_log_has_the_events_that_were_committed(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    def told(message: str, level: str = "info", **data: object) -> EventRecord:
        return EventRecord("formal", 1.0, level, message, data)

    def undone(connection: Connection) -> None:
        events.add(connection, told("undone"))
        raise ValueError

    with caplog.at_level("INFO", "tandem.store"):
        refused = store.write(events.add, told("version 1 refused:\nnoise", "warning"))
        steps = [
            store.write(events.add, told(f"Step {step}/40", type="metrics", step=step))
            for step in (9, 10, 11)
        ]
        await asyncio.gather(refused, store.write(undone), *steps, return_exceptions=True)
        await store.write(events.add, told("version 2 published"))
        await store.write(add, "a")
        store.close()
    lines = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert lines == [
        ("WARNING", "formal: version 1 refused: noise"),
        ("INFO", "formal: Step 10/40"),
        ("INFO", "formal: version 2 published"),
    ]


async def test_readers_cannot_write(store: Store) -> None:
    with pytest.raises(StoreError):
        await store.read(add, "a")


async def test_a_read_sees_one_moment(store: Store) -> None:
    await store.write(add, "a")
    loop = asyncio.get_running_loop()

    def slow(connection: Connection) -> tuple[int, int]:
        before = usage.count(connection, "a", "things")
        asyncio.run_coroutine_threadsafe(store.write(add, "a"), loop).result(PATIENCE_S)
        return before, usage.count(connection, "a", "things")

    assert await store.read(slow) == (1, 1)
    assert await store.read(usage.count, "a", "things") == 2


async def test_state_survives_closing(database_url: str, tmp_path: Path) -> None:
    store = Store.open(tmp_path, database_url)
    await store.write(add, "a")
    store.close()
    store.close()
    with pytest.raises(StoreError, match="closed"):
        await store.write(add, "a")
    with pytest.raises(StoreError, match="closed"):
        await store.read(usage.count, "a", "things")
    again = Store.open(tmp_path, database_url)
    assert await again.read(usage.count, "a", "things") == 1
    again.close()


async def test_closing_finishes_what_waits(database_url: str, tmp_path: Path) -> None:
    store = Store.open(tmp_path, database_url)
    writes = [asyncio.ensure_future(store.write(add, "a")) for _ in range(100)]
    await asyncio.sleep(0)
    await asyncio.to_thread(store.close)
    assert sorted(await asyncio.gather(*writes)) == list(range(1, 101))


def test_a_directory_has_one_server(store: Store) -> None:
    with pytest.raises(StoreError, match="another server uses"):
        Store.open(store.directory)


def test_the_migrations_make_the_tables(store: Store) -> None:
    with store._writing.begin() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, METADATA) == []


def test_what_versions_of_an_older_database_replayed_is_known(tmp_path: Path) -> None:
    """It is what an earlier version had consumed."""
    engine = sa.create_engine("sqlite://", execution_options={DIRECTORY: tmp_path})
    with engine.begin() as connection:
        scripts = ScriptDirectory(str(Path(migrations.__file__).parent))
        context = MigrationContext.configure(connection)
        with Operations.context(context):
            for revision in reversed(list(scripts.iterate_revisions("0012", "base"))):
                revision.module.upgrade()
        context.stamp(scripts, "0012")
        replayed, new = fill(connection, 2)
        for number in (1, 2):
            adapters.save_version(connection, make_version(number))
        for number, sample_id in ((1, replayed), (2, replayed), (2, new)):
            connection.execute(
                sa.text("INSERT INTO uses (adapter, version, sample_id) VALUES (:a, :v, :s)"),
                {"a": "formal", "v": number, "s": sample_id},
            )
        samples.claim(connection, [replayed])
        samples.finish(connection, [replayed], SampleState.CONSUMED, 1)
        assert migrate(connection) is False
        query = sa.select(USES.c.version, USES.c.sample_id).where(USES.c.replayed)
        assert connection.execute(query).all() == [(2, replayed)]
    engine.dispose()


def test_a_newer_database_is_refused(database_url: str, tmp_path: Path) -> None:
    store = Store.open(tmp_path, database_url)
    with store._writing.begin() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
    store.close()
    with pytest.raises(StoreError, match="9999"):
        Store.open(tmp_path, database_url)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("mysql://host/db", "'mysql' is not supported"),
        ("sqlite://", "'sqlite' is not supported"),
        ("nonsense", "not a database URL"),
    ],
)
def test_other_databases_are_refused(url: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=words):
        Store.open(tmp_path, url)


def test_a_database_that_is_away_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot open the database"):
        Store.open(tmp_path, f"postgresql://tandem@/postgres?host={tmp_path}")
    Store.open(tmp_path).close()  # and the directory is free again


def test_sqlite_is_as_durable_as_we_say(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    with store._writing.begin() as connection:
        settings = {
            name: connection.exec_driver_sql(f"PRAGMA {name}").scalar()
            for name in ("journal_mode", "synchronous", "foreign_keys")
        }
    store.close()
    assert settings == {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1}


async def test_erased_text_leaves_the_files(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    secret = "the secret " + "0123456789" * 700  # longer than a page
    said = [make_feedback(f"f{n}", rating=1.0, comment=f"{n} {secret}") for n in range(50)]
    for one in said:
        made = make_sample(f"s-{one.feedback_id}", feedback_id=one.feedback_id, chosen=secret[:99])
        await store.write(feedback.add, one, [made])
        await store.write(samples.claim, [made.sample_id])

    def files_with_it() -> set[str]:
        return {path.name for path in tmp_path.iterdir() if b"the secret" in path.read_bytes()}

    assert await store.scrub() and files_with_it() == {"tandem.db"}
    await store.write(feedback.erase, Filter(adapter="formal"))
    killed = {name: (tmp_path / name).read_bytes() for name in ("tandem.db", "tandem.db-wal")}
    assert await store.scrub()
    assert files_with_it() == set()
    store.close()
    for name, content in killed.items():
        (tmp_path / name).write_bytes(content)
    assert files_with_it() == {"tandem.db"}
    store = Store.open(tmp_path)
    assert files_with_it() == set(), "the next start finishes the erasure of a process that died"
    store.close()


async def test_a_reader_delays_scrubbing_and_nothing_else(store: Store) -> None:
    if store._writing.dialect.name != "sqlite":
        assert await store.scrub()  # the database's own VACUUM does it
        return
    with store._writing.connect() as connection:
        connection.exec_driver_sql("PRAGMA busy_timeout=50")
    await store.write(add, "a")
    entered, leave = threading.Event(), threading.Event()

    def slow(connection: Connection) -> int:
        before = usage.count(connection, "a", "things")
        entered.set()
        leave.wait(PATIENCE_S)
        return before

    reading = asyncio.ensure_future(store.read(slow))
    await asyncio.to_thread(entered.wait, PATIENCE_S)
    await store.write(add, "a")
    assert not await store.scrub()
    leave.set()
    assert await reading == 1
    assert await store.scrub()


@pytest.mark.parametrize("name", ["", "tandem.db", "files"])
def test_a_store_that_cannot_be_written_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Permissions do not stop root, so that the system's answer is made up."""
    Store.open(tmp_path).close()
    (tmp_path / "files").mkdir()
    (tmp_path / "notes.txt").touch()
    closed = {tmp_path / name, tmp_path / "notes.txt"}
    monkeypatch.setattr(locks.os, "access", lambda path, mode: path not in closed)
    with pytest.raises(StoreError, match="read-only") as raised:
        Store.open(tmp_path)
    told = str(raised.value)
    assert f"{tmp_path / name} is" in told and "--store-directory" in told and "\n" not in told
    closed.remove(tmp_path / name)
    Store.open(tmp_path).close()  # what is not the store's may be what it likes
