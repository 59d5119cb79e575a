"""When files expire: what the clock says is not believed without a witness."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem.core.errors import Conflict, NotFound, StoreError
from tandem.core.learning import FileRecord, JobRecord, JobStatus, Receipt
from tandem.services.files import Files
from tandem.store import Store, jobs, receipts

HOUR_S = 3600.0
DAY_S = 24 * HOUR_S


class Stage:
    """Files over a real store; the clock and the time that the server has run are the test's."""

    def __init__(self, directory: Path, now_s: float) -> None:
        self.now_s = now_s
        self.ran_s = 5.0
        self.store = Store.open(directory)
        self.files = Files(
            self.store, directory / "files", 100, lambda: self.now_s, lambda: self.ran_s
        )

    async def upload(self, kept_s: float) -> FileRecord:
        async def parts() -> AsyncIterator[bytes]:
            yield b"x"

        return await self.files.create("f", "batch", "t", parts(), kept_s)

    async def end(self) -> None:
        await self.files.stop()
        self.store.close()


async def has(stage: Stage, file: FileRecord) -> bool:
    try:
        return (await stage.files.content(file.file_id, "t")).is_file()
    except NotFound:
        return False


async def test_a_clock_that_is_ahead_removes_nothing(tmp_path: Path) -> None:
    """Set wrong at the start, or while the server runs: what it makes then is no witness either."""
    before = Stage(tmp_path, 1e9)
    old = await before.upload(2 * HOUR_S)
    await before.end()
    stage = Stage(tmp_path, 1e9 + 60 * DAY_S)
    await stage.files.start()
    new = await stage.upload(HOUR_S)
    assert await stage.files.sweep() == 0 and await has(stage, old)
    stage.now_s += 60 * DAY_S
    assert await stage.files.sweep() == 0
    assert await has(stage, old) and await has(stage, new)
    stage.ran_s += HOUR_S
    assert await stage.files.sweep() == 1, "what has run is believed"
    assert await has(stage, old) and not await has(stage, new)
    stage.ran_s += HOUR_S
    assert await stage.files.sweep() == 1 and not await has(stage, old)
    await stage.end()


async def test_what_others_keep_bears_witness(tmp_path: Path) -> None:
    before = Stage(tmp_path, 1e9)
    old = await before.upload(HOUR_S)
    kept = Receipt("c", 1e9 + DAY_S, "t", None, "base", (), "p", ())
    await before.store.write(receipts.add, kept)
    await before.end()
    stage = Stage(tmp_path, 1e9 + 2 * DAY_S)
    assert await stage.files.sweep() == 1 and not await has(stage, old)
    await stage.end()


async def test_what_an_unfinished_job_reads_stays(tmp_path: Path) -> None:
    """It is read again after a restart. An expired file goes once the job has ended."""
    stage = Stage(tmp_path, 1e9)
    await stage.files.start()
    file = await stage.upload(HOUR_S)
    method = {"type": "dpo", "dpo": {"hyperparameters": {}}}
    job = JobRecord("job", 1.0, "t", "demo", "formal", JobStatus.RUNNING, method, file.file_id)
    await stage.store.write(jobs.add, job)
    with pytest.raises(Conflict, match="read by job"):
        await stage.files.delete(file.file_id, "t")
    stage.now_s += 2 * HOUR_S
    stage.ran_s += 2 * HOUR_S
    assert await stage.files.sweep() == 0 and await has(stage, file)
    await stage.store.write(jobs.update, replace(job, status=JobStatus.SUCCEEDED))
    assert await stage.files.sweep() == 1 and not await has(stage, file)
    await stage.end()


@pytest.mark.parametrize("behind_s", [0.0, DAY_S])
async def test_a_clock_that_goes_back_removes_nothing_early(
    tmp_path: Path, behind_s: float
) -> None:
    stage = Stage(tmp_path, 1e9)
    await stage.files.start()
    file = await stage.upload(HOUR_S)
    stage.now_s += HOUR_S - behind_s
    stage.ran_s += HOUR_S
    assert await stage.files.sweep() == (behind_s == 0.0)
    assert await has(stage, file) == (behind_s > 0.0)
    await stage.end()


@pytest.mark.parametrize("committed", [False, True])
async def test_bytes_of_an_upload_go_unless_its_row_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, committed: bool
) -> None:
    stage, write = Stage(tmp_path, 1e9), Store.write

    async def fails(store: Store, *args: Any) -> None:
        monkeypatch.setattr(Store, "write", write)  # of the next ones
        if committed:
            await write(store, *args)
        raise StoreError("the disk is full")

    monkeypatch.setattr(Store, "write", fails)
    with pytest.raises(StoreError):
        await stage.upload(HOUR_S)
    assert len(list((tmp_path / "files").iterdir())) == committed
    await stage.end()
