"""Soak a server with clients that come and go: one that runs (`--url`), or the demo model's own.

The core is `tandem.bench.soak`; this starts and ends a server around it when none was named, and
watches the memory of all its processes. With `--adapters` there are others beside the streaming
clients: some teach so many adapters and delete one now and then, some talk with them for long.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Annotated, Any

import msgspec
import typer

from benchmarks.live.api import Api, Refused
from benchmarks.live.questions import TAUGHT_QUESTIONS
from tandem.bench.client import first_model
from tandem.bench.http1 import Origin, ProtocolError, fetch
from tandem.bench.soak import SoakOptions, SoakReport, as_lines, soak

START_S = 180.0
TEACH_EVERY_S, DELETED_ONE_IN = 0.5, 50
TALKERS, TURNS, TURN_TOKENS = 4, 12, 24
SETTLE_S = 300.0


@contextmanager
def demo_server(port: int, kv_memory: str, log: Path) -> Iterator[int]:
    """`tandem serve demo` on `port`; yields its process id once it is ready."""
    script = Path(sys.executable).with_name("tandem")
    command = [str(script), "serve", "demo", "--port", str(port), "--kv-memory", kv_memory]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        _wait_ready(process, Origin.parse(f"http://127.0.0.1:{port}"), log)
        yield process.pid
    finally:
        process.terminate()
        process.wait(timeout=60)


def _wait_ready(process: subprocess.Popen[bytes], origin: Origin, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with {process.returncode}; see {log}")
        try:
            status, _ = asyncio.run(fetch(origin, "GET", "/ready", {}))
        except (OSError, ProtocolError):
            status = 0
        if status == 200:
            return
        time.sleep(0.5)
    raise RuntimeError(f"the server was not ready after {START_S:.0f} s; see {log}")


def main(
    url: Annotated[str, typer.Option(help="A running server; empty: start one.")] = "",
    port: Annotated[int, typer.Option(help="Of the server that is started.")] = 8017,
    pid: Annotated[list[int] | None, typer.Option(help="Processes of --url to watch.")] = None,
    clients: Annotated[int, typer.Option(help="Concurrent streaming clients.")] = 64,
    seconds: Annotated[float, typer.Option(help="How long they ask.")] = 600.0,
    seed: Annotated[int, typer.Option(help="Of prompts, parameters and disconnects.")] = 0,
    warmup: Annotated[float, typer.Option(help="Memory is watched after so many seconds.")] = 60.0,
    kv_memory: Annotated[
        str, typer.Option(help="Of the started server; small, so that the cache fills at once.")
    ] = "32MiB",
    adapters: Annotated[int, typer.Option(help="That are taught and talked with beside.")] = 0,
    log: Annotated[Path, typer.Option(help="The started server's output.")] = Path("soak.log"),
    out: Annotated[Path | None, typer.Option(help="Write the report here as JSON.")] = None,
) -> None:
    """Soak; exit status 1 unless every answer was whole and everything was given back."""
    settings = {"clients": clients, "seconds": seconds, "seed": seed, "warmup_s": warmup}
    if url:
        clean = _run(url, tuple(pid or ()), settings, adapters, out)
    else:
        with demo_server(port, kv_memory, log) as server:
            clean = _run(f"http://127.0.0.1:{port}", (server,), settings, adapters, out)
    raise typer.Exit(0 if clean else 1)


def _run(
    url: str, pids: tuple[int, ...], settings: dict[str, Any], adapters: int, out: Path | None
) -> bool:
    origin = Origin.parse(url)
    model = asyncio.run(first_model(origin, None))
    if adapters:
        settings = {**settings, "settle_s": SETTLE_S}  # what was being learned is learned first
    options = SoakOptions(origin, model, pids=pids, **settings)
    report = asyncio.run(mixed(options, url, adapters) if adapters else soak(options))
    print("\n".join(as_lines(report)))
    if out is not None:
        out.write_text(json.dumps(msgspec.to_builtins(report), indent=1) + "\n")
    return report.clean


async def mixed(options: SoakOptions, url: str, adapters: int) -> SoakReport:
    """A soak beside which adapters are taught, talked with and deleted until the clients stop."""
    names = [f"soak-{number}" for number in range(adapters)]
    rng = Random(f"{options.seed}/mixed")
    end_s = time.monotonic() + options.seconds
    async with Api(url) as api, asyncio.TaskGroup() as group:
        group.create_task(teach(api, names, rng, end_s))
        for _ in range(TALKERS):
            group.create_task(talk(api, names, Random(rng.random()), end_s))
        return await soak(options)


async def teach(api: Api, names: list[str], rng: Random, end_s: float) -> None:
    """A preference for a random adapter twice a second; now and then one is deleted."""
    taught: dict[str, None] = {}
    while time.monotonic() < end_s:
        name, question = rng.choice(names), rng.choice(TAUGHT_QUESTIONS)
        word = rng.choice(("Arr", "Indeed", "Well"))
        turns = [{"role": "user", "content": question}]
        pair = {"chosen": f"{word}! That is known.", "rejected": "That is known."}
        await api.teach(name, {"messages": turns, "preference": pair})
        taught[name] = None
        if rng.randrange(DELETED_ONE_IN) == 0:
            gone = rng.choice([*taught])
            del taught[gone]
            await api.forget(gone)
        await asyncio.sleep(TEACH_EVERY_S)


async def talk(api: Api, names: list[str], rng: Random, end_s: float) -> None:
    """Conversations that grow turn by turn, each with one adapter or with the base."""
    while time.monotonic() < end_s:
        model = rng.choice([api.model, *(f"{api.model}:{name}" for name in names)])
        turns: list[dict[str, str]] = []
        for question in rng.sample(TAUGHT_QUESTIONS, TURNS):
            turns.append({"role": "user", "content": question})
            body = {"model": model, "messages": turns, "max_tokens": TURN_TOKENS}
            try:
                found = await api.call("POST", "/v1/chat/completions", json=body)
            except Refused as error:
                if error.status != 404:
                    raise
                await asyncio.sleep(TEACH_EVERY_S)
                break  # it has learned nothing yet, or was just deleted
            turns.append(
                {"role": "assistant", "content": found["choices"][0]["message"]["content"]}
            )
            if time.monotonic() > end_s:
                return


if __name__ == "__main__":
    typer.run(main)
