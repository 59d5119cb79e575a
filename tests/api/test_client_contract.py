"""What clients of OpenAI's and vLLM's servers rely on beyond the text of an answer."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from fake_engine import FakeEngine, Script
from patience import eventually
from serving import demo_tokenizer, live, make_app, new_directory
from tandem.api import connection
from tandem.config import SchedulingConfig, ServerConfig, StoreConfig
from tandem.core.request import Request
from tandem.core.version import AdapterVersion
from tandem.services.files import Files
from tandem.store import Store

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TOKENS = demo_tokenizer().encode("Hello, how are you", add_special_tokens=False)
TURNS = [{"role": "user", "content": "Hi"}]
BODY: dict[str, Any] = {"model": "demo", "messages": TURNS}
PLAIN: dict[str, Any] = {"model": "demo", "prompt": "Hi"}


def play(request: Request, index: int) -> Script:
    return Script(tokens=TOKENS)


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine(play=play, adapters={"formal": AdapterVersion("formal", 1, "hash", "x")})


@pytest.fixture(scope="module")
def http(engine: FakeEngine) -> Iterator[httpx.Client]:
    with live(make_app(engine)) as url, httpx.Client(base_url=url) as http:
        yield http


def events(text: str) -> list[Any]:
    lines = [line for line in text.split("\n\n") if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def streamed(http: httpx.Client, route: str, body: dict[str, Any]) -> list[Any]:
    answer = http.post(route, json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.text.endswith("data: [DONE]\n\n")
    return events(answer.text)


@pytest.mark.parametrize("fields", [{}, {"logprobs": 1}, {"stop": " you"}, {"max_tokens": 2}])
def test_a_choice_ends_with_a_chunk_that_adds_nothing(
    http: httpx.Client, fields: dict[str, Any]
) -> None:
    plain = streamed(http, COMPLETIONS, {**PLAIN, "n": 2, **fields})
    if "logprobs" in fields:
        fields = {"logprobs": True}
    chat = streamed(http, CHAT, {**BODY, "n": 2, **fields})
    for chunks in (chat, plain):
        for index in range(2):
            mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
            assert {choice["finish_reason"] for choice in mine[:-1]} == {None}
            last = mine[-1]
            assert last["finish_reason"] == ("length" if "max_tokens" in fields else "stop")
            assert last["logprobs"] is None
            assert last.get("delta", {}) == {} and last.get("text", "") == ""
            assert last["stop_reason"] == fields.get("stop")


def test_usage_can_come_with_every_chunk(http: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    for route, body in ((CHAT, BODY), (COMPLETIONS, PLAIN)):
        chunks = streamed(http, route, {**body, "stream_options": options})
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts) and counts[0] == 1
        assert counts[-1] == len(TOKENS) + 1 and chunks[-1]["choices"] == []
        assert all(chunk["usage"]["prompt_tokens"] > 0 for chunk in chunks)
        alone = streamed(http, route, {**body, "stream_options": {"continuous_usage_stats": True}})
        assert not any("usage" in chunk for chunk in alone)


def test_without_alternatives_the_token_itself_is_listed(http: httpx.Client) -> None:
    answer = http.post(COMPLETIONS, json={**PLAIN, "logprobs": 0}).json()
    logprobs = answer["choices"][0]["logprobs"]
    for token, value, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert top == {token: value}


def test_token_ids_are_returned_on_request(http: httpx.Client, engine: FakeEngine) -> None:
    whole, wanted = [*TOKENS, 2], {"return_token_ids": True}
    answer = http.post(CHAT, json={**BODY, **wanted, "n": 2}).json()
    prompt = list(engine.requests[-1].prompt)
    assert answer["prompt_token_ids"] == prompt
    assert [choice["token_ids"] for choice in answer["choices"]] == [whole, whole]
    answer = http.post(
        COMPLETIONS, json={**PLAIN, **wanted, "n": 2, "prompt": [[5], [6, 7]]}
    ).json()
    prompts = [choice["prompt_token_ids"] for choice in answer["choices"]]
    assert prompts == [[5], [5], [6, 7], [6, 7]]
    for route, body in ((CHAT, BODY), (COMPLETIONS, PLAIN)):
        chunks = streamed(http, route, {**body, **wanted, "n": 2})
        choices = [chunk["choices"][0] for chunk in chunks]
        mine = [choice for choice in choices if choice["index"] == 1]
        assert [one for choice in mine for one in choice.get("token_ids", [])] == whole
        prompt = list(engine.requests[-1].prompt)
        told = [chunk.get("prompt_token_ids") for chunk in chunks]
        told_by_choices = [choice["prompt_token_ids"] for choice in choices
                           if "prompt_token_ids" in choice]  # fmt: skip
        if route == CHAT:
            assert told == [prompt] + [None] * (len(chunks) - 1) and not told_by_choices
        else:
            assert told == [None] * len(chunks) and told_by_choices == [prompt, prompt]
        assert "token_ids" not in http.post(route, json=body).text


def test_stop_reason_says_what_stopped(http: httpx.Client) -> None:
    for fields, reason in (
        ({"stop": [" are", "x"]}, " are"),
        ({"stop_token_ids": [2]}, 2),
        ({}, None),
    ):
        choice = http.post(CHAT, json={**BODY, **fields}).json()["choices"][0]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", reason)


def test_an_answer_can_continue_the_last_message(http: httpx.Client, engine: FakeEngine) -> None:
    turns = [*TURNS, {"role": "assistant", "content": "Once upon"}]
    fields = {"messages": turns, "continue_final_message": True, "add_generation_prompt": False}
    assert http.post(CHAT, json={**BODY, **fields}).status_code == 200
    rendered = engine.requests[-1].prompt
    assert demo_tokenizer().decode(rendered).endswith("assistant\nOnce upon")
    assert http.post("/tokenize", json=fields).json()["tokens"] == list(rendered)
    fields["add_generation_prompt"] = True
    refused = http.post(CHAT, json={**BODY, **fields})
    assert refused.json()["error"]["param"] == "continue_final_message"
    closed = {"messages": turns, "add_generation_prompt": False}
    assert http.post(CHAT, json={**BODY, **closed}).status_code == 200
    assert not demo_tokenizer().decode(engine.requests[-1].prompt).endswith("assistant\n")


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning_effort": "none"},
        {"parallel_tool_calls": False},
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        {"skip_special_tokens": True, "spaces_between_special_tokens": True},
        {"use_beam_search": False, "length_penalty": 1.0, "include_stop_str_in_output": False},
        {"priority": 0},
    ],
    ids=str,
)
def test_what_changes_nothing_is_accepted(http: httpx.Client, fields: dict[str, Any]) -> None:
    assert http.post(CHAT, json={**BODY, **fields}).status_code == 200


def test_priority_is_honoured_or_refused() -> None:
    for policy, status in (("unified", 400), ("fcfs", 400), ("mace", 400), ("priority", 200)):
        engine = FakeEngine(play=play)
        scheduling = SchedulingConfig(policy=policy)
        with live(make_app(engine, scheduling=scheduling)) as url:
            answer = httpx.post(f"{url}{CHAT}", json={**BODY, "priority": -5})
            assert answer.status_code == status, policy
            if status == 400:
                assert answer.json()["error"]["param"] == "priority"
            else:
                assert engine.requests[-1].priority == -5


def test_a_tuned_model_can_be_deleted_as_openais_can(http: httpx.Client) -> None:
    with openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0) as client:
        http.post("/v1/adapters/mine", json={"settings": {}}).raise_for_status()
        assert "demo:mine" in [model.id for model in client.models.list()]
        deleted = client.models.delete("demo:mine")
        assert (deleted.id, deleted.deleted) == ("demo:mine", True)
        with pytest.raises(openai.NotFoundError):
            client.models.delete("demo:mine")
        with pytest.raises(openai.BadRequestError, match="base model cannot be deleted"):
            client.models.delete("demo")
    keyed = ServerConfig(api_keys=("sk-a",))
    with live(make_app(FakeEngine(), keyed)) as url:
        assert httpx.delete(f"{url}/v1/models/demo:x").status_code == 401


def test_the_tokenizer_describes_itself(http: httpx.Client) -> None:
    told = http.get("/tokenizer_info").json()
    assert told["eos_token"] and told["model_max_length"] == 256
    assert told["chat_template"] and told["vocab_size"] == demo_tokenizer().size


def test_an_empty_place_to_continue_at_is_refused(http: httpx.Client) -> None:
    for path in ("/v1/files", "/v1/feedback", "/v1/fine_tuning/jobs"):
        error = http.get(path, params={"after": ""}).json()["error"]
        assert error["param"] == "after", path


class Turnstile(threading.Event):
    """A gate that each `set` opens for one token."""

    def __init__(self) -> None:
        super().__init__()
        self._permits = threading.Semaphore(0)

    def set(self) -> None:
        """Let one more through."""
        self._permits.release()

    def is_set(self) -> bool:
        """Whether this one may pass."""
        return self._permits.acquire(blocking=False)


def read_until(lines: Iterator[str], start: str) -> list[str]:
    """The lines that say something, up to one that begins with `start`."""
    found: list[str] = []
    while not (found and found[-1].startswith(start)):
        assert len(found) < 1000, "it never comes"
        found += filter(None, [next(lines)])
    return found


def test_a_stream_that_waits_sends_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "QUIET_S", 0.05)
    tokens = Turnstile()
    slow = FakeEngine(play=lambda r, i: Script(tokens=TOKENS[:2], gate=tokens))
    with live(make_app(slow)) as url, httpx.Client(base_url=url) as http:
        with http.stream("POST", CHAT, json={**BODY, "stream": True}) as answer:
            lines = answer.iter_lines()
            for _ in range(2):
                assert read_until(lines, ":") == [": waiting"]
            tokens.set()
            *_, first = read_until(lines, "data")
            said = [first, *read_until(lines, ":")]
            tokens.set()
            tokens.set()
            said += read_until(lines, "data: [DONE]")
        chunks = events("\n\n".join(said))
        assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "Hello,"
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            stream = client.chat.completions.create(model="demo", messages=TURNS, stream=True)  # type: ignore[call-overload]
            for _ in range(3):
                tokens.set()
            assert len(list(stream)) >= 3
    monkeypatch.setattr(connection, "QUIET_S", 60.0)
    quick = FakeEngine(play=play)
    with live(make_app(quick)) as url:
        answer = httpx.post(f"{url}{CHAT}", json={**BODY, "stream": True})
        assert ": waiting" not in answer.text and answer.headers["x-tandem-adapter"] == "base"


def test_a_failure_after_a_comment_is_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "QUIET_S", 0.05)
    death = threading.Event()
    dying = FakeEngine(play=lambda r, i: Script(gate=death, dies_after=0))
    with (
        live(make_app(dying)) as url,
        httpx.stream("POST", f"{url}{CHAT}", json={**BODY, "stream": True}) as answer,
    ):
        assert answer.status_code == 200
        lines = answer.iter_lines()
        assert read_until(lines, ":") == [": waiting"]
        death.set()
        (error,) = events("\n\n".join(read_until(lines, "data: [DONE]")))
        assert error["error"]["code"] == "engine_unavailable"


def test_leaving_while_a_stream_waits_ends_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "QUIET_S", 0.05)
    engine = FakeEngine(play=lambda r, i: Script(gate=threading.Event()))
    with live(make_app(engine)) as url:
        with (
            httpx.Client(base_url=url) as http,
            http.stream("POST", CHAT, json={**BODY, "stream": True}) as answer,
        ):
            lines = answer.iter_lines()  # kept: the connection is closed when it goes
            next(lines)
            eventually(lambda: engine.running)
        eventually(lambda: engine.aborted)
        assert len(engine.aborted) == 1 and not engine.running


def test_files_expire(http: httpx.Client) -> None:
    with openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0) as client:
        made = client.files.create(
            file=("f", b"x"),
            purpose="batch",
            expires_after={"anchor": "created_at", "seconds": 3600},
        )
        assert made.expires_at == made.created_at + 3600
        assert client.files.retrieve(made.id).expires_at == made.expires_at
        assert client.files.create(file=("f", b"x"), purpose="batch").expires_at is None
        for wrong in (
            {"anchor": "created_at", "seconds": 60},
            {"anchor": "created_at", "seconds": 10**9},
            {"anchor": "now", "seconds": 3600},
        ):
            with pytest.raises(openai.BadRequestError, match="expires_after"):
                client.files.create(file=("f", b"x"), purpose="batch", expires_after=wrong)  # type: ignore[arg-type]


async def test_what_has_expired_is_removed() -> None:
    clock, ran = [1000.0], [50.0]
    config = StoreConfig(directory=new_directory())
    store = Store.open(config.directory, config.url)

    async def parts() -> Any:
        yield b"x"

    files = Files(store, store.directory / "files", 100, lambda: clock[0], lambda: ran[0])
    await files.start()
    short = await files.create("a", "batch", "t", parts(), 3600.0)
    long = await files.create("b", "batch", "t", parts())
    assert await files.sweep() == 0
    clock[0] += 3600.0
    assert await files.sweep() == 0, "the clock alone is not believed"
    ran[0] += 3600.0
    assert await files.sweep() == 1
    assert [file.file_id for file in await files.listed("t")] == [long.file_id]
    assert not (store.directory / "files" / short.file_id).exists()
    await files.stop()
    store.close()


def test_bytes_that_are_gone_are_404(tmp_path: Any) -> None:
    with live(make_app(FakeEngine(), store=StoreConfig(directory=str(tmp_path)))) as url:
        made = httpx.post(
            f"{url}/v1/files", files={"file": b"x"}, data={"purpose": "user_data"}
        ).json()
        for path in (tmp_path / "files").iterdir():
            path.unlink()
        for answer in (
            httpx.get(f"{url}/v1/files/{made['id']}/content"),
            httpx.post(f"{url}/v1/adapters/a/import", json={"file_id": made["id"]}),
        ):
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (404, "file_gone")
            assert made["id"] in error["message"] and str(tmp_path) not in error["message"]
        assert httpx.delete(f"{url}/v1/files/{made['id']}").status_code == 200
