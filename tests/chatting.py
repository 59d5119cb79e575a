"""What the tests of the terminal client say, and what they see of it."""

from __future__ import annotations

from fake_engine import FakeEngine
from serving import demo_tokenizer

TEXT = "Hello [bold]you[/bold] \x1b[31m\x07!"
TOKENS = demo_tokenizer().encode(TEXT, add_special_tokens=False)


def prompts(engine: FakeEngine) -> list[str]:
    """Those of all requests, as text."""
    return [demo_tokenizer().decode(request.prompt) for request in engine.requests]
