"""/v1/files with the official client."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from fake_engine import FakeEngine
from serving import live, make_app
from tandem.config import ServerConfig, StoreConfig
from tandem.services.files import Files

MOST_BYTES = 100_000


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    store = StoreConfig(directory=str(tmp_path), max_file_bytes=MOST_BYTES)
    server = ServerConfig(api_keys=("sk-one", "sk-two"))
    with live(make_app(FakeEngine(), server, store=store)) as url:
        yield f"{url}/v1"


def client_of(url: str, key: str = "sk-one") -> openai.OpenAI:
    return openai.OpenAI(base_url=url, api_key=key, max_retries=0)


def test_the_life_of_a_file(url: str, tmp_path: Path) -> None:
    with client_of(url) as client:
        content = b'{"a": 1}\n\x00\xff' * 100
        made = client.files.create(file=("train é.jsonl", content), purpose="fine-tune")
        assert (made.filename, made.purpose, made.bytes) == (
            "train é.jsonl",
            "fine-tune",
            1000 + 100,
        )
        assert made.id.startswith("file-") and made.status == "processed"
        assert client.files.retrieve(made.id) == made
        assert client.files.content(made.id).read() == content
        assert len(list((tmp_path / "files").iterdir())) == 1
        assert client.files.delete(made.id).deleted
        assert list((tmp_path / "files").iterdir()) == []
        for call in (client.files.retrieve, client.files.content, client.files.delete):
            with pytest.raises(openai.NotFoundError):
                call(made.id)


def test_a_disk_that_does_not_take_a_file_is_told_as_one(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Files, "create", full)
    with client_of(url) as client, pytest.raises(openai.InternalServerError) as refused:
        client.files.create(file=("f", b"x"), purpose="batch")
    assert refused.value.status_code == 503 and refused.value.code == "store_unavailable"


def test_lists_page_through_everything(url: str) -> None:
    with client_of(url) as client:
        purposes = ("fine-tune", "batch", "batch", "fine-tune", "batch")
        ids = [client.files.create(file=("f", b"x"), purpose=p).id for p in purposes]
        assert [file.id for file in client.files.list(limit=2)] == ids[::-1]
        assert [file.id for file in client.files.list(limit=2, order="asc")] == ids
        batches = [ids[4], ids[2], ids[1]]
        assert [file.id for file in client.files.list(purpose="batch", limit=1)] == batches
        assert [file.id for file in client.files.list(after=ids[1])] == ids[:1]
        with pytest.raises(openai.BadRequestError):
            client.files.list(limit=0)
        with pytest.raises(openai.NotFoundError):
            client.files.list(after="file-unknown")


def test_keys_see_their_own_files_only(url: str) -> None:
    with client_of(url) as one, client_of(url, "sk-two") as two:
        made = one.files.create(file=("f", b"x"), purpose="batch")
        assert two.files.list().data == []
        for call in (two.files.retrieve, two.files.content, two.files.delete):
            with pytest.raises(openai.NotFoundError):
                call(made.id)
        assert one.files.content(made.id).read() == b"x"


def test_what_is_not_kept(url: str, tmp_path: Path) -> None:
    with client_of(url) as client:
        with pytest.raises(openai.BadRequestError, match="empty"):
            client.files.create(file=("f", b""), purpose="batch")
        with pytest.raises(openai.BadRequestError, match="purpose"):
            client.files.create(file=("f", b"x"), purpose="vision")
        for size in (MOST_BYTES + 1, MOST_BYTES + 200_000):
            with pytest.raises(openai.APIStatusError, match="more than 100000 bytes"):
                client.files.create(file=("f", b"x" * size), purpose="batch")
        assert (
            client.files.create(file=("f", b"x" * MOST_BYTES), purpose="batch").bytes == MOST_BYTES
        )
    assert len(list((tmp_path / "files").iterdir())) == 1


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"files": {"purpose": (None, "batch")}}, "file"),
        ({"files": {"file": b"x"}}, "purpose"),
        ({"files": {"file": b"x"}, "data": {"purpose": "batch", "expires_after": "1"}}, None),
        ({"content": b"x", "headers": {"content-type": "multipart/form-data"}}, None),
    ],
)
def test_forms_with_mistakes(url: str, form: dict[str, object], param: str | None) -> None:
    headers = {"authorization": "Bearer sk-one", **form.pop("headers", {})}  # type: ignore[dict-item]
    answer = httpx.post(f"{url}/files", headers=headers, **form)  # type: ignore[arg-type]
    assert answer.status_code == 400, answer.text
    assert param is None or answer.json()["error"]["param"] == param


def test_a_form_that_is_json_is_415(url: str) -> None:
    headers = {"authorization": "Bearer sk-one"}
    answer = httpx.post(f"{url}/files", headers=headers, json={"purpose": "batch"})
    assert answer.status_code == 415 and answer.json()["error"]["code"] == "unsupported_media_type"


def test_what_a_crash_left_is_removed(tmp_path: Path) -> None:
    store = StoreConfig(directory=str(tmp_path))
    with live(make_app(FakeEngine(), store=store)) as url, client_of(f"{url}/v1") as client:
        kept = client.files.create(file=("f", b"x"), purpose="batch")
    (tmp_path / "files" / "file-1.partial").write_bytes(b"half")
    (tmp_path / "files" / "file-2").write_bytes(b"without a row")
    with live(make_app(FakeEngine(), store=store)) as url, client_of(f"{url}/v1") as client:
        assert client.files.content(kept.id).read() == b"x"
    assert [path.name for path in (tmp_path / "files").iterdir()] == [kept.id]


def test_a_file_whose_bytes_are_gone_is_named(url: str, tmp_path: Path) -> None:
    with client_of(url) as client:
        made = client.files.create(file=("train.jsonl", b"x"), purpose="user_data")
        (tmp_path / "files" / made.id).unlink()
        with pytest.raises(openai.NotFoundError) as raised:
            client.files.content(made.id)
        assert made.id in str(raised.value) and "train.jsonl" in str(raised.value)
        assert str(tmp_path) not in str(raised.value)
        body = {"file_id": made.id}
        headers = {"authorization": "Bearer sk-one"}
        refused = httpx.post(f"{url}/adapters/formal/import", json=body, headers=headers)
        assert refused.status_code == 404 and made.id in refused.text
        assert client.files.delete(made.id).deleted
