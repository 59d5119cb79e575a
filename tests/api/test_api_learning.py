"""Routes about adapters that learn, with the openai client."""

from __future__ import annotations

import json
import zipfile
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from fake_engine import FakeEngine
from learning_world import CANARY
from patience import eventually
from serving import live
from tandem.build_app import build_app
from tandem.config import LearningConfig, Settings, StoreConfig
from tandem.core.events import TokenEvent
from tandem.core.request import Request
from tandem.core.version import AdapterVersion

ADAPTER_FILES = {
    "adapter_config.json": b'{"peft_type": "LORA", "r": 4, "lora_alpha": 8}',
    "adapter_model.safetensors": b"weights",
}


@contextmanager
def server(
    tmp_path: Path, engine: FakeEngine | None = None, **sections: Any
) -> Iterator[httpx.Client]:
    """A whole server over the scripted engine."""
    canary = tmp_path / "canary.jsonl"
    canary.write_text(CANARY)
    settings = Settings(
        store=StoreConfig(directory=str(tmp_path / "state")),
        learning=LearningConfig(
            canary_file=str(canary), batch_samples=4, steps_per_version=2, version_wait_s=0.5
        ),
        **sections,
    )
    app = build_app(settings, engine or FakeEngine())
    with live(app) as url, httpx.Client(base_url=f"{url}/v1") as http:
        yield http


def upload(client: openai.OpenAI, examples: list[dict[str, Any]]) -> str:
    raw = "\n".join(json.dumps(example) for example in examples).encode()
    return client.files.create(file=("train.jsonl", raw), purpose="fine-tune").id


def archive() -> bytes:
    packed = BytesIO()
    with zipfile.ZipFile(packed, "w") as target:
        for name, content in ADAPTER_FILES.items():
            target.writestr(f"my-adapter/{name}", content)
    return packed.getvalue()


def test_an_adapter_is_made_configured_and_deleted(tmp_path: Path) -> None:
    with server(tmp_path) as http:
        made = http.post("/adapters/formal", json={"settings": {"rank": 4, "gate": "manual"}})
        assert made.status_code == 200, made.text
        body = made.json()
        assert body["version"] == 0 and body["label"] == "base"
        assert body["learning"]["settings"]["rank"] == 4
        assert body["learning"]["settings"]["batch_samples"] == 4  # the server's
        assert body["learning"]["own_settings"] == {"rank": 4, "gate": "manual"}
        assert [model["id"] for model in http.get("/models").json()["data"]] == [
            "demo",
            "demo:formal",
        ]
        asked = {"model": "demo:formal", "messages": [{"role": "user", "content": "Hello"}]}
        answer = http.post("/chat/completions", json=asked)
        assert answer.status_code == 200 and answer.headers["x-tandem-adapter"] == "base"
        assert http.get("/adapters/formal/versions").json()["data"] == []
        assert http.delete("/adapters/formal").json()["deleted"] is True
        assert http.get("/adapters/formal").status_code == 404
        assert http.post("/chat/completions", json=asked).status_code == 404


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"speed": 1}, "speed"),
        ({"rank": 0}, "rank"),
        ({"gate": "maybe"}, "settings"),
        ({"reference": "version:x"}, "reference"),
        ({"learning_rate": -1.0}, "learning_rate"),
    ],
)
def test_wrong_settings_are_refused_by_name(
    tmp_path: Path, settings: dict[str, Any], param: str
) -> None:
    with server(tmp_path) as http:
        refused = http.post("/adapters/formal", json={"settings": settings})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == param


def test_unknown_adapters_and_versions_are_404(tmp_path: Path) -> None:
    with server(tmp_path) as http:
        http.post("/adapters/formal")
        for method, path in (
            ("GET", "/adapters/nobody"),
            ("GET", "/adapters/nobody/versions"),
            ("GET", "/adapters/nobody/events"),
            ("POST", "/adapters/nobody/rollback"),
            ("POST", "/adapters/formal/versions/7/publish"),
            ("GET", "/adapters/formal/versions/7/export"),
            ("DELETE", "/adapters/nobody"),
        ):
            assert http.request(method, path).status_code == 404, path
        refused = http.post("/adapters/formal/rollback")
        assert refused.status_code == 409 and refused.headers["x-should-retry"] == "false"


def damaged() -> dict[str, bytes]:
    """Archives that cannot be read, by what is wrong with them."""
    packed = BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target:
        for name in ADAPTER_FILES:
            target.writestr(name, b"weights" * 100)
    whole = packed.getvalue()
    content = whole.index(b"adapter_config.json") + len("adapter_config.json")
    directory = whole.index(b"PK\x01\x02")

    def changed(*places: tuple[int, int]) -> bytes:
        made = bytearray(whole)
        for place, value in places:
            made[place] = value
        return bytes(made)

    return {
        "corrupt": changed((content, 0xFF)),
        "encrypted": changed((6, 1), (directory + 8, 1)),
        "unknown compression": changed((8, 77), (directory + 10, 77)),
        "cut off": whole[:100],
        "no zip": b"text",
    }


