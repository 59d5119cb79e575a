"""A server with a scripted engine, and a client that gives it feedback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
from fastapi import FastAPI

from fake_engine import Script
from serving import demo_tokenizer, live
from tandem.config import LearningConfig

TURNS = [{"role": "user", "content": "How are you?"}]
ABOUT = {"messages": TURNS, "adapter": "formal"}
UNPUBLISHED = LearningConfig(held_out=0.0, batch_samples=1000, gate="manual")
"""What is learned waits for a decision: no version appears while a test looks."""


def play(_: object, index: int) -> Script:
    text = ("Fine, thank you.", "What?")[index % 2]
    return Script(tokens=demo_tokenizer().encode(text, add_special_tokens=False))


@contextmanager
def served(app: FastAPI) -> Iterator[httpx.Client]:
    with live(app) as url, httpx.Client(base_url=f"{url}/v1") as http:
        yield http


def send(http: httpx.Client, status: int = 202, **body: Any) -> Any:
    answer = http.post("/feedback", json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


def kinds(feedback: Any) -> list[tuple[str, float]]:
    return [(sample["kind"], sample["weight"]) for sample in feedback["samples"]]


def told(feedback: Any) -> Any:
    """Without what learning changes."""
    changing = {"state", "version", "uses", "loss"}
    samples = [{k: v for k, v in one.items() if k not in changing} for one in feedback["samples"]]
    return {**feedback, "samples": samples, "learning": None}


def complete(http: httpx.Client, **body: Any) -> Any:
    answer = http.post("/chat/completions", json={"model": "demo", "messages": TURNS, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()
