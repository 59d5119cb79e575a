"""The terminal client against a live server over a scripted engine."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Response
from rich.console import Console

from chatting import TEXT, TOKENS, prompts
from fake_engine import FakeEngine, Script
from serving import demo_tokenizer, live, make_app, new_directory
from tandem.cli.chat import ChatServer
from tandem.cli.conversation import converse
from tandem.cli.terminal import Terminal
from tandem.config import ServerConfig, StoreConfig
from tandem.core.ports import EngineState
from tandem.core.request import Request
from tandem.core.sequence import FinishReason


def talk(
    monkeypatch: pytest.MonkeyPatch,
    url: str,
    lines: list[str],
    key: str = "sk-test",
    adapter: str = "",
    interactive: bool = True,
) -> tuple[int, str]:
    """What the user sees after typing `lines`, or after piping them."""
    typed = iter(lines)

    def read(*_: object) -> str:
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    console = Console(file=io.StringIO(), width=200)
    monkeypatch.setattr(Terminal, "read", read)
    monkeypatch.setattr(Terminal, "interactive", interactive)
    with ChatServer(url, key, "", {"max_tokens": 100, "temperature": None}) as server:
        code = converse(server, console, "Be nice.", adapter)
    assert isinstance(console.file, io.StringIO)
    return code, console.file.getvalue()


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


def test_of_a_pipe_the_turn_that_fails_is_the_last(
    monkeypatch: pytest.MonkeyPatch, engine: FakeEngine, url: str
) -> None:
    engine.play = lambda r, i: Script(tokens=TOKENS, dies_after=2)
    code, shown = talk(monkeypatch, url, ["Hi", "Hi again"], interactive=False)
    assert code == 1 and shown.count("error: ") == 1, shown


def test_bytes_that_are_not_utf8_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    for errors in ("strict", "surrogateescape"):
        typed = io.TextIOWrapper(io.BytesIO(b"caf\xe9\nx\n"), encoding="utf-8", errors=errors)
        monkeypatch.setattr(sys, "stdin", typed)
        terminal = Terminal(Console())
        assert [terminal.read(""), terminal.read("")] == ["caf\ufffd", "x"]
        assert not terminal.interactive


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


def interrupt_answers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ctrl-C after the first piece of each answer; those pieces."""
    pieces: list[str] = []
    original = ChatServer.answer

    def answer(self: ChatServer, messages: list[dict[str, str]]) -> Iterator[str]:
        for piece in original(self, messages):
            pieces.append(piece)
            yield piece
            raise KeyboardInterrupt

    monkeypatch.setattr(ChatServer, "answer", answer)
    return pieces


def test_ctrl_c_stops_the_answer_and_keeps_what_was_said(
    monkeypatch: pytest.MonkeyPatch, engine: FakeEngine, url: str
) -> None:
    interrupted = interrupt_answers(monkeypatch)
    code, shown = talk(monkeypatch, url, ["Hi", "More"])
    assert code == 0 and "[stopped]" in shown
    assert f"assistant\n{interrupted[0]}\nuser\nMore" in prompts(engine)[1]


ASKED = [{"role": "system", "content": "Be nice."}, {"role": "user", "content": "Hi"}]


def feedback(url: str) -> list[dict[str, Any]]:
    """What is stored, oldest first."""
    found = httpx.get(f"{url}/feedback", headers={"Authorization": "Bearer sk-test"})
    listed: list[dict[str, Any]] = found.raise_for_status().json()["data"]
    return listed[::-1]


def several(texts: list[str]) -> Callable[[Request, int], Script]:
    """An engine that says one text after the other."""
    left = iter(texts)
    encode = demo_tokenizer().encode
    return lambda r, i: Script(tokens=encode(next(left), add_special_tokens=False))


def test_answers_are_rated_about_what_was_served(
    monkeypatch: pytest.MonkeyPatch, engine: FakeEngine, url: str
) -> None:
    lines = ["/good", "Hi", "/good", "/bad", "/help"]
    code, shown = talk(monkeypatch, url, lines, adapter="formal")
    assert code == 0 and "talking to demo; feedback teaches formal" in shown, shown
    assert "there is no answer yet" in shown and "[base]" in shown
    good, bad = feedback(url)
    assert (good["rating"], bad["rating"]) == (1.0, 0.0)
    for said in (good, bad):
        assert said["adapter"] == "formal" and said["completion_id"]
        assert (said["messages"], said["chosen"]) == (ASKED, TEXT)
    fate = r"stored for formal: a version begins in \d+ (?:s|min), or soon after \d+ more \(tandem"
    assert len(re.findall(fate, shown)) == 1
    # The second rating takes the place of the first, and is a dislike alone.
    assert "dislikes are learned from together with as many answers that are rated up" in shown


def test_who_learns_is_asked_once_and_answers_from_then_on(
    monkeypatch: pytest.MonkeyPatch, engine: FakeEngine, url: str
) -> None:
    code, shown = talk(monkeypatch, url, ["Hi", "/good", "/adapter mine", "/good", "Hi"])
    assert code == 0 and "say first which adapter learns: /adapter NAME" in shown
    assert "feedback teaches mine; talking to demo" in shown
    (said,) = feedback(url)
    assert said["adapter"] == "mine" and said["rating"] == 1.0
    code, shown = talk(monkeypatch, url, [], adapter="mine")
    assert "talking to demo:mine; feedback teaches mine" in shown


