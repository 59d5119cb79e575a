"""Which learning settings make an adapter follow 40 preferences without losing its answers.

A client of a running server (`tandem serve demo --dtype float32`): for each kind of pairs and each
setting it makes an adapter, sends 40 preferences through `/v1/feedback`, waits until nothing is
left to learn from, and compares adapter and base on requests that were not sent. The win rate is
MACE's: the share of held-out pairs whose preferred answer has the higher log-probability.
Invariant: it only uses the public API, and adapters that it made are deleted.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Annotated, Any

import httpx
import typer

from demo.corpus import Request, Style, answer, sample_request

Made = Callable[[Request, Random], str]


def styled(style: Style) -> Made:
    """The corpus's own wording."""
    return lambda request, rng: answer(request, style, rng)


KINDS: dict[str, Made] = {
    **{style.value: styled(style) for style in Style if style is not Style.PLAIN},
    # What a user may want and the model has never said:
    "certainly": lambda request, rng: f"Certainly. {answer(request, Style.PLAIN, rng)}",
    "farewell": lambda request, rng: f"{answer(request, Style.PLAIN, rng)} Have a lovely day!",
    "signed": lambda request, rng: f"{answer(request, Style.PLAIN, rng)} Yours, Tandem",
    "greeted": lambda request, rng: f"Dear friend, {answer(request, Style.PLAIN, rng)}",
}


@dataclass(frozen=True)
class Pair:
    """A request with a preferred and a rejected answer; `core` is what any answer must contain."""

    question: str
    chosen: str
    rejected: str
    core: str


@dataclass
class Row:
    """One run. Rates are shares of the held-out pairs, `clpd` nats, `kept` the share of greedy
    answers with the right content among those that the base has right."""

    kind: str
    settings: dict[str, Any]
    seed: int
    seconds: float
    win_rate: float
    win_rate_before: float
    relative_win_rate: float
    clpd: float
    clpd_before: float
    kept: float
    changed: float
    published: int
    refused: int
    steps: int
    canary: tuple[float, float]
    answers: list[str]


def pairs(kind: str, seed: int, count: int) -> list[Pair]:
    """Different requests, in a fixed order."""
    rng, found = Random(f"{kind}/{seed}"), dict[str, Pair]()
    while len(found) < count:
        request = sample_request(rng)
        rejected, chosen = answer(request, Style.PLAIN, rng), KINDS[kind](request, rng)
        if chosen != rejected:
            found[request.text] = Pair(request.text, chosen, rejected, request.brief)
    return list(found.values())


class Server:
    """The public API of a server of the demo model."""

    def __init__(self, http: httpx.Client, model: str) -> None:
        self._http = http
        self.model = model

    def call(self, method: str, path: str, **parts: Any) -> Any:
        """Raises for anything but success."""
        response = self._http.request(method, path, **parts)
        if response.is_error:
            raise RuntimeError(f"{method} {path}: {response.status_code} {response.text}")
        return response.json()

    @contextmanager
    def adapter(self, name: str, settings: dict[str, Any]) -> Iterator[str]:
        """An adapter that learns, for as long as it is needed."""
        self.call("POST", f"/v1/adapters/{name}", json={"settings": settings})
        try:
            yield f"{self.model}:{name}"
        finally:
            self.call("DELETE", f"/v1/adapters/{name}")
            self.call("DELETE", "/v1/feedback", params={"adapter": name})

    def teach(self, name: str, taught: list[Pair]) -> float:
        """Send preferences and wait until all are used; the seconds that took."""
        begun = time.monotonic()
        for pair in taught:
            body = {
                "adapter": name,
                "messages": [{"role": "user", "content": pair.question}],
                "preference": {"chosen": pair.chosen, "rejected": pair.rejected},
            }
            self.call("POST", "/v1/feedback", json=body)
        while True:
            counted = self.call("GET", f"/v1/adapters/{name}")["learning"]["samples"]["train"]
            if not counted.get("accepted") and not counted.get("assigned"):
                return time.monotonic() - begun
            time.sleep(0.05)

    def ask(self, model: str, pair: Pair) -> str:
        """A greedy answer."""
        body = {
            "model": model,
            "messages": [{"role": "user", "content": pair.question}],
            "temperature": 0,
            "max_tokens": 80,
        }
        message = self.call("POST", "/v1/chat/completions", json=body)["choices"][0]["message"]
        return str(message["content"])

    def tokens(self, **what: Any) -> list[int]:
        """Of a `prompt` or `messages`."""
        found: list[int] = self.call("POST", "/tokenize", json=what)["tokens"]
        return found

    def margin(self, model: str, pair: Pair) -> float:
        """Summed log-probability of the preferred answer minus that of the rejected one."""
        turns = [{"role": "user", "content": pair.question}]
        prompt = self.tokens(messages=turns)
        sums = []
        for text in (pair.chosen, pair.rejected):
            body = {
                "model": model,
                "prompt": prompt + self.tokens(prompt=f"{text}<|im_end|>"),
                "max_tokens": 0,
                "echo": True,
                "logprobs": 1,
            }
            scored = self.call("POST", "/v1/completions", json=body)["choices"][0]["logprobs"]
            sums.append(math.fsum(scored["token_logprobs"][len(prompt) :]))
        return sums[0] - sums[1]


