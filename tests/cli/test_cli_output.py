"""How commands end when they cannot, and the address of a server."""

from __future__ import annotations

import errno

import pytest
import typer

from tandem.cli.output import refusals
from tandem.cli.remote import base_url
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