@pytest.mark.parametrize("wrong", damaged())
def test_archives_that_cannot_be_read_are_refused(tmp_path: Path, wrong: str) -> None:
    with server(tmp_path) as http:
        client = openai.OpenAI(base_url=str(http.base_url), api_key="none", max_retries=0)
        file_id = client.files.create(file=("a.zip", damaged()[wrong]), purpose="user_data").id
        refused = http.post("/adapters/formal/import", json={"file_id": file_id})
        assert refused.status_code == 400, refused.text
        assert "cannot read the archive" in refused.json()["error"]["message"]


def test_numbers_that_no_version_or_event_has(tmp_path: Path) -> None:
    with server(tmp_path) as http:
        http.post("/adapters/formal")
        for method, path, status in (
            ("GET", "versions/abc/export", 400),
            ("POST", "versions/1.5/publish", 400),
            ("POST", "versions/-1/refuse", 400),
            ("GET", f"versions/{10**23}/export", 400),
            ("POST", f"versions/{2**62 - 1}/publish", 404),
            ("GET", f"events?before={10**23}", 400),
            ("GET", f"events?before={'9' * 5000}", 400),
        ):
            answer = http.request(method, f"/adapters/formal/{path}")
            assert answer.status_code == status, (path[:50], answer.text)
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        refused = http.get("/adapters/formal/versions/abc/export").json()["error"]
        assert refused["param"] == "version" and "'version': input should be" in refused["message"]
        rolled = http.post("/adapters/formal/rollback", json={"version": 10**23})
        assert rolled.status_code == 400 and rolled.json()["error"]["param"] == "version"


def test_no_adapter_is_called_as_the_model_itself(tmp_path: Path) -> None:
    with server(tmp_path) as http:
        refused = http.post("/adapters/base")
        assert refused.status_code == 400 and "means the model itself" in refused.text


def test_a_list_that_goes_on_after_nothing_is_404(tmp_path: Path) -> None:
    with server(tmp_path) as http:
        client = openai.OpenAI(base_url=str(http.base_url), api_key="none", max_retries=0)
        turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
        examples = [{"messages": turns} for _ in range(4)]
        job = client.fine_tuning.jobs.create(model="demo", training_file=upload(client, examples))
        path = f"/fine_tuning/jobs/{job.id}"
        eventually(lambda: http.get(path).json()["status"] == "succeeded")
        pages = {f"{path}/events": "ftevent-999999", f"{path}/checkpoints": "x"}
        for listed, unknown in {**pages, "/fine_tuning/jobs": "x"}.items():
            known = http.get(listed).json()["data"][-1]["id"]
            assert http.get(listed, params={"after": known}).json()["data"] == []
            missing = http.get(listed, params={"after": unknown})
            assert missing.status_code == 404, listed
            assert missing.json()["error"]["param"] == "after"
        wrong = {"after": f"ftevent-{10**23}"}
        assert http.get(f"{path}/events", params=wrong).status_code == 400


def test_import_export_pin_and_roll_back(tmp_path: Path) -> None:
    with server(tmp_path) as http:
        client = openai.OpenAI(base_url=str(http.base_url), api_key="none", max_retries=0)
        file_id = client.files.create(file=("a.zip", archive()), purpose="user_data").id
        first = http.post("/adapters/formal/import", json={"file_id": file_id})
        assert first.status_code == 200, first.text
        assert first.json()["version"] == 1 and first.json()["origin"] == "import"
        assert http.post("/adapters/formal/import", json={"file_id": file_id}).json()["current"]
        assert http.get("/adapters/formal").json()["label"] == "formal@2"
        exported = http.get("/adapters/formal/versions/2/export")
        with zipfile.ZipFile(BytesIO(exported.content)) as packed:
            assert {name: packed.read(name) for name in packed.namelist()} == ADAPTER_FILES
        eventually(lambda: not list((tmp_path / "state" / "exports").iterdir()))
        (tmp_path / "state/adapters/formal/1/adapter_config.json").rename(tmp_path / "aside")
        gone = http.get("/adapters/formal/versions/1/export")
        assert gone.status_code == 404 and gone.json()["error"]["param"] == "version"
        eventually(lambda: not list((tmp_path / "state" / "exports").iterdir()))
        (tmp_path / "aside").rename(tmp_path / "state/adapters/formal/1/adapter_config.json")
        back = http.post("/adapters/formal/rollback", json={"version": 1})
        assert back.json()["version"] == 1
        assert http.get("/adapters/formal").json()["label"] == "formal@1"
        pinned = http.post("/adapters/formal/versions/2/publish")
        assert pinned.status_code == 200
        assert http.get("/adapters/formal").json()["label"] == "formal@2"
        http.post("/adapters/formal/rollback", json={"version": 0})
        assert http.get("/adapters/formal").json()["label"] == "base"
        states = [
            (v["version"], v["state"], v["current"])
            for v in http.get("/adapters/formal/versions").json()["data"]
        ]
        assert states == [(2, "published", False), (1, "published", False)]
        events = http.get("/adapters/formal/events", params={"limit": 2}).json()
        assert events["has_more"] and "rolled back" in events["data"][0]["message"]
        rest = http.get(
            "/adapters/formal/events", params={"before": events["data"][1]["id"]}
        ).json()
        assert rest["data"] and not rest["has_more"]


