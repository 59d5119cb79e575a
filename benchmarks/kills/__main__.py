"""Kill a server at random under load, again and again on one store; then: is everything there?

    python -m benchmarks kills --kills 100

Feedback about a few adapters, a fine-tuning job and chats run all the time. What was acknowledged
must be there once in the end, what answers must be what is current, and neither the store's
directory, nor TMPDIR, nor /dev/shm may hold what nobody needs. Needs Linux and the demo model.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from pathlib import Path
from random import Random
from typing import Annotated, Any

import httpx
import psutil
import typer

from benchmarks.kills.checks import NAMES, OPEN, check_answers, check_store
from benchmarks.kills.server import Report, Server

ENGINE, SERVER, BOTH, PAUSE, HANG, ORPHAN, STOP = (
    *("kill the engine", "kill the server", "kill both", "pause the engine", "hang the engine"),
    *("kill the server of a paused engine", "end the server"),
)
WAYS = (ENGINE, SERVER, BOTH, PAUSE, HANG, ORPHAN, STOP)
SHARED = Path("/dev/shm")


class Load:
    """Clients in threads: feedback, which is sent again until it is acknowledged, chats, and one
    job after the other."""

    def __init__(self, server: Server, seed: int, report: Report) -> None:
        self._server, self._seed, self._report = server, seed, report
        self._ended = threading.Event()
        self._numbers = iter(range(1 << 30))
        self.acknowledged: set[str] = set()
        self.jobs: list[str] = []
        works = (self._teach, self._teach, self._chat, self._chat, self._tune)
        self._threads = [
            threading.Thread(target=work, args=(Random(f"{seed}/{place}"),), daemon=True)
            for place, work in enumerate(works)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End the clients; feedback under way is acknowledged first."""
        self._ended.set()
        for thread in self._threads:
            thread.join(timeout=300)
            if thread.is_alive():
                self._report.violations.append("a client waits for ever")

    def _post(self, path: str, **content: Any) -> httpx.Response | None:
        try:
            answer = httpx.post(f"{self._server.url}{path}", timeout=30, **content)
        except (httpx.HTTPError, httpx.InvalidURL):
            self._report.statuses["no answer"] += 1
            return None
        self._report.statuses[f"{path} {answer.status_code}"] += 1
        if answer.status_code >= 500 and answer.status_code != 503:
            self._report.violations.append(f"{path}: {answer.status_code} {answer.text[:200]}")
        return answer

    def _teach(self, rng: Random) -> None:
        while not self._ended.is_set():
            number = next(self._numbers)
            body = {
                "feedback_id": f"fb-{number}",
                "adapter": rng.choice(NAMES),
                "messages": [{"role": "user", "content": f"What is {number} plus 1?"}],
                "preference": {"chosen": f"Certainly: {number + 1}.", "rejected": f"{number + 1}!"},
            }
            while (answer := self._post("/v1/feedback", json=body)) is None or (
                answer.status_code != 202
            ):
                time.sleep(0.2)
            self.acknowledged.add(body["feedback_id"])
            time.sleep(rng.random())

    def _chat(self, rng: Random) -> None:
        while not self._ended.is_set():
            model = rng.choice(("demo", *(f"demo:{name}" for name in NAMES)))
            content = f"What is {rng.randrange(1000)} plus {rng.randrange(1000)}?"
            body = {
                "model": model,
                "messages": [{"role": "user", "content": content}],
                "max_tokens": rng.randint(1, 40),
            }
            if self._post("/v1/chat/completions", json=body) is None:
                time.sleep(0.2)

    def _tune(self, rng: Random) -> None:
        while not self._ended.is_set():
            lines = [
                {"messages": [{"role": "user", "content": f"{n} plus 2?"},
                              {"role": "assistant", "content": f"Indeed, {n + 2}."}]}
                for n in range(6)
            ]  # fmt: skip
            raw = "\n".join(json.dumps(line) for line in lines).encode()
            form = {"files": {"file": ("a.jsonl", raw)}, "data": {"purpose": "fine-tune"}}
            uploaded = self._post("/v1/files", **form)
            if uploaded is None or uploaded.status_code != 200:
                time.sleep(0.5)
                continue
            wanted = {
                "model": "demo", "training_file": uploaded.json()["id"], "seed": rng.randrange(99),
                "method": {"type": "supervised", "supervised": {
                    "hyperparameters": {"n_epochs": 8, "batch_size": 2}}},
            }  # fmt: skip
            created = self._post("/v1/fine_tuning/jobs", json=wanted)
            if created is not None and created.status_code == 200:
                self.jobs.append(created.json()["id"])
                self._wait_ended(self.jobs[-1])

    def _wait_ended(self, job: str) -> None:
        while not self._ended.is_set():
            with contextlib.suppress(httpx.HTTPError, httpx.InvalidURL, ValueError):
                ended = self._server.get(f"/v1/fine_tuning/jobs/{job}")
                if ended["status"] not in OPEN:  # its adapter goes, or the places would be full
                    httpx.delete(f"{self._server.url}/v1/models/{ended['fine_tuned_model']}")
                    return
            time.sleep(0.5)


