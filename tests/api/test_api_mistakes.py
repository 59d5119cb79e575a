"""A client's or a person's mistake is told with its field and never a 500."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from fake_engine import FakeEngine
from serving import live, make_app
from tandem.config import AdapterConfig, ServerConfig, StoreConfig, resolve
from tandem.core.errors import InvalidRequest
from tandem.core.learning import SampleKind
from tandem.services.auth import ApiKeys
from tandem.services.jobs.data import BadLine, parse_examples

BOM = b"\xef\xbb\xbf"
CONFIG: dict[str, Any] = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q"]}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "allowed"
    (root / "broken").mkdir(parents=True)
    return root


@pytest.fixture
def http(root: Path) -> Iterator[httpx.Client]:
    app = make_app(
        FakeEngine(),
        adapters=AdapterConfig(roots=(str(root),)),
        store=StoreConfig(directory=str(root.parent / "state"), max_file_bytes=200_000),
    )
    with live(app) as url, httpx.Client(base_url=url, timeout=60) as http:
        yield http


def refused(answer: httpx.Response, status: int = 400) -> str:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["message"]
    return str(error["message"])


@pytest.mark.parametrize("path", ["x" * 300, "a/" * 2000, "../" * 40, "\ud800", "\0", "~", "."])
@pytest.mark.parametrize("what", ["load", "import"])
def test_paths_that_cannot_be(http: httpx.Client, path: str, what: str) -> None:
    body = json.dumps({"path": path})
    headers = {"content-type": "application/json"}
    answer = http.post(f"/v1/adapters/x/{what}", content=body, headers=headers)
    if path != ".":  # which is the root itself
        refused(answer)
    assert answer.status_code < 500


def test_errors_do_not_tell_where_the_server_keeps_things(http: httpx.Client, root: Path) -> None:
    for body in ({"path": "broken"}, {"path": str(root / "broken")}):
        for how in ("load", "import"):
            message = refused(http.post(f"/v1/adapters/x/{how}", json=body))
            assert message == "the adapter has no adapter_config.json"
    sent = upload(http, {"adapter_config.json": b"{", "adapter_model.safetensors": b""})
    message = refused(http.post("/v1/adapters/x/import", json={"file_id": sent}))
    assert "is not JSON" in message and str(root.parent) not in message


def upload(http: httpx.Client, files: dict[str, bytes]) -> str:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    form = {"file": ("a.zip", packed.getvalue())}
    sent = http.post("/v1/files", files=form, data={"purpose": "user_data"}).json()
    return str(sent["id"])


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"target_modules": "([a-z0-9_.]+)+!"}, "may never end"),
        ({"rank_pattern": {"(x+)+y": 2}}, "may never end"),
        ({"layers_pattern": "(x+)+y", "layers_to_transform": [0]}, "layers_pattern"),
        ({"rank_pattern": []}, "rank_pattern"),
        ({"target_modules": 5}, "target_modules"),
    ],
    ids=str,
)
def test_hostile_imports_are_refused_before_an_engine_sees_them(
    http: httpx.Client, root: Path, config: dict[str, Any], named: str
) -> None:
    raw = json.dumps({**CONFIG, **config}).encode()
    sent = upload(http, {"adapter_config.json": raw, "adapter_model.safetensors": b"w"})
    message = refused(http.post("/v1/adapters/x/import", json={"file_id": sent}))
    assert named in message
    assert http.get("/v1/adapters").json()["data"] == []
    assert not [*(root.parent / "state" / "adapters").glob("*/*")]


def test_a_zip_that_unpacks_to_too_much_is_refused(http: httpx.Client) -> None:
    sent = upload(
        http,
        {
            "adapter_config.json": json.dumps(CONFIG).encode(),
            "adapter_model.safetensors": bytes(50_000_000),
        },
    )
    assert "--max-file" in refused(http.post("/v1/adapters/x/import", json={"file_id": sent}))


def test_nesting_is_refused_by_name(http: httpx.Client) -> None:
    sent = upload(http, {"adapter_config.json": b"[" * 100_000, "adapter_model.safetensors": b"w"})
    answer = http.post("/v1/adapters/x/import", json={"file_id": sent})
    assert "nested too deeply" in refused(answer)


def test_a_byte_order_mark_is_read_over_where_a_person_wrote_the_file(
    tmp_path: Path, http: httpx.Client
) -> None:
    keys = tmp_path / "keys"
    keys.write_bytes(BOM + b"sk-one\n")
    assert ApiKeys.read([], str(keys)).caller_of("Bearer sk-one").admin
    keys = tmp_path / "keys.toml"
    keys.write_bytes(BOM + b'[[keys]]\nkey = "sk-two"\nname = "two"\n')
    assert ApiKeys.read([], str(keys)).caller_of(None, "sk-two").name == "two"
    config = tmp_path / "config.toml"
    config.write_bytes(BOM + b"[server]\nport = 1234\n")
    assert resolve(toml_path=config).server == ServerConfig(port=1234)
    config.write_bytes('[server]\nhost = "é"\n'.encode("latin-1"))
    with pytest.raises(InvalidRequest, match="cannot read the configuration file"):
        resolve(toml_path=config)
    sent = upload(
        http,
        {
            "adapter_config.json": BOM + json.dumps(CONFIG).encode(),
            "adapter_model.safetensors": b"w",
        },
    )
    answer = http.post("/v1/adapters/x/import", json={"file_id": sent})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (r"\ud83d", r"\ud83d is half of a character"),
        (r"Hi \ude00!", r"\ude00 is half of a character"),
        (r"\ud83dx", r"\ud83d is half of a character"),
    ],
)
def test_half_a_character_in_a_training_file_is_called_so(text: str, said: str) -> None:
    answer = f'{{"role": "assistant", "content": "{text}"}}'
    turns = f'[{{"role": "user", "content": "x"}}, {answer}]'
    with pytest.raises(BadLine) as bad:
        parse_examples(f'\n{{"messages": {turns}}}'.encode(), SampleKind.SFT, "a")
    assert str(bad.value).startswith(f"line 2: {said}")


def test_whole_characters_and_deep_nesting_in_a_training_file() -> None:
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "😀 \\ud83d"}]
    (sample,) = parse_examples(json.dumps({"messages": turns}).encode(), SampleKind.SFT, "a")
    assert sample.chosen == "😀 \\ud83d"
    deep = b'{"messages": [], "tools": ' + b"[" * 100_000
    with pytest.raises(BadLine, match="line 1"):
        parse_examples(deep, SampleKind.SFT, "a")
