"""Log lines: fields readable by people and machines, set up once."""

from __future__ import annotations

import io
import logging

import pytest

from fake_engine import FakeEngine
from serving import make_app
from tandem.config import ServerConfig
from tandem.telemetry.logs import _POLLED, configure


@pytest.fixture(autouse=True)
def restore() -> object:
    logger = logging.getLogger("tandem")
    before = (logger.handlers[:], logger.level, logger.propagate)
    yield
    logger.handlers[:], logger.level, logger.propagate = before


def test_fields_follow_the_message_and_are_quoted_where_needed() -> None:
    stream = io.StringIO()
    configure("info", stream)
    fields = {"route": "/tokenize", "elapsed_s": 0.123456, "why": 'two "words"\n', "empty": ""}
    logging.getLogger("tandem.api").info("http", extra={"fields": fields})
    line = stream.getvalue()
    assert line.count("\n") == 1
    assert line.endswith(
        r'http route=/tokenize elapsed_s=0.1235 why="two \"words\"\n" empty=""' + "\n"
    )


def test_configuring_again_replaces_the_handler_and_the_level() -> None:
    first, second = io.StringIO(), io.StringIO()
    configure("info", first)
    logger = configure("warning", second)
    logger.info("quiet")
    logger.warning("loud")
    assert first.getvalue() == ""
    assert "loud" in second.getvalue() and "quiet" not in second.getvalue()


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="CHATTY"):
        configure("chatty")


@pytest.mark.parametrize(
    ("level", "method", "route", "status", "shown"),
    [
        ("info", "GET", "/ready", 200, False),
        ("info", "GET", "/health", 200, False),
        ("info", "GET", "/v1/adapters/{name}/events", 200, False),
        ("debug", "GET", "/ready", 200, True),
        ("info", "GET", "/ready", 503, True),
        ("info", "GET", "/v1/models", 200, True),
        ("info", "DELETE", "/v1/adapters/{name}", 200, True),
    ],
)
def test_probes_are_not_told_unless_they_fail(
    level: str, method: str, route: str, status: int, shown: bool
) -> None:
    stream = io.StringIO()
    configure(level, stream)
    fields = {"method": method, "route": route, "status": status, "elapsed_s": 0.1}
    logging.getLogger("tandem.api.guard").info("http", extra={"fields": fields})
    assert bool(stream.getvalue()) == shown


def test_polled_routes_exist() -> None:
    app = make_app(FakeEngine(), ServerConfig())
    assert {route.path for route in app.routes} >= _POLLED  # type: ignore[attr-defined]
