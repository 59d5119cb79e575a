"""What is wrong is known before anything is loaded, and what is doubtful is told."""

from __future__ import annotations

import asyncio
import io
import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from fake_engine import INFO
from tandem.adapters.files import CONFIG_NAME, WEIGHTS_NAME
from tandem.cli import app, serve
from tandem.cli.checks import open_to_all, warnings
from tandem.config import CacheConfig, LearningConfig, ServerConfig, Settings
from tandem.processor import Share

RUNNER = CliRunner(env={"COLUMNS": "300"})


@pytest.fixture(autouse=True)
def nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def loads(*_: object) -> None:
        raise AssertionError("an engine is started")

    monkeypatch.setattr(serve, "build_client", loads)
    logger = logging.getLogger("tandem")
    before = (logger.handlers[:], logger.level, logger.propagate)
    yield
    logger.handlers[:], logger.level, logger.propagate = before


def make_files(folder: Path) -> None:
    (folder / "file").write_text("x")
    for name in ("closed", "empty", "adapter"):
        (folder / name).mkdir()
    (folder / "closed").chmod(0o500)
    (folder / "adapter" / CONFIG_NAME).write_text("{}")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--store-directory", "{}/file"], "--store-directory: {}/file is no directory"),
        (["--store-directory", "{}/file/x"], "--store-directory: {}/file/x cannot be used: Not a"),
        (["--store-directory", "/proc/x"], "--store-directory: /proc/x cannot be used"),
        (["--dtype", "fp8"], "--dtype: model.dtype: use auto, float32"),
        (["--device", "gpu"], "--device: model.device: use auto, cpu, cuda"),
        (["--kernels", "fast"], "--kernels: model.kernels: use auto, off"),
        (["--gate", "never"], "--gate: learning.gate: use auto, manual, always"),
        (["--log-level", "chatty"], "--log-level: server.log_level: use debug"),
        (["--reference", "version:0"], "reference is 'base' or 'version:N'"),
        (["--api-key-file", "{}/absent"], "cannot read the API key file {}/absent"),
        (["--canary-file", "{}/absent"], "learning.canary_file: cannot use {}/absent"),
        (["--profile", "{}/absent"], "there is no profile {}/absent"),
        (["--adapter-slo", "x=1"], "'1' is no objective"),
        (["--policy", "nothing"], "nothing"),
        (["--adapter", "x={}/absent"], "--adapter x: there is no adapter directory at {}/absent"),
        (["--adapter", "x={}/empty"], f"--adapter x: {{}}/empty has no {CONFIG_NAME}"),
        (["--adapter", "x={}/adapter"], f"--adapter x: {{}}/adapter has no {WEIGHTS_NAME}"),
        (["--adapter-root", "{}/absent"], "--adapter-root: there is no directory {}/absent"),
        (["--overflow", "cores:9999"], "--overflow cores:9999: the main engine needs a core, too"),
        (["--overflow", "cpu", "--device", "cpu"], "a CPU give the overflow engine some of the"),
        (["--overflow", "some"], "--overflow 'some': write cores:N, or cpu"),
        (["--overflow-quantile", "1"], "--overflow-quantile: scheduling.overflow_quantile: "),
        (["--overflow-tokens", "-1"], "--overflow-tokens: scheduling.overflow_tokens: "),
    ],
)
def test_what_is_wrong_is_known_before_anything_is_loaded(
    tmp_path: Path, words: list[str], problem: str
) -> None:
    make_files(tmp_path)
    given = [word.replace("{}", str(tmp_path)) for word in words]
    rest = ["--port", "0"]
    if "--store-directory" not in words:
        rest += ["--store-directory", str(tmp_path / "state")]
    done = RUNNER.invoke(app, ["serve", "demo", *rest, *given])
    assert done.exit_code == 2, done.output
    assert problem.replace("{}", str(tmp_path)) in done.output, done.output


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    make_files(tmp_path)
    done = RUNNER.invoke(app, ["serve", "demo", "--store-directory", str(tmp_path / "closed")])
    assert done.exit_code == 2 and "cannot be used: Permission denied" in done.output


