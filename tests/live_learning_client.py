"""A user of a live server that learns: asks, scores answers, sends feedback, waits."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import httpx
import openai

from engine_serving import live_engine
from tandem.config import resolve


class Said(NamedTuple):
    """A greedy answer, the version that wrote it, and OpenAI's fingerprint."""

    text: str
    version: str
    fingerprint: str


class Pair(NamedTuple):
    """A preference as a user has it."""

    question: str
    chosen: str
    rejected: str


class User:
    """Talks to the server at `url` with the official client, and with httpx where it ends."""

    def __init__(self, http: httpx.Client, client: openai.OpenAI) -> None:
        self.http = http
        self.client = client

    def call(self, method: str, path: str, status: int = 200, **parts: Any) -> Any:
        response = self.http.request(method, path, **parts)
        assert response.status_code == status, response.text
        return response.json()

    def greedy(self, model: str, question: str) -> Said:
        raw = self.client.chat.completions.with_raw_response.create(
            model=model,
            messages=[{"role": "user", "content": question}],
            temperature=0,
            max_tokens=80,
        )
        answer = raw.parse()
        text = answer.choices[0].message.content
        assert text is not None and answer.system_fingerprint is not None
        return Said(text, raw.headers["x-tandem-adapter"], answer.system_fingerprint)

    def asked(self, model: str, questions: Sequence[str]) -> list[Said]:
        return [self.greedy(model, question) for question in questions]

    def tokens(self, **what: Any) -> list[int]:
        found: list[int] = self.call("POST", "/tokenize", json=what)["tokens"]
        return found

    def logprobs(self, model: str, tokens: Sequence[int]) -> list[float]:
        """Of each token but the first, given those before it."""
        body = {"model": model, "prompt": tokens, "max_tokens": 0, "echo": True, "logprobs": 1}
        answer = self.call("POST", "/v1/completions", json=body)["choices"][0]
        return list(answer["logprobs"]["token_logprobs"][1:])

    def margin(self, model: str, pair: Pair) -> float:
        """How much likelier the preferred answer is, in nats."""
        prompt = self.tokens(messages=[{"role": "user", "content": pair.question}])
        sums = []
        for text in (pair.chosen, pair.rejected):
            answer = self.tokens(prompt=f"{text}<|im_end|>")
            sums.append(math.fsum(self.logprobs(model, [*prompt, *answer])[-len(answer) :]))
        return sums[0] - sums[1]

    def win_rate(self, model: str, pairs: Sequence[Pair]) -> float:
        """MACE's (3.1): the share of pairs whose preferred answer is the likelier one."""
        with ThreadPoolExecutor(8) as pool:
            margins = list(pool.map(partial(self.margin, model), pairs))
        return sum(margin > 0 for margin in margins) / len(margins)

    def prefer(self, adapter: str, pair: Pair) -> None:
        body = {
            "adapter": adapter,
            "messages": [{"role": "user", "content": pair.question}],
            "preference": {"chosen": pair.chosen, "rejected": pair.rejected},
        }
        self.call("POST", "/v1/feedback", 202, json=body)

    def wait_until_learned(self, adapter: str, timeout_s: float = 120.0) -> dict[str, Any]:
        """Nothing is left to learn from; the newest version."""
        deadline = time.monotonic() + timeout_s
        while True:
            view = self.call("GET", f"/v1/adapters/{adapter}")
            counted = view["learning"]["samples"].get("train", {})
            if not counted.get("accepted") and not counted.get("assigned"):
                newest: dict[str, Any] = self.versions(adapter)[0]
                return newest
            assert time.monotonic() < deadline, view
            time.sleep(0.1)

    def versions(self, adapter: str) -> list[dict[str, Any]]:
        """Newest first."""
        found: list[dict[str, Any]] = self.call("GET", f"/v1/adapters/{adapter}/versions")["data"]
        return found


@contextmanager
def live_user(**sections: dict[str, Any]) -> Iterator[User]:
    """A user of a server of its own: the demo model in float32, defaults elsewhere."""
    settings = resolve(
        {
            "model": {"model": "demo", "dtype": "float32", "threads": 1},
            "cache": {"memory_bytes": 64 << 20},
            "server": {"max_n": 8},
            **sections,
        }
    )
    with (
        live_engine(settings) as url,
        # Shorter than the server's, which else closes a connection just as it is used again.
        httpx.Client(base_url=url, timeout=60, limits=httpx.Limits(keepalive_expiry=1)) as http,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield User(http, client)
