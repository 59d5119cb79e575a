"""docs/api.md lists exactly the routes and fields that exist."""

from __future__ import annotations

import re
from pathlib import Path

from fastapi.routing import APIRoute

from fake_engine import FakeEngine
from serving import make_app
from tandem.api.fields import CHAT_REFUSED, COMPLETION_REFUSED, MESSAGE_REFUSED, UNUSED
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
