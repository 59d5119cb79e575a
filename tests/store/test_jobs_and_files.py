from __future__ import annotations

from dataclasses import replace

import pytest

from tandem.core.learning import CheckpointRecord, EventRecord, FileRecord, JobRecord, JobStatus
from tandem.store import Store, events, files, jobs, references, usage


def make_job(name: str, tenant: str = "t") -> JobRecord:
    return JobRecord(
        name, 1.0, tenant, "demo", "formal", JobStatus.QUEUED, {"type": "dpo"}, "file-1"
    )


async def test_jobs(store: Store) -> None:
    for name in ("j1", "j2", "j3"):
        await store.write(jobs.add, make_job(name))
    await store.write(jobs.add, make_job("other", "u"))
    running = replace(
        make_job("j2"),
        status=JobStatus.RUNNING,
        step=3,
        result_files=("file-2",),
        error={"code": None},
        finished_s=2.5,
    )
    assert await store.write(jobs.update, running)
    assert not await store.write(jobs.update, make_job("unknown"))
    assert await store.read(jobs.find, "j2") == running
    assert [job.job_id for job in await store.read(jobs.listed, "t")] == ["j3", "j2", "j1"]
    older = await store.read(jobs.listed, "t", after="j3", limit=1)
    assert [job.job_id for job in older] == ["j2"]
    waiting = await store.read(jobs.in_status, [JobStatus.QUEUED, JobStatus.PAUSED])
    assert [job.job_id for job in waiting] == ["j1", "j3", "other"]


async def test_only_the_log_says_where_the_directory_is(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    here = str(store.directory)
    message = f"cannot write '{here}/jobs/j1/2': {here} is full, and so is {here}-2"
    told = f"cannot write 'the store/jobs/j1/2': the store is full, and so is {here}-2"
    error = {"code": "disk", "message": message, "param": None}
    await store.write(jobs.add, make_job("j1"))
    await store.write(jobs.update, replace(make_job("j1"), error=error))
    await store.write(jobs.add, replace(make_job("j2"), error=error))
    await store.write(events.add, EventRecord("j1", 1.0, "error", message))
    for name in ("j1", "j2"):
        job = await store.read(jobs.find, name)
        assert job is not None and job.error == {**error, "message": told}
    [event] = await store.read(events.listed, "j1")
    assert event.message == told
    assert message in caplog.text


async def test_checkpoints(store: Store) -> None:
    await store.write(jobs.add, make_job("j1"))
    made = [CheckpointRecord(f"c{i}", "j1", 1.0, i, f"/c{i}", "h", {"loss": i}) for i in range(3)]
    for checkpoint in made:
        await store.write(jobs.add_checkpoint, checkpoint)
    assert await store.read(jobs.checkpoints, "j1") == made[::-1]
    assert await store.read(jobs.checkpoints, "j1", after="c2", limit=1) == [made[1]]


async def test_checkpoints_are_found_by_the_end_of_their_jobs_id(store: Store) -> None:
    made = {}
    for name, tenant in (("j-a1", "t"), ("j-a2", "t"), ("j-b1", "u")):
        await store.write(jobs.add, make_job(name, tenant))
        for step in (1, 2):
            record = CheckpointRecord(f"{name}/{step}", name, 1.0, step, f"/{name}/{step}", "h")
            await store.write(jobs.add_checkpoint, record)
            made[name, step] = record
    assert await store.read(jobs.checkpoint_of, "t", "formal", "a1", 2) == made["j-a1", 2]
    assert await store.read(jobs.checkpoint_of, "t", "formal", "a2", 2) == made["j-a2", 2]
    assert await store.read(jobs.checkpoint_of, "u", "formal", "b1", 1) == made["j-b1", 1]
    for unknown in (
        ("u", "formal", "a1", 2),
        ("t", "formal", "b1", 1),
        ("t", "casual", "a1", 2),
        ("t", "formal", "a1", 3),
        ("t", "formal", "a", 1),
    ):
        assert await store.read(jobs.checkpoint_of, *unknown) is None


async def test_checkpoints_of_an_adapter_are_forgotten_but_not_where_a_job_goes_on(
    store: Store,
) -> None:
    ended = replace(make_job("j1"), finished_s=2.0, checkpoint_path="/j1/2")
    paused = replace(make_job("j2", "u"), status=JobStatus.PAUSED, checkpoint_path="/j2/2")
    other = replace(make_job("j3"), adapter="casual", checkpoint_path="/j3/2")
    for job in (ended, paused, other):
        await store.write(jobs.add, job)
        for step in (1, 2):
            path = f"/{job.job_id}/{step}"
            record = CheckpointRecord(path, job.job_id, 1.0, step, path, "h")
            await store.write(jobs.add_checkpoint, record)
    gone = await store.write(jobs.forget_checkpoints, "formal")
    assert sorted(gone) == ["/j1/1", "/j1/2", "/j2/1"]
    left = [len(await store.read(jobs.checkpoints, name)) for name in ("j1", "j2", "j3")]
    assert left == [0, 0, 2]


async def test_files(store: Store) -> None:
    made = [
        FileRecord(f"f{i}", float(i), "n\u0000.jsonl", "batch" if i else "fine-tune", i, f"/{i}", t)
        for i, t in enumerate(["t", "t", "t", "u"])
    ]
    for file in made:
        await store.write(files.add, file)
    assert await store.read(files.find, "f1") == made[1]
    assert await store.read(files.listed, "t") == made[2::-1]
    assert await store.read(files.listed, "t", purpose="batch", ascending=True) == made[1:3]
    assert await store.read(files.listed, "t", after="f1") == made[:1]
    assert await store.read(files.listed, "t", after="f1", ascending=True) == made[2:3]
    assert await store.read(files.paths) == {"/0", "/1", "/2", "/3"}
    assert await store.write(files.delete, "f1")
    assert not await store.write(files.delete, "f1")
    assert await store.read(files.find, "f1") is None


async def test_reference_logprobs(store: Store) -> None:
    await store.write(references.put, "base", {f"s{i}": -0.1 * i for i in range(2500)})
    await store.write(references.put, "hash@base", {"s1": -9.0})
    await store.write(references.put, "hash2@base", {"s1": -8.0})
    await store.write(references.put, "base", {"s1": -5.5, "new": -1.0})
    await store.write(references.put, "base", {})
    known = await store.read(references.get, "base", [*(f"s{i}" for i in range(2500)), "none"])
    assert len(known) == 2500 and known["s1"] == -5.5 and known["s2"] == -0.2
    await store.write(references.forget, "hash")
    assert await store.read(references.get, "hash@base", ["s1"]) == {}
    assert await store.read(references.get, "hash2@base", ["s1"]) == {"s1": -8.0}
    assert await store.read(references.get, "base", ["s1"]) == {"s1": -5.5}


async def test_usage_counts_by_key_and_word(store: Store) -> None:
    assert await store.write(usage.add, "k", "feedback/1", 2, 10.0) == 2
    assert await store.write(usage.add, "k", "feedback/1", 3, 11.0) == 5
    assert await store.write(usage.add, "k", "samples/formal", 1, 11.0) == 1
    await store.write(usage.delete_before, "feedback/", 12.0)
    assert await store.read(usage.count, "k", "feedback/1") == 0
    assert await store.read(usage.count, "k", "samples/formal") == 1