def test_a_device_that_is_not_there_is_known_before_anything_is_loaded(tmp_path: Path) -> None:
    torch = sys.modules.get("torch") or pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is one")
    for command in (["serve"], ["profile"]):
        done = RUNNER.invoke(app, [*command, "demo", "--device", "cuda"])
        assert done.exit_code == 2 and "torch finds no CUDA device" in done.output


@pytest.mark.parametrize(
    "words",
    [
        ["serve", "{}"],
        ["serve", "./{}.gguf"],
        ["serve", "demo", "--adapter", "x={}"],
        ["serve", "demo", "--adapter-root", "{}"],
        ["profile", "demo", "--out", "{}/x.json"],
    ],
)
def test_a_name_that_is_too_long_is_one_line(tmp_path: Path, words: list[str]) -> None:
    given = [word.replace("{}", "x" * 300) for word in words]
    state = ["--port", "0", "--store-directory", str(tmp_path)] if words[0] == "serve" else []
    done = RUNNER.invoke(app, [*given, *state])
    assert done.exit_code == 2 and "File name too long" in done.output, done.exception


def with_server(**given: object) -> Settings:
    return replace(Settings(), server=replace(ServerConfig(), **given))  # type: ignore[arg-type]


def test_an_open_server_is_loudly_told() -> None:
    opened = with_server(host="0.0.0.0")
    told = open_to_all(opened)
    assert "ANYBODY WHO REACHES 0.0.0.0 MAY USE THIS SERVER, TEACH IT AND ERASE" in told
    assert "TEACH" not in open_to_all(replace(opened, learning=LearningConfig(enabled=False)))
    assert told in list(warnings(opened, {}))
    assert open_to_all(with_server(host="::"))
    assert open_to_all(with_server(host="example.org"))
    for closed in (
        Settings(),
        with_server(host="localhost"),
        with_server(host="::1"),
        with_server(host="0.0.0.0", api_keys=("k",)),
        with_server(host="0.0.0.0", api_key_file="f"),
    ):
        assert open_to_all(closed) == ""


def test_a_variable_that_is_ignored_is_told() -> None:
    (told,) = warnings(Settings(), {"TANDEM_SERVER_PROT": "1"})
    assert (
        "TANDEM_SERVER_PROT is no setting and is ignored; did you mean TANDEM_SERVER_PORT" in told
    )


def announced(settings: Settings, num_blocks: int) -> str:
    console = Console(file=io.StringIO(), width=300)
    info = replace(INFO, num_blocks=num_blocks, block_size=16, max_model_len=1000)
    with serve._reserve(ServerConfig(port=0)) as listener:
        serve._announce(info, settings, listener, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_cache_that_is_smaller_than_wanted_is_told() -> None:
    whole = 128 * 63  # sequences, blocks of 16 for 1000 tokens
    wanted = replace(Settings(), cache=CacheConfig(memory_bytes=1 << 40))
    capped = "all that 128 sequences can use (--max-sequences), less than --kv-memory"
    assert capped in announced(wanted, whole)
    assert capped not in announced(wanted, whole - 1)
    assert capped not in announced(Settings(), whole)


def test_an_open_server_is_told_when_it_is_ready_too() -> None:
    assert "WARNING: ANYBODY" in announced(with_server(host="0.0.0.0"), 10)
    assert "WARNING" not in announced(Settings(), 10)


async def test_a_busy_processor_is_told_once_and_its_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    free, taken = Share(2, 2, 0.0, 0.0), Share(2, 2, 1.5, 0.0)
    shares = [free, taken, None, taken, free, free]

    class Scripted:
        def __init__(self, wanted: int) -> None:
            assert wanted == 2

        def look(self) -> Share | None:
            if not shares:
                raise asyncio.CancelledError
            return shares.pop(0)

    monkeypatch.setattr(serve, "Watch", Scripted)
    monkeypatch.setattr(serve, "_LOOK_S", 0.0)
    with caplog.at_level("INFO", "tandem.cli"), pytest.raises(asyncio.CancelledError):
        await serve._watch_processor(2)
    assert [(each.levelname, each.getMessage().split(":")[0]) for each in caplog.records] == [
        ("WARNING", "the processor is busy"),
        ("INFO", "the processor is free again"),
    ]
