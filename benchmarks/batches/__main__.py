"""One batch with the official client beside online requests, while the server is killed.

    python -m benchmarks batches --lines 2000 --kills 10

Each line asks a question; questions share beginnings. Online requests arrive at random meanwhile
(`--rate`). At random moments the server or its engine is killed with SIGKILL, and a killed server
is started again on the same store. At the end every line must stand in the files once, and some
answers are compared with the same requests sent alone. One line of fifty asks for what is refused.
Two more batches run beside it: one expires, one is cancelled. Exit status 1 if anything is missing,
twice or different.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Annotated, Any, Literal

import httpx
import openai
import psutil
import typer
from openai.types import Batch

from benchmarks.live.questions import TAUGHT_QUESTIONS
from benchmarks.reporting.machine import describe, slug

RESULTS = Path(__file__).parents[1] / "results"
LOG = Path(".bench-cache/batches.log")
ENDED = ("completed", "failed", "expired", "cancelled")
CHAT: Literal["/v1/chat/completions"] = "/v1/chat/completions"
START_S = 300.0
POLL_S = 0.5
TOKENS = 24
REFUSED = 50  # one line of so many asks for more tokens than there can be
BESIDE = 200  # lines of the batch that expires, and of the one that is cancelled
WINDOW = "1m"  # of the batch that expires
CANCEL_AT = 0.05  # share of the first batch's lines


@dataclass(slots=True)
class Server:
    """`tandem serve` on one store; started again after each kill."""

    model: str
    port: int
    store: Path
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Of its API."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it and wait until it answers."""
        script = str(Path(sys.executable).with_name("tandem"))
        flags = ["--port", str(self.port), "--store-directory", str(self.store)]
        command = [script, "serve", self.model, *flags, "--dtype", "float32", "--no-learning"]
        LOG.parent.mkdir(parents=True, exist_ok=True)
        with LOG.open("a") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=output)
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            try:
                if httpx.get(f"{self.url}/ready").status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.2)
        raise RuntimeError(f"the server did not start; see {LOG}")

    def kill(self, engine: bool) -> None:
        """The engine alone, or the server, whose engine then ends by itself."""
        assert self.process is not None
        if engine:
            for child in psutil.Process(self.process.pid).children():
                os.kill(child.pid, signal.SIGKILL)
            return
        self.process.kill()
        self.process.wait()
        self.start()

    def end(self) -> None:
        """Let it drain."""
        if self.process is not None:
            self.process.terminate()
            self.process.wait()


@dataclass(slots=True)
class Online:
    """What ordinary requests met."""

    seconds: list[float] = field(default_factory=list)
    failed: Counter[str] = field(default_factory=Counter)


def lines_of(count: int, model: str, seed: int) -> list[dict[str, Any]]:
    """Questions about documents that several lines share."""
    rng, found = Random(seed), []
    for number in range(count):
        first, second = rng.choice(TAUGHT_QUESTIONS[:20]), rng.choice(TAUGHT_QUESTIONS)
        turns = [{"role": "user", "content": f"{first} Then: {second} ({number})"}]
        most = TOKENS if number % REFUSED else 10**9
        body = {"model": model, "messages": turns, "max_tokens": most, "temperature": 0}
        line = {"custom_id": f"line-{number}", "method": "POST", "url": CHAT, "body": body}
        found.append(line)
    rng.shuffle(found)
    return found


async def ask(url: str, model: str, rate: float, online: Online, ended: asyncio.Event) -> None:
    """Short questions at random times, each on its own."""
    rng, under_way = Random(1), set[asyncio.Task[None]]()

    async def once(http: httpx.AsyncClient, question: str) -> None:
        turns = [{"role": "user", "content": question}]
        body = {"model": model, "messages": turns, "max_tokens": 8, "temperature": 0}
        begun_s = time.monotonic()
        try:
            answer = await http.post(CHAT, json=body)
            if answer.status_code == 200:
                online.seconds.append(time.monotonic() - begun_s)
            else:
                online.failed[str(answer.status_code)] += 1
        except httpx.HTTPError as error:
            online.failed[type(error).__name__] += 1

    async with httpx.AsyncClient(base_url=url, timeout=120.0) as http:
        while not ended.is_set():
            under_way.add(asyncio.create_task(once(http, rng.choice(TAUGHT_QUESTIONS))))
            under_way = {task for task in under_way if not task.done()}
            await asyncio.sleep(rng.expovariate(rate))
        await asyncio.gather(*under_way)


def create(client: openai.OpenAI, lines: list[dict[str, Any]], window: str = "24h") -> Batch:
    """Upload the lines and begin."""
    text = "\n".join(map(json.dumps, lines)).encode()
    file = client.files.create(file=("lines.jsonl", text), purpose="batch")
    asked: Any = window  # the client's type knows 24h only
    return client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window=asked)


def results_of(client: openai.OpenAI, batch: Batch) -> list[list[dict[str, Any]]]:
    """Lines of the output file and of the error file."""
    return [
        [json.loads(line) for line in client.files.content(found).text.splitlines()]
        if found
        else []
        for found in (batch.output_file_id, batch.error_file_id)
    ]