class RollsBack(FakeEngine):
    """Its adapters go when a request for them comes."""

    async def generate(self, request: Request) -> AsyncGenerator[TokenEvent, None]:
        """As the fake does, too late."""
        if request.adapter in ("formal", "hand"):
            del self.adapters[request.adapter]
        async with aclosing(super().generate(request)) as events:
            async for event in events:
                yield event


def test_what_is_rolled_back_on_the_way_is_answered_by_the_base(tmp_path: Path) -> None:
    engine = RollsBack()
    with server(tmp_path, engine) as http:
        client = openai.OpenAI(base_url=str(http.base_url), api_key="none", max_retries=0)
        file_id = client.files.create(file=("a.zip", archive()), purpose="user_data").id
        assert http.post("/adapters/formal/import", json={"file_id": file_id}).status_code == 200
        engine.adapters["hand"] = AdapterVersion("hand", 1, "hash", "/hand")
        asked = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
        answer = http.post("/chat/completions", json={**asked, "model": "demo:formal"})
        assert answer.status_code == 200 and "formal" not in engine.adapters
        assert answer.json()["system_fingerprint"].endswith("-base")
        by_hand = http.post("/chat/completions", json={**asked, "model": "demo:hand"})
        assert by_hand.status_code == 404 and "hand" not in engine.adapters


@pytest.mark.parametrize(
    ("path", "body"),
    [("versions/1/publish", None), ("rollback", {"version": 1}), ("rollback", None)],
)
def test_a_version_whose_files_are_gone_or_changed_does_not_become_current(
    tmp_path: Path, path: str, body: dict[str, Any] | None
) -> None:
    with server(tmp_path) as http:
        client = openai.OpenAI(base_url=str(http.base_url), api_key="none", max_retries=0)
        file_id = client.files.create(file=("a.zip", archive()), purpose="user_data").id
        for _ in range(2):
            assert http.post("/adapters/formal/import", json={"file_id": file_id}).is_success
        config = tmp_path / "state/adapters/formal/1/adapter_config.json"
        kept = config.rename(tmp_path / "aside")

        def refused() -> None:
            answer = http.post(f"/adapters/formal/{path}", json=body)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["param"]) == (
                404,
                "file_gone",
                "version",
            )
            assert error["message"] == "the files of version 1 are gone or have changed"
            assert str(tmp_path) not in answer.text
            shown = http.get("/adapters/formal").json()
            assert (shown["version"], shown["label"]) == (2, "formal@2")

        refused()
        config.write_bytes(ADAPTER_FILES["adapter_config.json"].replace(b"8", b"16"))
        refused()
        kept.rename(config)
        assert http.post(f"/adapters/formal/{path}", json=body).is_success
        assert http.get("/adapters/formal").json()["label"] == "formal@1"


def test_a_broken_archive_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with server(tmp_path) as http:
        client = openai.OpenAI(base_url=str(http.base_url), api_key="none", max_retries=0)
        file_id = client.files.create(file=("a.zip", b"no zip"), purpose="user_data").id
        refused = http.post("/adapters/formal/import", json={"file_id": file_id})
        assert refused.status_code == 400 and "archive" in refused.json()["error"]["message"]
        assert http.get("/adapters").json()["data"] == []
        assert not list((tmp_path / "state" / "adapters").glob("*/*"))


def test_versions_survive_a_restart(tmp_path: Path) -> None:
    with server(tmp_path) as http:
        client = openai.OpenAI(base_url=str(http.base_url), api_key="none", max_retries=0)
        file_id = client.files.create(file=("a.zip", archive()), purpose="user_data").id
        http.post("/adapters/formal/import", json={"file_id": file_id})
    engine = FakeEngine()
    with server(tmp_path, engine) as http:
        assert http.get("/adapters/formal").json()["label"] == "formal@1"
        assert engine.adapters["formal"].number == 1
