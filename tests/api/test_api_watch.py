"""Roll back by itself, over HTTP: the next answer names the version before."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from feedback_client import served

from fake_engine import FakeEngine, Script
from learning_world import CANARY
from patience import eventually
from serving import demo_tokenizer, make_app
from tandem.config import LearningConfig
from tandem.core.request import Request

SOUND = "I am very well, thank you for asking me today."
MMM = "M" + "m" * 60
NUMBERS = itertools.count()


@contextmanager
def taught(
    tmp_path: Path, *broken: str, delay_s: float = 0.0, **learning: Any
) -> Iterator[httpx.Client]:
    """A server whose adapter `formal` has two versions; those in `broken` answer "Mmmm", a token
    every `delay_s`."""
    canary = tmp_path / "canary.jsonl"
    canary.write_text(CANARY)

    def play(request: Request, index: int) -> Script:
        version = engine.adapters.get(request.adapter or "")
        breaks = version is not None and version.label in broken
        tokens = demo_tokenizer().encode(MMM if breaks else SOUND, add_special_tokens=False)
        return Script(tokens=tokens, delay_s=delay_s if breaks else 0.0)

    engine = FakeEngine(play=play)
    config = LearningConfig(
        canary_file=str(canary),
        batch_samples=4,
        steps_per_version=1,
        replay=0.0,
        version_wait_s=1.0,
        **learning,
    )
    with served(make_app(engine, learning=config)) as http:
        for version in ("formal@1", "formal@2"):
            for number in range(4):
                turns = [{"role": "user", "content": f"{version}: what is {number} plus 1?"}]
                pair = {"chosen": f"It is {number + 1}.", "rejected": f"{number + 1}"}
                body = {"messages": turns, "adapter": "formal", "preference": pair}
                assert http.post("/feedback", json=body).status_code == 202
            eventually(lambda version=version: answer(http)[1] == version)  # type: ignore[misc]
        yield http


def asked() -> list[dict[str, str]]:
    """A prompt that was not sent before: of one prompt the last answer counts."""
    return [{"role": "user", "content": f"How are you, {next(NUMBERS)}?"}]


def answer(http: httpx.Client) -> tuple[str, str]:
    """The id of an answer, and who wrote it."""
    found = http.post("/chat/completions", json={"model": "demo:formal", "messages": asked()})
    assert found.status_code == 200, found.text
    return found.json()["id"], found.headers["x-tandem-adapter"]


def newest(http: httpx.Client) -> str:
    return str(http.get("/adapters/formal/events").json()["data"][0]["message"])


def test_after_broken_answers_the_version_before_answers(tmp_path: Path) -> None:
    with taught(tmp_path, "formal@2") as http:
        for _ in range(5):
            answer(http)
        eventually(lambda: answer(http)[1] == "formal@1")
        assert "version 2 rolled back by itself to 1: " in newest(http)
        [second, first] = http.get("/adapters/formal/versions").json()["data"]
        assert first["current"] and first["watched"] and not second["watched"]
        assert "answers were broken" in second["reason"]
        http.post("/adapters/formal/versions/2/publish")
        assert [answer(http)[1] for _ in range(8)] == ["formal@2"] * 8


def test_after_thumbs_down_the_version_before_answers(tmp_path: Path) -> None:
    with taught(tmp_path) as http:
        for _ in range(8):
            about, label = answer(http)
            assert label == "formal@2"
            body = {"completion_id": about, "rating": False}
            assert http.post("/feedback", json=body).status_code == 202
        eventually(lambda: answer(http)[1] == "formal@1")
        assert "0 of its first 8 ratings were thumbs up" in newest(http)


def test_without_the_setting_nothing_is_rolled_back(tmp_path: Path) -> None:
    with taught(tmp_path, "formal@2", auto_rollback=False) as http:
        assert {answer(http)[1] for _ in range(12)} == {"formal@2"}


def test_an_answer_that_its_reader_gives_up_is_read_too(tmp_path: Path) -> None:
    with taught(tmp_path, "formal@2", delay_s=0.05) as http:
        for _ in range(5):
            body = {"model": "demo:formal", "messages": asked(), "stream": True}
            with http.stream("POST", "/chat/completions", json=body) as stream:
                lines = stream.iter_lines()
                for _ in range(36):  # two a token; the answer goes on
                    next(lines)
        eventually(lambda: "version 2 rolled back by itself to 1: " in newest(http))