def kill(server: Server, way: str, rng: Random) -> None:  # noqa: C901
    """Do it, and have a server that is ready again."""
    engine = server.engine()
    if way in (ENGINE, PAUSE, HANG, ORPHAN) and not engine:
        return
    if way == ENGINE:
        os.kill(engine, signal.SIGKILL)
    if way in (PAUSE, HANG, ORPHAN):
        os.kill(engine, signal.SIGSTOP)
        time.sleep(rng.uniform(0.1, 5.0))
    if way == PAUSE:
        with contextlib.suppress(ProcessLookupError):
            os.kill(engine, signal.SIGCONT)
    if way == HANG:
        server.until(lambda: server.engine() not in (0, engine), "a hung engine is not replaced")
    if way in (SERVER, ORPHAN):
        os.kill(server.process.pid, signal.SIGKILL)
    if way == BOTH:
        os.killpg(server.process.pid, signal.SIGKILL)
    if way == STOP:
        server.process.terminate()
    if way in (SERVER, ORPHAN, BOTH, STOP):
        server.process.wait(timeout=300)
        if rng.random() < 0.3:  # and once more, while it starts
            server.start(wait=False)
            time.sleep(rng.uniform(0.0, 15.0))
            server.engine()
            server.process.kill()
            server.process.wait(timeout=300)
        server.start()
    else:
        server.wait_ready()


def _temporary(server: Server) -> list[str]:
    """What is in TMPDIR, beside a cache of torch's that all processes of a user share."""
    names = (path.name for path in server.temporary.iterdir())
    return [name for name in names if not name.startswith("torchinductor_")]


def _shared() -> set[str]:
    return {path.name for path in SHARED.glob("*") if not path.name.startswith("PostgreSQL.")}


def _finish(server: Server, load: Load, report: Report, shared: set[str]) -> None:
    load.stop()
    report.acknowledged, report.jobs = len(load.acknowledged), len(load.jobs)
    report.violations += check_store(server, load.acknowledged, load.jobs)
    report.violations += check_answers(server)
    running = _temporary(server)
    if len(running) != 1:
        report.violations.append(f"TMPDIR of a running server holds {running}")
    server.process.terminate()
    server.process.wait(timeout=300)
    report.violations += [f"left in TMPDIR: {path}" for path in _temporary(server)]
    report.violations += [f"left in {SHARED}: {name}" for name in _shared() - shared]
    report.violations += [f"engine {pid} lives" for pid in server.engines if psutil.pid_exists(pid)]


def main(
    folder: Annotated[Path, typer.Option(help="A new directory for store, logs and TMPDIR.")],
    kills: Annotated[int, typer.Option(help="How many.")] = 100,
    seed: Annotated[int, typer.Option(help="Of ways, times and requests.")] = 0,
    patience: Annotated[float, typer.Option(help="Seconds that nothing may take.")] = 600.0,
    out: Annotated[Path | None, typer.Option(help="Write the report here as JSON.")] = None,
) -> None:
    """Kill a server at random; exit status 1 if anything is lost, twice, wrong or left."""
    rng, report, shared = Random(seed), Report(), _shared()
    server = Server(folder.resolve(), patience, report)
    server.start()
    load = Load(server, seed, report)
    try:
        for number in range(kills):
            time.sleep(rng.uniform(1.0, 10.0))
            way = rng.choice(WAYS)
            report.kills[way] += 1
            print(f"{number + 1}/{kills}: {way}", flush=True)
            kill(server, way, rng)
            report.violations += check_answers(server)
            print("\n".join(f"  {each}" for each in report.violations[-3:]), flush=True)
        _finish(server, load, report, shared)
    except (TimeoutError, RuntimeError) as error:
        report.violations.append(str(error))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.process.pid, signal.SIGKILL)
    text = json.dumps(vars(report), indent=2)
    print(text, flush=True)
    if out is not None:
        out.write_text(f"{text}\n", encoding="utf-8")
    raise SystemExit(1 if report.violations else 0)


if __name__ == "__main__":
    typer.run(main)
