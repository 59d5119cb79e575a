"""GGUF files are unpacked once: by one of two processes, after a crash, never in half."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
from collections import namedtuple

import pytest
from gguf import GGMLQuantizationType as Type

import tiny_gguf
from tandem.core.errors import InvalidRequest, NotFound, UnsupportedModel
from tandem.model import gguf_file
from tandem.model.names import locate
from tandem.model.unpacked import model_folder, unpacked

LOCATE = """
import sys
from tandem.model.names import locate
print(locate(sys.argv[1], lambda stage, done: print(stage, file=sys.stderr, flush=True)))
"""


PAUSE = """
import signal, sys
from tandem.model.names import locate
def told(stage, done):
    if done >= 0.3:
        print(stage, flush=True)
        signal.pause()
locate(sys.argv[1], told)
"""


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_MODEL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def file(tmp_path):
    return tiny_gguf.write(tmp_path / "tiny.gguf", tiny_gguf.make(), Type.Q8_0)


def content(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def started(file, code=LOCATE):
    return subprocess.Popen(
        [sys.executable, "-c", code, str(file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_second_time_nothing_is_unpacked(file, cache, tmp_path):
    told = []
    first = unpacked(file, lambda stage, done: told.append(done))
    assert told == sorted(told) and len(told) == 3
    assert first.stat().st_mode & 0o777 == cache.stat().st_mode & 0o777  # others may read it
    again = file.rename(tmp_path / "renamed.gguf")
    written = (first / "model.safetensors").stat().st_mtime_ns
    assert locate(str(again), lambda stage, done: told.append(stage)) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == written
    assert told[3:] == ["reading renamed.gguf"]
    other = tiny_gguf.write(tmp_path / "other.gguf", tiny_gguf.make(), Type.Q4_0)
    assert locate(str(other)) != first
    assert len(content(cache)) == 2


@pytest.mark.full
def test_two_processes_at_once_unpack_once(file, cache):
    both = [started(file) for _ in range(2)]
    said = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert len({answer for answer, _ in said}) == 1
    assert sum("once for this machine" in told for _, told in said) == 1
    assert len(content(cache)) == 1


def test_what_a_killed_process_left_is_removed_and_unpacked_anew(file, cache):
    process = started(file, PAUSE)
    first = process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert first.startswith("unpacking tiny.gguf")
    assert process.returncode == -signal.SIGKILL
    assert content(cache)[0].startswith(".partial-") and len(content(cache)) == 1
    checkpoint = unpacked(file, lambda stage, done: None)
    assert content(cache) == [checkpoint.name]
    assert {"model.safetensors", "tokenizer.json", "config.json"} <= set(content(checkpoint))


def test_the_only_part_of_a_model_is_the_model(tmp_path, cache):
    file = tiny_gguf.write(tmp_path / "tiny-00001-of-00001.gguf", tiny_gguf.make(), Type.Q8_0)
    assert locate(str(file)).is_dir()
    with pytest.raises(UnsupportedModel, match="is a part of a model"):
        locate(str(file.rename(tmp_path / "tiny-00001-of-00002.gguf")))


def test_a_disk_without_room_is_told_before_anything_is_written(file, cache, monkeypatch):
    usage = namedtuple("usage", "free")
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(free=1 << 20))
    with pytest.raises(InvalidRequest, match=r"MiB are needed, 1 MiB are free; TANDEM_MODEL_CACHE"):
        locate(str(file))
    assert content(cache) == []


def test_a_disk_that_fills_up_leaves_nothing(file, cache):
    limit = 1 << 19
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(InvalidRequest, match=f"cannot unpack {file} into {cache}: "):
            locate(str(file))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert content(cache) == []


def test_a_file_that_is_replaced_while_it_is_read_is_kept_under_no_name(file, cache, monkeypatch):
    """Else the other model would be served for it from then on."""
    write = gguf_file.write_checkpoint

    def replaced(path, *given):
        tiny_gguf.write(path.with_name("other.gguf"), tiny_gguf.make(), Type.Q4_0).replace(path)
        write(path, *given)

    monkeypatch.setattr(gguf_file, "write_checkpoint", replaced)
    with pytest.raises(InvalidRequest, match=r"changed while it was read; start again$"):
        locate(str(file))
    assert content(cache) == []


def test_a_folder_that_cannot_be_made_is_named(file, cache):
    cache.write_text("in the way")
    with pytest.raises(InvalidRequest, match=f"into {cache}.*TANDEM_MODEL_CACHE"):
        locate(str(file))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model-00001-of-00003.gguf", "a part of a model; join the parts"),
        ("mmproj-model-f16.gguf", "only text is served"),
        ("model.gguf", "no GGUF file"),
        ("weights.bin", "no GGUF file"),
    ],
)
def test_files_that_are_no_model_are_refused_by_name(tmp_path, cache, name, message):
    (tmp_path / name).write_bytes(b"something else")
    with pytest.raises(UnsupportedModel, match=message):
        locate(str(tmp_path / name))
    assert not cache.exists()


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(NotFound, match=r"there is no file .*nothing\.gguf"):
        locate(str(tmp_path / "nothing.gguf"))


def test_the_folder_is_the_users_unless_it_is_named(monkeypatch, tmp_path):
    monkeypatch.delenv("TANDEM_MODEL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert model_folder() == tmp_path / "tandem" / "models"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert model_folder() == tmp_path / ".cache" / "tandem" / "models"
