"""The public HTTP API of a server, as a user of the studies sees it: ask, teach, look.

Answers are greedy. Invariant: every call raises `Refused` for anything but success, but for
answers that a busy server asks to send again (429, 503), which are sent again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

AT_ONCE = 16
TRIES = 60
RETRIED = (429, 503)


class Refused(RuntimeError):
    """The server said no; `status` is HTTP's."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Answer:
    """What the model said, and whether it ended by itself."""

    text: str
    ended: bool


@dataclass(frozen=True, slots=True)
class Version:
    """A version of an adapter; `state` as the API calls it."""

    number: int
    state: str
    reason: str
    metrics: dict[str, Any]

    @property
    def served(self) -> bool:
        """Whether users got answers of it, also where it was taken back afterwards."""
        return self.state not in ("candidate", "refused")


@dataclass(frozen=True, slots=True)
class Learner:
    """What an adapter is now: the version that answers, its samples for training by state."""

    version: int
    samples: dict[str, int]

    @property
    def open(self) -> int:
        """Samples that still wait or are being trained on."""
        return self.samples.get("accepted", 0) + self.samples.get("assigned", 0)


class Api:
    """One server. `keys` are sent in turn as the caller says; without any, none is sent."""

    def __init__(self, url: str, keys: Sequence[str] = ()) -> None:
        limits = httpx.Limits(max_connections=4 * AT_ONCE)
        self._http = httpx.AsyncClient(base_url=url, timeout=1200.0, limits=limits)
        self._keys = tuple(keys)
        self._room = asyncio.Semaphore(AT_ONCE)
        self.model = ""

    async def __aenter__(self) -> Api:
        listed = await self.call("GET", "/v1/models")
        self.model = listed["data"][0]["id"]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def call(self, method: str, path: str, key: int = 0, **parts: Any) -> Any:
        """The JSON of the answer, as the user of the key numbered `key`."""
        headers = {}
        if self._keys:
            headers["Authorization"] = f"Bearer {self._keys[key % len(self._keys)]}"
        for tried in range(TRIES):
            response = await self._http.request(method, path, headers=headers, **parts)
            if response.status_code not in RETRIED or tried + 1 == TRIES:
                break
            await asyncio.sleep(1.0)
        if response.is_error:
            said = f"{method} {path}: {response.status_code} {response.text[:500]}"
            raise Refused(said, response.status_code)
        return response.json()

    async def ask(self, question: str, adapter: str | None, max_tokens: int) -> Answer:
        """A greedy answer of the base or of an adapter."""
        body = {
            "model": self.model if adapter is None else f"{self.model}:{adapter}",
            "messages": [{"role": "user", "content": question}],
            "temperature": 0,
            "max_tokens": max_tokens,
        }
        async with self._room:
            found = await self.call("POST", "/v1/chat/completions", json=body)
        choice = found["choices"][0]
        return Answer(choice["message"]["content"] or "", choice["finish_reason"] == "stop")

    async def ask_all(
        self, questions: Sequence[str], adapter: str | None, max_tokens: int
    ) -> list[Answer]:
        """Answers in the order of the questions, asked together."""
        asked = (self.ask(question, adapter, max_tokens) for question in questions)
        return list(await asyncio.gather(*asked))

    async def create(self, adapter: str, settings: dict[str, Any]) -> None:
        """Make an adapter that learns; `settings` empty: the server's defaults."""
        await self.call("POST", f"/v1/adapters/{adapter}", json={"settings": settings})

    async def teach(self, adapter: str, body: dict[str, Any], key: int = 0) -> None:
        """Send one feedback."""
        await self.call("POST", "/v1/feedback", key, json={"adapter": adapter, **body})

    async def learner(self, adapter: str) -> Learner:
        """See `Learner`."""
        found = await self.call("GET", f"/v1/adapters/{adapter}")
        samples = found["learning"]["samples"].get("train", {})
        return Learner(found["version"], dict(samples))

    async def versions(self, adapter: str) -> list[Version]:
        """All of them, oldest first."""
        found = await self.call("GET", f"/v1/adapters/{adapter}/versions")
        return sorted(
            (
                Version(each["version"], each["state"], each["reason"] or "", each["metrics"])
                for each in found["data"]
            ),
            key=lambda version: version.number,
        )

    async def roll_back(self, adapter: str, number: int) -> None:
        """Let an earlier version answer."""
        await self.call("POST", f"/v1/adapters/{adapter}/rollback", json={"version": number})

    async def forget(self, adapter: str) -> None:
        """Delete an adapter and all that was said about it."""
        await self.call("DELETE", f"/v1/adapters/{adapter}")
        about = {"adapter": adapter, **({"keys": "all"} if self._keys else {})}
        await self.call("DELETE", "/v1/feedback", params=about)
