"""docs/api.md lists exactly the routes and fields that exist."""

from __future__ import annotations

import re
from pathlib import Path

from fastapi.routing import APIRoute

from fake_engine import FakeEngine
from serving import make_app
from tandem.api.fields import (
    CHAT_REFUSED,
    COMPLETION_REFUSED,
    MESSAGE_REFUSED,
    MESSAGES_REFUSED,
    MESSAGES_UNUSED,
    RESPONSES_REFUSED,
    RESPONSES_UNUSED,
    UNUSED,
)
from tandem.api.messages.schemas import MessagesRequest
from tandem.api.responses.schemas import ResponsesRequest
from tandem.api.schemas import ChatRequest, CompletionRequest

TEXT = (Path(__file__).parents[2] / "docs" / "api.md").read_text()


def test_every_route_is_documented_and_nothing_else() -> None:
    app = make_app(FakeEngine())
    served = {
        (method, re.sub(r":\w+}", "}", route.path))
        for route in app.routes
        if isinstance(route, APIRoute)
        for method in route.methods
    }
    rows = re.findall(r"^\| ([A-Z, ]+) \| `([^`]+)` \|", TEXT, re.MULTILINE)
    documented = {(method, path) for methods, path in rows for method in methods.split(", ")}
    assert documented == served
    assert len(served) == len(app.routes)  # nothing hidden


def names(start: str, end: str) -> set[str]:
    section = TEXT[TEXT.index(start) : TEXT.index(end, TEXT.index(start))]
    return set(re.findall(r"`(\w+)`", section))


def test_every_field_is_documented() -> None:
    assert names("Accepted and without effect", "Refused by name") == set(UNUSED)
    assert names("in chats:", "in completions:") == set(CHAT_REFUSED)
    assert names("in completions:", "in messages:") == set(COMPLETION_REFUSED)
    assert names("in messages:", "Any other field") == set(MESSAGE_REFUSED)
    fields = set(ChatRequest.model_fields) | set(CompletionRequest.model_fields)
    documented = names("OpenAI's: ", "Accepted and without") | {"stream_options"}
    assert fields <= documented


def test_every_field_of_the_other_dialects_is_documented() -> None:
    for heading, end, body, unused, refused in (
        ("## Anthropic", "## OpenAI", MessagesRequest, MESSAGES_UNUSED, MESSAGES_REFUSED),
        ("## OpenAI", "## Batches", ResponsesRequest, RESPONSES_UNUSED, RESPONSES_REFUSED),
    ):
        section = TEXT[TEXT.index(heading) : TEXT.index(end, TEXT.index(heading))]
        told = [re.findall(r"`(\w+)`", part) for part in section.split("\n\n")]
        lines = {
            part.split("`")[0].strip(): set(names)
            for part, names in zip(section.split("\n\n"), told, strict=True)
        }
        assert lines["Accepted without effect:"] == set(unused)
        assert lines["Refused by name:"] == set(refused)
        assert set(body.model_fields) <= lines["Fields:"]
