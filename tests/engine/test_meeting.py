"""The directory of the sockets: gone with a process that was killed, never with one that lives."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.engine.meeting import meeting_place, remove_dead

MEET = """
import time
from tandem.engine.meeting import meeting_place
with meeting_place() as folder:
    (folder / "engine-0.commands").touch()
    print(folder, flush=True)
    time.sleep(60)
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def test_the_next_start_removes_what_a_killed_one_left_and_nothing_that_lives(
    temporary: Path,
) -> None:
    (temporary / "tandem-notes").mkdir()
    unlocked = temporary / "tandem-sockets-of-somebody"  # one that is just being made
    unlocked.mkdir()
    with subprocess.Popen([sys.executable, "-c", MEET], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        theirs = Path(other.stdout.readline().decode().strip())
        with meeting_place() as ours:
            assert theirs.is_dir() and ours != theirs
            assert remove_dead(temporary) == []
            other.kill()
            other.wait()
            assert theirs.is_dir()
            with meeting_place():
                assert not theirs.exists() and ours.is_dir()
    left = {path.name for path in temporary.iterdir()}
    assert left == {"tandem-notes", unlocked.name}


def test_what_others_may_not_touch_is_left(temporary: Path) -> None:
    theirs = temporary / "tandem-sockets-x"
    theirs.mkdir()
    (theirs / "lock").touch()
    if os.getuid() == 0:
        os.chown(theirs, 12345, 12345)
        assert remove_dead(temporary) == [] and theirs.is_dir()
        os.chown(theirs, 0, 0)
    assert remove_dead(temporary) == [theirs]
