"""What a key is told about itself, and about the engine's last iterations."""

from __future__ import annotations

import time
from pathlib import Path

import httpx
import pytest

from fake_engine import FakeEngine
from serving import live, make_app
from tandem.config import LearningConfig, SchedulingConfig, ServerConfig

KEYS = """
[[keys]]
key = "sk-app"
name = "the app"
serve = ["base", "formal*"]
train = ["formal*"]
ttft_slo = 0.5
[[keys]]
key = "sk-boss"
train = ["*"]
admin = true
"""


def test_a_key_is_told_what_it_may_do(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(KEYS)
    server = ServerConfig(api_key_file=str(file))
    slo = SchedulingConfig(ttft_slo=2.0, tpot_slo=0.25)
    with live(make_app(FakeEngine(), server, scheduling=slo)) as url:
        app, boss = (
            httpx.get(f"{url}/v1/key", headers={"x-api-key": key}).json()
            for key in ("sk-app", "sk-boss")
        )
    assert app == {
        "object": "key", "required": True, "name": "the app", "serve": ["base", "formal*"],
        "train": ["formal*"], "admin": False, "ttft_slo": 0.5, "tpot_slo": 0.25, "model": "demo",
        "max_model_len": 256, "learning": True, "auto_adapters": True,
    }  # fmt: skip
    assert (boss["name"], boss["serve"], boss["admin"], boss["ttft_slo"]) == (None, ["*"], True, 2)


def test_without_keys_everything_is_allowed_and_without_learning_nothing_is_taught() -> None:
    with live(make_app(FakeEngine())) as url:
        told = httpx.get(f"{url}/v1/key").json()
    assert not told["required"] and told["admin"] and told["train"] == ["*"]
    with live(make_app(FakeEngine(), learning=LearningConfig(enabled=False))) as url:
        told = httpx.get(f"{url}/v1/key").json()
    assert not told["learning"] and told["train"] == [] and not told["auto_adapters"]


def test_iterations_come_oldest_first_from_where_the_client_was() -> None:
    with live(make_app(FakeEngine())) as url, httpx.Client(base_url=url) as http:
        told = http.get("/v1/stats/iterations").json()
        assert [each["number"] for each in told["data"]] == [1, 2, 3, 4, 5, 6]
        assert told["iterations"] == 6
        last = told["data"][-1]
        assert last["rows"] == {"decode": 2, "prefill": 30, "offline": 4, "forward": 5}
        assert (last["seconds"], last["forward_s"], last["backward_s"]) == (0.5, 0.3, 0.1)
        assert (last["layers"], last["updates"]) == (6, 1)
        booted_s = time.time() - time.monotonic()
        assert last["started_at"] == pytest.approx(booted_s + 6.0, abs=1.0)
        query = {"after": 3, "limit": 2}
        later = http.get("/v1/stats/iterations", params=query).json()
        assert [each["number"] for each in later["data"]] == [5, 6]
        assert http.get("/v1/stats/iterations", params={"after": 6}).json()["data"] == []
        assert http.get("/v1/stats/iterations", params={"limit": 9999}).status_code == 400
