"""`kill -9` at any moment: what was acknowledged is there, once and whole."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from pathlib import Path

from tandem.store import Store, feedback
from tandem.store.feedback import Filter

HERE = Path(__file__).parent
ROUNDS = 5


def acknowledged_until_killed(directory: Path, url: str, prefix: str, after_s: float) -> list[str]:
    """Ids that a child acknowledged before it was killed, `after_s` from its first."""
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    child = subprocess.Popen(
        [sys.executable, str(HERE / "acknowledger.py"), str(directory), url, prefix],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert child.stdout is not None
    seen = [child.stdout.readline()]
    timer = threading.Timer(after_s, child.kill)
    timer.start()
    seen += child.stdout.readlines()
    timer.join()
    child.wait()
    child.stdout.close()
    return [line.strip() for line in seen if line.endswith("\n")]


async def test_acknowledged_feedback_survives_kills(database_url: str, tmp_path: Path) -> None:
    rng = random.Random(0)
    acknowledged: list[str] = []
    for kill in range(ROUNDS):
        after_s = rng.uniform(0.0, 0.3)
        seen = acknowledged_until_killed(tmp_path, database_url, f"r{kill}", after_s)
        assert seen
        acknowledged += seen
    store = Store.open(tmp_path, database_url)
    try:
        stored = await store.read(feedback.listed, Filter(), limit=1_000_000)
    finally:
        store.close()
    ids = [found.feedback.feedback_id for found in stored]
    assert len(ids) == len(set(ids))
    assert set(acknowledged) <= set(ids)
    assert len(ids) <= len(acknowledged) + ROUNDS * 8  # each lane waits for its last one
    for found in stored:
        name = found.feedback.feedback_id
        assert [sample.sample_id for sample in found.samples] == [f"{name}-0", f"{name}-1"]
