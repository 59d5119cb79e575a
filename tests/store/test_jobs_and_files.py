from __future__ import annotations

from dataclasses import replace

from tandem.core.learning import CheckpointRecord, FileRecord, JobRecord, JobStatus
from tandem.store import Store, files, jobs, references, usage


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


async def test_checkpoints(store: Store) -> None:
    await store.write(jobs.add, make_job("j1"))
    made = [CheckpointRecord(f"c{i}", "j1", 1.0, i, f"/c{i}", "h", {"loss": i}) for i in range(3)]
    for checkpoint in made:
        await store.write(jobs.add_checkpoint, checkpoint)
    assert await store.read(jobs.checkpoints, "j1") == made[::-1]
    assert await store.read(jobs.checkpoints, "j1", after="c2", limit=1) == [made[1]]


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
    await store.write(references.put, "hash", {"s1": -9.0})
    await store.write(references.put, "base", {"s1": -5.5, "new": -1.0})
    await store.write(references.put, "base", {})
    known = await store.read(references.get, "base", [*(f"s{i}" for i in range(2500)), "none"])
    assert len(known) == 2500 and known["s1"] == -5.5 and known["s2"] == -0.2
    await store.write(references.forget, "base")
    assert await store.read(references.get, "base", ["s1"]) == {}
    assert await store.read(references.get, "hash", ["s1"]) == {"s1": -9.0}


async def test_usage_counts_by_key_and_word(store: Store) -> None:
    assert await store.write(usage.add, "k", "feedback/1", 2, 10.0) == 2
    assert await store.write(usage.add, "k", "feedback/1", 3, 11.0) == 5
    assert await store.write(usage.add, "k", "samples/formal", 1, 11.0) == 1
    await store.write(usage.delete_before, "feedback/", 12.0)
    assert await store.read(usage.count, "k", "feedback/1") == 0
    assert await store.read(usage.count, "k", "samples/formal") == 1