def account(client: openai.OpenAI, key: str, lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Wait for the end, and compare the files with the lines and with the counts."""
    while (batch := client.batches.retrieve(key)).status not in ENDED:
        time.sleep(POLL_S)
    output, errors = results_of(client, batch)
    times = Counter(line["custom_id"] for line in output + errors)
    asked = {line["custom_id"]: line["body"] for line in lines}
    refused = {key for key, body in asked.items() if body["max_tokens"] > TOKENS}
    codes = Counter(
        line["error"]["code"] if line["error"] else str(line["response"]["status_code"])
        for line in errors
    )
    counts = batch.request_counts
    assert counts is not None
    return {
        "status": batch.status,
        "lines": len(lines),
        "output": len(output),
        "errors": dict(codes),
        "missing": len(asked.keys() - times.keys()),
        "twice": sum(count > 1 for count in times.values()),
        "answered though refused": len(refused & {line["custom_id"] for line in output}),
        "counts agree": (counts.total, counts.completed, counts.failed)
        == (len(lines), len(output), len(errors)),
    }


def wrong(found: dict[str, Any]) -> list[str]:
    """What of the invariant does not hold."""
    faults = [f"{found['different']} answers differ"] if found["different"] else []
    ends = ("completed", "expired", "cancelled")
    for end, each in zip(ends, (found["batch"], *found["beside"]), strict=True):
        bad = each["missing"] or each["twice"] or each["answered though refused"]
        if each["status"] != end or bad or not each["counts agree"]:
            faults.append(f"the batch that should be {end}: {each}")
    refused = -(-found["batch"]["lines"] // REFUSED)
    if found["batch"]["errors"] != {"400": refused}:
        faults.append(f"{refused} lines should be refused: {found['batch']['errors']}")
    return faults


async def study(
    server: Server, lines: list[dict[str, Any]], kills: int, rate: float, seed: int
) -> dict[str, Any]:
    """Make the batch, kill, wait for its end, compare."""
    rng, online, ended = Random(seed), Online(), asyncio.Event()
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=20)
    batch = create(client, lines)
    expiring, cancelled = (create(client, lines[:BESIDE], window) for window in (WINDOW, "24h"))
    begun_s = time.monotonic()
    asking = asyncio.create_task(ask(server.url, server.model, rate, online, ended))
    moments = sorted(rng.uniform(0.05, 0.95) for _ in range(kills))
    killed: Counter[str] = Counter()
    while batch.status not in ENDED:
        await asyncio.sleep(POLL_S)
        batch = await asyncio.to_thread(client.batches.retrieve, batch.id)
        counts = batch.request_counts
        share = (counts.completed + counts.failed) / max(1, counts.total) if counts else 0.0
        while moments and share >= moments[0]:
            moments.pop(0)
            engine = rng.random() < 0.5
            killed["engine" if engine else "server"] += 1
            print(f"{share:.0%}: the {'engine' if engine else 'server'} is killed", flush=True)
            await asyncio.to_thread(server.kill, engine)
        if share >= CANCEL_AT and cancelled.status in ("validating", "in_progress"):
            cancelled = await asyncio.to_thread(client.batches.cancel, cancelled.id)
    seconds = time.monotonic() - begun_s
    ended.set()
    await asking
    output, _ = results_of(client, batch)
    beside = [account(client, each.id, lines[:BESIDE]) for each in (expiring, cancelled)]
    wanted = {line["custom_id"]: line["body"] for line in lines}
    some = rng.sample(output, min(50, len(output)))
    different = 0
    for line in some:
        alone = client.chat.completions.create(**wanted[line["custom_id"]])
        said = line["response"]["body"]["choices"][0]["message"]["content"]
        different += said != alone.choices[0].message.content
    return {
        "seconds": seconds,
        "batch": account(client, batch.id, lines),
        "beside": beside,
        "compared": len(some),
        "different": different,
        "killed": dict(killed),
        "online": {"answered": len(online.seconds), "failed": dict(online.failed)},
    }


def main(
    model: Annotated[str, typer.Option(help="What is served, in float32.")] = "smollm2",
    lines: Annotated[int, typer.Option(help="Of the batch.")] = 2000,
    kills: Annotated[int, typer.Option(help="At random moments.")] = 10,
    rate: Annotated[float, typer.Option(help="Online requests/s.")] = 0.5,
    seed: Annotated[int, typer.Option(help="Of lines and kills.")] = 0,
    port: Annotated[int, typer.Option(help="Of the server that is started.")] = 8036,
    out: Annotated[Path, typer.Option(help="Folder of the result.")] = RESULTS,
) -> None:
    """Run the batch, kill the server meanwhile, count."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="batches-") as folder:
        server = Server(model, port, Path(folder) / "store")
        server.start()
        try:
            asked = lines_of(lines, model, seed)
            found = asyncio.run(study(server, asked, kills, rate, seed))
        finally:
            server.end()
    machine = describe("cpu", len(os.sched_getaffinity(0)))
    text = json.dumps({"machine": machine, "model": model} | found, indent=1)
    (out / f"batches-{slug(machine)}.json").write_text(text + "\n")
    print(text)
    faults = wrong(found)
    print("\n".join(faults))
    raise typer.Exit(1 if faults else 0)


if __name__ == "__main__":
    typer.run(main)
