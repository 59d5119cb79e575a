"""How commands end when they cannot, and the address of a server."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import httpx
import pytest
import typer
from typer.testing import CliRunner

from tandem.cli import app
from tandem.cli.output import refusals, with_folder
from tandem.cli.remote import Remote, RemoteError, base_url, connected
from tandem.core.errors import (
    EngineDead,
    InvalidRequest,
    NotFound,
    StoreError,
    TandemError,
    UnsupportedModel,
)

LONG = "a [bold]word[/] and more of them, " * 8


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InvalidRequest(LONG), 2),
        (NotFound(LONG), 2),
        (UnsupportedModel(LONG), 2),
        (EngineDead(LONG), 1),
        (StoreError(LONG), 1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_own_errors_are_one_line_and_a_status(
    error: TandemError, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as ended, refusals():
        raise error
    assert ended.value.exit_code == status
    assert capsys.readouterr().err == f"error: {error}\n"


@pytest.mark.parametrize("error", [ZeroDivisionError(), OSError(errno.EIO, "broken")])
def test_other_errors_are_not_hidden(error: Exception) -> None:
    with pytest.raises(type(error)), refusals():
        raise error


def test_a_file_that_cannot_be_used_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended, refusals():
        raise FileNotFoundError(errno.ENOENT, "no such file", "a.json")
    assert ended.value.exit_code == 1
    assert capsys.readouterr().err == "error: [Errno 2] no such file: 'a.json'\n"


def test_a_target_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    new, old, link, pipe = (tmp_path / name for name in ("new", "old", "link", "pipe"))
    old.write_text("kept")
    link.symlink_to(tmp_path / "absent")
    os.mkfifo(pipe)
    for out in (new, old, link, pipe):
        assert with_folder(out) == out
    assert not new.exists() and old.read_text() == "kept"
    assert link.is_symlink() and not link.exists()
    with pytest.raises(typer.BadParameter, match="cannot write /proc/x"):
        with_folder(Path("/proc/x.json"))


def test_what_cannot_be_sent_is_one_error() -> None:
    with httpx.Client(base_url="http://h/v1") as http:
        server = Remote(http)
        with pytest.raises(RemoteError, match="cannot ask for"):
            server.get("batches/batch_1\r")
        for value in (float("inf"), object(), "\udcff"):
            with pytest.raises(RemoteError, match="cannot ask for 'adapters'"):
                server.post("adapters", {"beta": value})


def test_a_key_that_is_not_ascii_is_refused() -> None:
    for words in (["batch", "list"], ["chat"]):
        refused = CliRunner().invoke(app, [*words, "--api-key", "sk-ä"])
        assert refused.exit_code == 2 and "an API key is ASCII" in refused.output


def test_a_reader_that_is_gone_is_not_the_servers_error() -> None:
    with pytest.raises(BrokenPipeError), connected("h", ""):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("http://h:1", "http://h:1/v1"),
        ("http://h:1/", "http://h:1/v1"),
        ("http://h:1/v1", "http://h:1/v1"),
        ("http://h:1/v1/", "http://h:1/v1/"),
        ("https://h/other/v1", "https://h/other/v1"),
    ],
)
def test_a_server_without_a_path_has_its_routes_below_v1(given: str, used: str) -> None:
    assert base_url(given) == used