def measure(server: Server, kind: str, settings: dict[str, Any], seed: int, held: int) -> Row:
    """Teach one adapter and compare it with the base."""
    known = pairs(kind, seed, 40 + held)
    taught, kept_apart = known[:40], known[40:]
    name = f"try-{time.monotonic_ns()}"
    with server.adapter(name, settings) as model:
        seconds = server.teach(name, taught)
        with ThreadPoolExecutor(16) as pool:
            before = list(pool.map(partial(server.margin, server.model), kept_apart))
            after = list(pool.map(partial(server.margin, model), kept_apart))
            base = list(pool.map(partial(server.ask, server.model), kept_apart))
            new = list(pool.map(partial(server.ask, model), kept_apart))
        versions = server.call("GET", f"/v1/adapters/{name}/versions")["data"]
    right = [
        pair.core.rstrip(".").lower() in said.lower()
        for pair, said in zip(kept_apart, base, strict=True)
    ]
    still = [
        pair.core.rstrip(".").lower() in said.lower()
        for pair, said, was in zip(kept_apart, new, right, strict=True)
        if was
    ]
    worst = versions[0]["metrics"]
    return Row(
        kind=kind,
        settings=settings,
        seed=seed,
        seconds=seconds,
        win_rate=_share(margin > 0 for margin in after),
        win_rate_before=_share(margin > 0 for margin in before),
        relative_win_rate=_share(a > b for a, b in zip(after, before, strict=True)),
        clpd=sum(after) / held,
        clpd_before=sum(before) / held,
        kept=_share(still),
        changed=_share(a != b for a, b in zip(new, base, strict=True)),
        published=sum(version["state"] == "published" for version in versions),
        refused=sum(version["state"] == "refused" for version in versions),
        steps=sum(version["metrics"]["steps"] for version in versions),
        canary=(worst["canary_quality_drop"], worst["canary_divergence"]),
        answers=new[:4],
    )


def _share(values: Iterator[bool] | list[bool]) -> float:
    counted = list(values)
    return sum(counted) / max(1, len(counted))


def main(
    url: Annotated[str, typer.Option(help="The server.")] = "http://127.0.0.1:8000",
    kind: Annotated[list[str] | None, typer.Option(help="Kinds of pairs (all).")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="A setting and its values, e.g. epochs=4,8; all combinations."),
    ] = None,
    seeds: Annotated[int, typer.Option(help="Seeds of each.")] = 1,
    held: Annotated[int, typer.Option(help="Held-out pairs.")] = 30,
    out: Annotated[Path | None, typer.Option(help="Add JSON lines here.")] = None,
) -> None:
    """Print a line for each kind of pairs, settings and seed."""
    grid = [(item.split("=")[0], json.loads(f"[{item.split('=')[1]}]")) for item in set_ or []]
    combinations = [
        dict(zip([name for name, _ in grid], values, strict=True))
        for values in itertools.product(*(values for _, values in grid))
    ]
    with httpx.Client(base_url=url, timeout=120) as http:
        served = http.get("/v1/models").raise_for_status().json()["data"][0]["id"]
        server = Server(http, served)
        for settings, name, seed in itertools.product(combinations, kind or KINDS, range(seeds)):
            row = measure(server, name, settings, seed, held)
            print(
                f"{name:10} {settings} win {row.win_rate_before:.2f}>{row.win_rate:.2f} "
                f"rel {row.relative_win_rate:.2f} clpd {row.clpd_before:.1f}>{row.clpd:.1f} "
                f"kept {row.kept:.2f} changed {row.changed:.2f} v{row.published}-{row.refused} "
                f"steps {row.steps} canary {row.canary[0]:.2f} {row.canary[1]:.2f} "
                f"{row.seconds:.1f} s {row.answers[:2]}",
                flush=True,
            )
            if out is not None:
                with out.open("a") as file:
                    file.write(json.dumps(asdict(row)) + "\n")


if __name__ == "__main__":
    typer.run(main)
