"""The terminal client against a live server over a scripted engine."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest
from fastapi import FastAPI, Response
from rich.console import Console

from fake_engine import FakeEngine, Script
from serving import demo_tokenizer, live, make_app
from tandem.cli.chat import ChatServer, converse
from tandem.config import ServerConfig
from tandem.core.ports import EngineState

TEXT = "Hello [bold]you[/bold] \x1b[31m\x07!"
TOKENS = demo_tokenizer().encode(TEXT, add_special_tokens=False)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(play=lambda r, i: Script(tokens=TOKENS))


@pytest.fixture
def url(engine: FakeEngine) -> Iterator[str]:
    with live(make_app(engine, ServerConfig(api_keys=("sk-test",)))) as url:
        yield f"{url}/v1"


def talk(
    monkeypatch: pytest.MonkeyPatch, url: str, lines: list[str], key: str = "sk-test"
) -> tuple[int, str]:
    """What the user sees after typing `lines`."""
    typed = iter(lines)

    def read(*_: object, **__: object) -> str:
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    console = Console(file=io.StringIO(), width=200)
    monkeypatch.setattr(console, "input", read)
    with ChatServer(url, key, "", {"max_tokens": 100, "temperature": None}) as server:
        code = converse(server, console, "Be nice.")
    assert isinstance(console.file, io.StringIO)
    return code, console.file.getvalue()


def prompts(engine: FakeEngine) -> list[str]:
    return [demo_tokenizer().decode(request.prompt) for request in engine.requests]


def test_turns_build_on_each_other_and_reset_forgets(
    monkeypatch: pytest.MonkeyPatch, engine: FakeEngine, url: str
) -> None:
    code, shown = talk(monkeypatch, url, ["Hi", "", "More", "/reset", "Again", "/exit", "never"])
    assert code == 0
    assert "talking to demo" in shown
    first, second, third = prompts(engine)
    assert first == "system\nBe nice.\nuser\nHi\nassistant\n"
    assert second.startswith(first) and second.endswith("\nuser\nMore\nassistant\n")
    assert TEXT in second
    assert third == "system\nBe nice.\nuser\nAgain\nassistant\n"
    assert engine.requests[0].sampling.max_tokens == 100


def test_the_systems_prompt_can_be_changed(
    monkeypatch: pytest.MonkeyPatch, engine: FakeEngine, url: str
) -> None:
    talk(monkeypatch, url, ["Hi", "/system Be rude.", "Hi", "/what"])
    assert prompts(engine)[1] == "system\nBe rude.\nuser\nHi\nassistant\n"


def test_answers_are_shown_as_plain_text(
    monkeypatch: pytest.MonkeyPatch, engine: FakeEngine, url: str
) -> None:
    _, shown = talk(monkeypatch, url, ["Hi"])
    assert "Hello [bold]you[/bold] [31m!" in shown
    assert "\x1b" not in shown and "\x07" not in shown


def test_errors_are_shown_and_the_conversation_goes_on(
    monkeypatch: pytest.MonkeyPatch, engine: FakeEngine, url: str
) -> None:
    engine.play = lambda r, i: Script(tokens=TOKENS, dies_after=2)
    code, shown = talk(monkeypatch, url, ["Hi", "Hi again"])
    assert code == 0
    assert shown.count("error:") == 2 and "restarts" in shown
    engine.state = EngineState.READY
    code, shown = talk(monkeypatch, url, [], key="sk-wrong")
    assert code == 1 and "401" in shown and "incorrect API key" in shown


def test_a_server_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    code, shown = talk(monkeypatch, "http://127.0.0.1:9/v1", [])
    assert code == 1 and "cannot reach" in shown


def odd_server(models: str, events: str) -> FastAPI:
    """A server with OpenAI's routes that answers with these bodies."""
    app = FastAPI()

    @app.get("/v1/models")
    def list_models() -> Response:
        return Response(models, media_type="application/json")

    @app.post("/v1/chat/completions")
    def answer() -> Response:
        return Response(events, media_type="text/event-stream")

    return app


ONE_MODEL = '{"data": [{"id": "odd"}]}'


def event(delta: str) -> str:
    return f'data:{{"error": null, "choices": [{{"delta": {delta}}}]}}\n\n'


def test_fields_that_are_null_and_an_end_without_a_space(monkeypatch: pytest.MonkeyPatch) -> None:
    said = (event("null"), event('{"content": null}'), event('{"content": "Fine."}'))
    rest = ('data: {"choices": null}\n\n', "data:\n\n", "data:[DONE]\n\n")
    with live(odd_server(ONE_MODEL, "".join((*said, *rest)))) as url:
        code, shown = talk(monkeypatch, url, ["Hi"])
    assert code == 0 and "Fine.\n" in shown and "error" not in shown


@pytest.mark.parametrize("models", ['{"data": []}', '{"data": null}', "[]", "{}", "none"])
def test_a_server_without_models(monkeypatch: pytest.MonkeyPatch, models: str) -> None:
    with live(odd_server(models, "")) as url:
        code, shown = talk(monkeypatch, f"{url}/v1", [])
    assert code == 1 and "lists no model" in shown and "--model" in shown


@pytest.mark.parametrize(
    ("sent", "needle"),
    [
        ('data: {"error": {"message": "too hot"}}', "error: too hot"),
        ('data: {"error": "too cold"}', "error: too cold"),
        ("data: <html>", "no JSON: '<html>'"),
        ("data: [1]", "no chunk: '[1]'"),
    ],
)
def test_what_is_no_answer_is_an_error(
    monkeypatch: pytest.MonkeyPatch, sent: str, needle: str
) -> None:
    with live(odd_server(ONE_MODEL, f"{sent}\n\n")) as url:
        code, shown = talk(monkeypatch, f"{url}/v1", ["Hi"])
    assert code == 0 and needle in shown


def test_ctrl_c_stops_the_answer_and_keeps_what_was_said(
    monkeypatch: pytest.MonkeyPatch, engine: FakeEngine, url: str
) -> None:
    interrupted: list[str] = []
    original = ChatServer.answer

    def answer(self: ChatServer, messages: list[dict[str, str]]) -> Iterator[str]:
        for piece in original(self, messages):
            yield piece
            if not interrupted:
                interrupted.append(piece)
                raise KeyboardInterrupt

    monkeypatch.setattr(ChatServer, "answer", answer)
    code, shown = talk(monkeypatch, url, ["Hi", "More"])
    assert code == 0 and "[stopped]" in shown
    assert f"assistant\n{interrupted[0]}\nuser\nMore" in prompts(engine)[1]
