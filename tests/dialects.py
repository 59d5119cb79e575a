"""What tests of dialects share: an engine whose text they choose, and how they read its streams."""

from __future__ import annotations

import json
from typing import Any

from fake_engine import FakeEngine, Script
from serving import demo_tokenizer
from tandem.core.request import Request

# What Codex sends beside its turns and tools, by OpenAI's documentation of each field.
CODEX_FIELDS: dict[str, Any] = {
    "model": "demo",
    "instructions": "You are a coding agent.",
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199-thread",
    "text": {"verbosity": "low"},
    "client_metadata": {"x-codex-installation-id": "1"},
}


def function_tool(name: str, description: str, argument: str) -> dict[str, Any]:
    """A function of one text, as /v1/responses has it."""
    parameters = {"type": "object", "properties": {argument: {"type": "string"}}}
    described = {"type": "function", "name": name, "description": description}
    return {**described, "strict": False, "parameters": parameters}


SHELL = function_tool("shell", "Runs a command", "command")


class Says:
    """An engine's script whose text a test chooses."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.dies_after: int | None = None

    def __call__(self, request: Request, index: int) -> Script:
        tokens = demo_tokenizer().encode(self.text, add_special_tokens=False)
        return Script(tokens=tokens, dies_after=self.dies_after)


def prompt_of(engine: FakeEngine) -> str:
    """The text of the last prompt."""
    tokenizer = demo_tokenizer()
    return b"".join(map(tokenizer.token_bytes, engine.requests[-1].prompt)).decode()


def events_of(text: str) -> list[dict[str, Any]]:
    """Bodies of server-sent events, each of which names its type twice."""
    made = []
    for event in text.strip().split("\n\n"):
        first, second = event.split("\n")
        body = json.loads(second.removeprefix("data: "))
        assert first == f"event: {body['type']}"
        made.append(body)
    return made
