"""Log lines: fields readable by people and machines, set up once."""

from __future__ import annotations

import io
import logging

import pytest

from tandem.telemetry.logs import configure


@pytest.fixture(autouse=True)
def restore() -> object:
    logger = logging.getLogger("tandem")
    before = (logger.handlers[:], logger.level, logger.propagate)
    yield
    logger.handlers[:], logger.level, logger.propagate = before


def test_fields_follow_the_message_and_are_quoted_where_needed() -> None:
    stream = io.StringIO()
    configure("info", stream)
    fields = {"route": "/health", "elapsed_s": 0.123456, "why": 'two "words"\n', "empty": ""}
    logging.getLogger("tandem.api").info("http", extra={"fields": fields})
    line = stream.getvalue()
    assert line.count("\n") == 1
    assert line.endswith(
        r'http route=/health elapsed_s=0.1235 why="two \"words\"\n" empty=""' + "\n"
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