def test_a_retry_is_compared_with_the_answer_before(
    monkeypatch: pytest.MonkeyPatch, engine: FakeEngine, url: str
) -> None:
    engine.play = several(["One.", "Two.", "Three.", "On."])
    lines = ["Hi", "/retry", "/good", "/retry", "/bad", "More"]
    code, shown = talk(monkeypatch, url, lines, adapter="formal")
    assert code == 0 and "/bad: the one before was better" in shown, shown
    pairs = [(said["kind"], said["chosen"], said["rejected"]) for said in feedback(url)]
    assert pairs == [("preference", "Two.", "One."), ("preference", "Two.", "Three.")]
    assert all(said["messages"] == ASKED for said in feedback(url))
    # The better one stays in the conversation.
    assert prompts(engine)[3].endswith("user\nHi\nassistant\nTwo.\nuser\nMore\nassistant\n")


def test_a_retry_that_says_the_same_is_no_comparison(
    monkeypatch: pytest.MonkeyPatch, engine: FakeEngine, url: str
) -> None:
    _, shown = talk(monkeypatch, url, ["/retry", "Hi", "/retry", "/good"], adapter="formal")
    assert "the same answer again; with --temperature 1" in shown
    (said,) = feedback(url)
    assert said["kind"] == "rating"


def test_an_answer_is_corrected_and_the_conversation_goes_on_from_it(
    monkeypatch: pytest.MonkeyPatch, engine: FakeEngine, url: str
) -> None:
    edited = iter(["Better, too.", ""])
    monkeypatch.setattr(Terminal, "edit", lambda _, text: next(edited))
    lines = ["Hi", "/edit Better.", "Hi", "/edit", "/edit", f"/edit {TEXT}"]
    _, shown = talk(monkeypatch, url, lines, adapter="formal")
    assert shown.count("nothing was changed") == 1
    first, second, third = feedback(url)
    assert (first["kind"], first["chosen"], first["rejected"]) == ("demonstration", "Better.", TEXT)
    assert (second["chosen"], second["rejected"]) == ("Better, too.", TEXT)
    assert "assistant\nBetter.\nuser\nHi" in prompts(engine)[1]
    # What the user wrote was served by nobody: it is sent as it is.
    assert (third["chosen"], third["rejected"]) == (TEXT, "Better, too.")
    assert third["completion_id"] is None


@pytest.fixture
def without_receipts(engine: FakeEngine) -> Iterator[str]:
    app = make_app(engine, ServerConfig(), store=StoreConfig(new_directory(), receipt_days=0))
    with live(app) as address:
        yield address


@pytest.mark.parametrize(
    ("lines", "kind"),
    [
        (["/good"], ""),
        (["/retry", "/good"], ""),
        (["/retry", "/bad"], ""),
        (["/bad"], "rating"),
        (["/edit Hello."], "demonstration"),
    ],
)
@pytest.mark.parametrize("cut", ["by Ctrl-C", "by max_tokens"])
def test_an_answer_without_an_end_teaches_nobody_to_end_there(
    monkeypatch: pytest.MonkeyPatch,
    engine: FakeEngine,
    without_receipts: str,
    cut: str,
    lines: list[str],
    kind: str,
) -> None:
    """The text alone would be learned as a whole answer."""
    engine.play = lambda r, i: Script(tokens=TOKENS[len(engine.requests) - 1 :])
    if cut == "by max_tokens":
        playing = engine.play
        engine.play = lambda r, i: replace(playing(r, i), finish=FinishReason.LENGTH)
    else:
        interrupt_answers(monkeypatch)
    _, shown = talk(monkeypatch, f"{without_receipts}/v1", ["Hi", *lines], adapter="formal")
    assert ("better than the answer before" in shown) == ("/retry" in lines), shown
    assert ("that answer has no end" in shown) == (not kind)
    given = httpx.get(f"{without_receipts}/v1/feedback").json()["data"]
    assert [each["kind"] for each in given] == ([kind] if kind else [])


def test_an_answer_without_a_receipt_is_sent_whole(
    monkeypatch: pytest.MonkeyPatch, without_receipts: str
) -> None:
    _, shown = talk(monkeypatch, f"{without_receipts}/v1", ["Hi", "/good"], adapter="formal")
    assert "stored for formal" in shown, shown
    (said,) = httpx.get(f"{without_receipts}/v1/feedback").json()["data"]
    assert said["completion_id"] is None and said["messages"] == ASKED and said["chosen"] == TEXT


def test_a_server_that_takes_no_feedback_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with live(odd_server(ONE_MODEL, event('{"content": "Fine."}'))) as url:
        code, shown = talk(monkeypatch, f"{url}/v1", ["Hi", "/good", "/adapter x", "/good", "Hi"])
    assert code == 0 and "say first which adapter" in shown
    assert shown.count("error: the server answered 404") == 1 and shown.count("Fine.") == 2
