"""/v1/batches with the official client: every line once, whatever happens."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types import Batch

from fake_engine import FakeEngine, Script
from patience import PATIENCE_S, eventually
from serving import live, make_app
from tandem.config import BatchConfig, ServerConfig, StoreConfig
from tandem.core.ports import EngineState
from tandem.core.request import Request

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
ENDED = ("completed", "failed", "expired", "cancelled")


@contextmanager
def served(
    directory: Path, engine: FakeEngine | None = None, keys: tuple[str, ...] = (), **sections: Any
) -> Iterator[str]:
    app = make_app(
        engine or FakeEngine(),
        ServerConfig(api_keys=keys),
        store=StoreConfig(directory=str(directory)),
        **sections,
    )
    with live(app) as url:
        yield url


def client_of(url: str, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


def chat(number: int, **body: Any) -> dict[str, Any]:
    asked = {"model": "demo", "messages": [{"role": "user", "content": f"Number {number}?"}]}
    return {"custom_id": f"r{number}", "method": "POST", "url": CHAT, "body": asked | body}


def plain(number: int, **body: Any) -> dict[str, Any]:
    asked = {"model": "demo", "prompt": f"Number {number} is", "max_tokens": 3}
    return {"custom_id": f"r{number}", "method": "POST", "url": PLAIN, "body": asked | body}


def upload(client: openai.OpenAI, lines: list[Any], purpose: Any = "batch") -> str:
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    return client.files.create(file=("in.jsonl", text.encode()), purpose=purpose).id


def begin(client: openai.OpenAI, lines: list[Any], endpoint: Any = CHAT, **more: Any) -> Batch:
    return client.batches.create(
        input_file_id=upload(client, lines), endpoint=endpoint, completion_window="24h", **more
    )


def until(client: openai.OpenAI, batch: Batch, *statuses: str) -> Batch:
    deadline = time.monotonic() + PATIENCE_S
    while (batch := client.batches.retrieve(batch.id)).status not in statuses:
        assert time.monotonic() < deadline, batch
        time.sleep(0.02)
    return batch


def completed(client: openai.OpenAI, batch: Batch) -> int:
    """Lines of a batch under way that have their answer."""
    counts = until(client, batch, "in_progress").request_counts
    return counts.completed if counts else 0


def read(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    return [json.loads(line) for line in client.files.content(file_id).text.splitlines()]


def check_whole(client: openai.OpenAI, batch: Batch, ids: list[str]) -> None:
    """What holds of every batch that has ended."""
    output, errors = read(client, batch.output_file_id), read(client, batch.error_file_id)
    counts = batch.request_counts
    assert counts is not None
    assert (len(output), len(errors)) == (counts.completed, counts.failed)
    assert counts.total == counts.completed + counts.failed == len(ids)
    assert sorted(line["custom_id"] for line in output + errors) == sorted(ids)
    for line in output:
        assert line["response"]["status_code"] == 200 and line["error"] is None
    assert len({line["id"] for line in output + errors}) == len(ids)


def test_every_line_is_answered_once_and_as_its_route_answers(tmp_path: Path) -> None:
    with served(tmp_path) as url, client_of(url) as client:
        lines = [chat(number, seed=1, max_tokens=2 + number % 3) for number in range(30)]
        made = begin(client, lines, metadata={"for": "tests"})
        assert made.status == "validating" and made.object == "batch"
        batch = until(client, made, *ENDED)
        assert batch.status == "completed" and batch.metadata == {"for": "tests"}
        check_whole(client, batch, [line["custom_id"] for line in lines])
        assert batch.error_file_id is None and batch.errors is None
        stamps = (batch.in_progress_at, batch.finalizing_at, batch.completed_at)
        assert None not in stamps and (batch.expires_at or 0) == batch.created_at + 86_400
        output = read(client, batch.output_file_id)
        assert [line["custom_id"] for line in output] == [line["custom_id"] for line in lines]
        usage, used = batch.usage, [line["response"]["body"]["usage"] for line in output]
        assert usage is not None
        assert usage.input_tokens == sum(each["prompt_tokens"] for each in used)
        assert usage.output_tokens == sum(each["completion_tokens"] for each in used)
        alone = client.chat.completions.create(**lines[4]["body"]).model_dump()
        body = output[4]["response"]["body"]
        assert body["choices"][0]["message"]["content"] == alone["choices"][0]["message"]["content"]
        assert body["object"] == "chat.completion" and body["model"] == "demo"
        file = client.files.retrieve(batch.output_file_id or "")
        assert (file.purpose, file.filename) == ("batch_output", f"{batch.id}_output.jsonl")


def test_completions_and_scores_of_prompts(tmp_path: Path) -> None:
    with served(tmp_path) as url, client_of(url) as client:
        lines = [plain(1), plain(2, max_tokens=0, echo=True, logprobs=2), plain(3, prompt=[5, 6])]
        batch = until(client, begin(client, lines, PLAIN), *ENDED)
        check_whole(client, batch, ["r1", "r2", "r3"])
        scored = read(client, batch.output_file_id)[1]["response"]["body"]["choices"][0]
        assert scored["text"] == "Number 2 is" and len(scored["logprobs"]["tokens"]) > 1


def test_what_a_route_refuses_is_a_line_of_the_error_file(tmp_path: Path) -> None:
    with served(tmp_path) as url, client_of(url) as client:
        lines = [chat(1), chat(2, temperature=9), chat(3, max_tokens=9999), chat(4, stream=True)]
        batch = until(client, begin(client, lines), *ENDED)
        assert batch.status == "completed"
        check_whole(client, batch, ["r1", "r2", "r3", "r4"])
        errors = read(client, batch.error_file_id)
        for line, param in zip(errors, ("temperature", "max_tokens", "stream"), strict=True):
            assert line["error"] is None and line["response"]["status_code"] == 400
            assert line["response"]["body"]["error"]["param"] == param
        only_bad = until(client, begin(client, lines[1:]), *ENDED)
        assert only_bad.status == "completed" and only_bad.output_file_id is None
        check_whole(client, only_bad, ["r2", "r3", "r4"])


@pytest.mark.parametrize(
    ("lines", "code", "line", "param"),
    [
        ([chat(1), "{"], "invalid_json_line", 2, None),
        ([chat(1), "[]"], "invalid_json_line", 2, None),
        ([chat(1), chat(2), chat(1)], "duplicate_custom_id", 3, "custom_id"),
        ([chat(1), plain(2)], "url_mismatch", 2, "url"),
        ([chat(1), chat(2, model="other")], "model_mismatch", 2, "body.model"),
        ([chat(1, model="other")], "model_not_found", 1, "body.model"),
        (["\n\n"], "empty_file", None, None),
        ([chat(1) | {"custom_id": 5}], "missing_required_parameter", 1, "custom_id"),
        ([chat(1) | {"method": "GET"}], "invalid_method", 1, "method"),
        ([chat(1) | {"body": None}], "missing_required_parameter", 1, "body"),
        ([chat(number) for number in range(5)], "too_many_tasks", None, None),
    ],
)
def test_a_file_that_is_not_well_formed(
    tmp_path: Path, lines: list[Any], code: str, line: int | None, param: str | None
) -> None:
    config = BatchConfig(max_requests=4)
    with served(tmp_path, batches=config) as url, client_of(url) as client:
        batch = until(client, begin(client, lines), *ENDED)
        assert batch.status == "failed" and batch.failed_at is not None
        assert batch.errors is not None and batch.errors.data is not None
        [first, *_] = batch.errors.data
        assert (first.code, first.line, first.param) == (code, line, param)
        assert first.message
        assert batch.output_file_id is batch.error_file_id is None


def test_marks_ends_of_lines_and_blank_lines_of_editors(tmp_path: Path) -> None:
    with served(tmp_path) as url, client_of(url) as client:
        text = "\ufeff" + "\r\n".join(json.dumps(chat(number)) for number in (1, 2)) + "\r\n\r\n"
        file = client.files.create(file=("in.jsonl", text.encode()), purpose="batch")
        made = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        check_whole(client, until(client, made, *ENDED), ["r1", "r2"])


def test_what_cannot_be_is_refused_at_once(tmp_path: Path) -> None:
    small = BatchConfig(max_file_bytes=300)
    with served(tmp_path, batches=small) as url, client_of(url) as client:
        good = upload(client, [chat(1)])
        for changes, param in (
            ({"input_file_id": upload(client, [chat(1)], "user_data")}, "input_file_id"),
            ({"input_file_id": upload(client, [chat(n) for n in range(5)])}, "input_file_id"),
            ({"endpoint": "/v1/embeddings"}, "endpoint"),
            ({"completion_window": "soon"}, "completion_window"),
            ({"completion_window": "90d"}, "completion_window"),
            ({"metadata": {"a": 5}}, "metadata.a"),
            ({"extra_body": {"adapter_version": "old"}}, "adapter_version"),
            ({"extra_body": {"unknown": 1}}, "unknown"),
        ):
            asked: dict[str, Any] = {
                "input_file_id": good, "endpoint": CHAT, "completion_window": "24h",
            }  # fmt: skip
            with pytest.raises(openai.BadRequestError) as caught:
                client.batches.create(**asked | changes)
            assert caught.value.param == param
        with pytest.raises(openai.NotFoundError):
            client.batches.create(input_file_id="file-no", endpoint=CHAT, completion_window="24h")
        assert client.batches.list().data == []


def test_cancelling_keeps_what_is_done(tmp_path: Path) -> None:
    asked = count()

    def first_ones(request: Request, index: int) -> Script:
        return Script(delay_s=0.05 if next(asked) < 20 else 3600.0)

    with served(tmp_path, FakeEngine(first_ones)) as url, client_of(url) as client:
        lines = [chat(number) for number in range(400)]
        made = begin(client, lines)
        eventually(lambda: completed(client, made))
        assert client.batches.cancel(made.id).status in ("cancelling", "cancelled")
        batch = until(client, made, *ENDED)
        assert batch.status == "cancelled" and batch.cancelling_at and batch.cancelled_at
        check_whole(client, batch, [line["custom_id"] for line in lines])
        assert batch.request_counts is not None and batch.request_counts.completed > 0
        errors = read(client, batch.error_file_id)
        assert errors and {line["error"]["code"] for line in errors} == {"batch_cancelled"}
        assert all(line["response"] is None for line in errors)
        with pytest.raises(openai.BadRequestError, match="cannot be cancelled"):
            client.batches.cancel(made.id)


def test_a_new_start_goes_on_where_the_last_one_stopped(tmp_path: Path) -> None:
    asked: list[tuple[int, ...]] = []

    def noted(request: Request, index: int) -> Script:
        asked.append(request.prompt)
        return Script(delay_s=3600.0 if first is None and len(asked) > 40 else 0.0)

    first = None
    lines = [chat(number) for number in range(300)]
    with served(tmp_path, FakeEngine(noted)) as url, client_of(url) as client:
        made = begin(client, lines)
        eventually(lambda: completed(client, made) >= 20)
        done = completed(client, made)
    first = len(asked)
    with served(tmp_path, FakeEngine(noted)) as url, client_of(url) as client:
        batch = until(client, made, *ENDED)
        check_whole(client, batch, [line["custom_id"] for line in lines])
        # What was committed before is not answered again.
        assert len(asked) - first <= len(lines) - done


def test_lists_page_through_everything_and_keys_are_apart(tmp_path: Path) -> None:
    with served(tmp_path, keys=("sk-one", "sk-two")) as url, client_of(url, "sk-one") as client:
        ids = [begin(client, [chat(number)]).id for number in range(5)]
        assert [batch.id for batch in client.batches.list(limit=2)] == ids[::-1]
        with client_of(url, "sk-two") as other:
            assert other.batches.list().data == []
            for call in (other.batches.retrieve, other.batches.cancel):
                with pytest.raises(openai.NotFoundError):
                    call(ids[0])
            with pytest.raises(openai.NotFoundError):
                other.batches.create(
                    input_file_id=until(client, client.batches.retrieve(ids[0]), *ENDED)
                    .input_file_id,
                    endpoint=CHAT, completion_window="24h",
                )  # fmt: skip
            with pytest.raises(openai.NotFoundError):
                other.batches.list(after=ids[0])


def test_the_input_file_stays_while_it_is_read(tmp_path: Path) -> None:
    engine = FakeEngine(lambda request, index: Script(delay_s=3600.0))
    with served(tmp_path, engine) as url, client_of(url) as client:
        batch = begin(client, [chat(number) for number in range(300)])
        with pytest.raises(openai.ConflictError, match="is read by batch_"):
            client.files.delete(batch.input_file_id)
        client.batches.cancel(batch.id)
        until(client, batch, *ENDED)
        assert client.files.delete(batch.input_file_id).deleted


def test_output_files_are_removed_after_a_while(tmp_path: Path) -> None:
    with served(tmp_path) as url, client_of(url) as client:
        after: Any = {"anchor": "created_at", "seconds": 3600}
        batch = until(client, begin(client, [chat(1)], output_expires_after=after), *ENDED)
        file = client.files.retrieve(batch.output_file_id or "")
        assert file.expires_at == file.created_at + 3600


def test_flex_is_the_class_that_waits(tmp_path: Path) -> None:
    engine = FakeEngine()
    with served(tmp_path, engine) as url, client_of(url) as client:
        for tier, work_class in (("flex", "offline"), ("default", "online"), ("auto", "online")):
            body: Any = chat(1)["body"] | {"service_tier": tier}
            answered = client.chat.completions.create(**body)
            assert engine.requests[-1].work_class.value == work_class
            assert answered.service_tier == ("flex" if tier == "flex" else "default")
        assert client.chat.completions.create(**chat(1)["body"]).service_tier is None
        answer = httpx.post(f"{url}{CHAT}", json=chat(1)["body"] | {"service_tier": "priority"})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "service_tier"
        until(client, begin(client, [chat(2)]), *ENDED)
        assert engine.requests[-1].work_class.value == "offline"


def test_an_engine_that_dies_costs_no_line(tmp_path: Path) -> None:
    died: list[int] = []

    def dies_once(request: Request, index: int) -> Script:
        if len(died) < 1:
            died.append(1)
            return Script(dies_after=1)
        return Script()

    engine = FakeEngine(dies_once)
    with served(tmp_path, engine) as url, client_of(url) as client:
        made = begin(client, [chat(number) for number in range(10)])
        eventually(lambda: engine.state is EngineState.DEAD)
        engine.state = EngineState.READY
        check_whole(client, until(client, made, *ENDED), [f"r{n}" for n in range(10)])
