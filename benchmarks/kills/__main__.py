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
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Annotated, Any

import httpx
import psutil
import typer

SERVE = [sys.executable, "-c", "from tandem.cli import main; main()", "serve", "demo"]
CONFIG = """
[model]
dtype = "float32"
threads = 1
[cache]
memory_bytes = 67108864
[learning]
rank = 4
batch_samples = 4
steps_per_version = 1
version_wait_s = 1.0
epochs = 1
held_out = 0.0
gate = "always"
[server]
port = 0
log_level = "warning"
[store]
directory = "{state}"
"""
NAMES = ("one", "two", "three")
OPEN = ("validating_files", "queued", "running")
ENGINE, SERVER, BOTH, PAUSE, HANG, ORPHAN, STOP = (
    *("kill the engine", "kill the server", "kill both", "pause the engine", "hang the engine"),
    *("kill the server of a paused engine", "end the server"),
)
WAYS = (ENGINE, SERVER, BOTH, PAUSE, HANG, ORPHAN, STOP)
SHARED = Path("/dev/shm")


@dataclass
class Report:
    """What happened, and what should not have."""

    kills: Counter[str] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    acknowledged: int = 0
    jobs: int = 0
    starts: int = 0
    slowest_start_s: float = 0.0
    violations: list[str] = field(default_factory=list)


class Server:
    """`tandem serve` with a TMPDIR of its own, started again and again."""

    def __init__(self, folder: Path, patience_s: float, report: Report) -> None:
        self.state, self.temporary = folder / "state", folder / "tmp"
        self.temporary.mkdir(parents=True)
        self._config = folder / "tandem.toml"
        self._config.write_text(CONFIG.format(state=self.state))
        self._folder, self._patience_s, self._report = folder, patience_s, report
        self.url = ""
        self.engines: set[int] = set()

    def start(self, *, wait: bool = True) -> None:
        """Start it; with `wait`, until it is ready."""
        self._report.starts += 1
        self._log = self._folder / f"serve-{self._report.starts}.log"
        with self._log.open("w") as output:
            self.process = subprocess.Popen(
                [*SERVE, "--config", self._config],
                stdout=output, stderr=output, start_new_session=True,
                env={**os.environ, "TMPDIR": str(self.temporary)},
            )  # fmt: skip
        if wait:
            self.wait_ready()

    def wait_ready(self) -> None:
        """Until it takes requests. Raises `TimeoutError`, or `RuntimeError` if it ended."""
        began_s = time.monotonic()
        self.until(self._announced, "the server is not ready")
        self.until(self._ready, "the engine is not ready")
        took_s = time.monotonic() - began_s
        self._report.slowest_start_s = max(self._report.slowest_start_s, took_s)
        self.engine()

    def until(self, condition: Callable[[], object], problem: str) -> None:
        """Wait. Raises `TimeoutError`."""
        deadline_s = time.monotonic() + self._patience_s
        while not condition():
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{problem} after {self._patience_s:.0f} s ({self._log})")
            time.sleep(0.05)

    def engine(self) -> int:
        """Process id of the engine; 0 while there is none."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children():
                if "tandem.build" in child.cmdline() and child.status() != psutil.STATUS_ZOMBIE:
                    self.engines.add(child.pid)
                    return child.pid
        return 0

    def get(self, path: str, **query: Any) -> Any:
        """The JSON at `path`."""
        answer = httpx.get(f"{self.url}{path}", params=query, timeout=self._patience_s)
        answer.raise_for_status()
        return answer.json()

    def _announced(self) -> bool:
        if self.process.poll() is not None:
            raise RuntimeError(f"the server ended by itself ({self._log})")
        found = re.findall(r"ready on (http://\S+)", self._log.read_text())
        self.url = found[0] if found else ""
        return bool(found)

    def _ready(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{self.url}/ready", timeout=5).status_code == 200
        return False


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


def check_answers(server: Server) -> list[str]:
    """Adapters that do not answer with their current version, however long one waits."""
    wrong: dict[str, str] = {}

    def all_right() -> bool:
        wrong.clear()
        for name in NAMES:
            found = httpx.get(f"{server.url}/v1/adapters/{name}/versions", timeout=60)
            versions = found.json()["data"] if found.status_code == 200 else []
            current = max((v["version"] for v in versions if v["current"]), default=0)
            body = {"model": f"demo:{name}", "prompt": "Hi", "max_tokens": 1}
            answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
            label = answer.headers.get("x-tandem-adapter", "none")
            if current and label != f"{name}@{current}":
                wrong[name] = f"{name} answers as {label}, and {current} is current"
        return not wrong

    try:
        server.until(all_right, "adapters do not answer with their current versions")
    except TimeoutError as error:
        return [str(error), *wrong.values()]
    return []


def check_store(server: Server, load: Load) -> list[str]:
    """What of the acknowledged is missing, twice or unfinished; directories that nobody names."""
    wrong: list[str] = []

    def settled() -> bool:
        states = [server.get(f"/v1/adapters/{name}")["learning"]["samples"] for name in NAMES]
        open_jobs = [server.get(f"/v1/fine_tuning/jobs/{job}")["status"] for job in load.jobs]
        learned = all({*each.get("train", {})} <= {"consumed", "refused"} for each in states)
        return learned and not any(status in OPEN for status in open_jobs)

    server.until(settled, "samples or jobs are left over")
    found: list[dict[str, Any]] = []
    while page := _page(server, found):
        found += page
    counted = Counter(each["id"] for each in found)
    wrong += [f"{key} is there {n} times" for key, n in counted.items() if n != 1]
    wrong += [f"{key} was acknowledged and is gone" for key in load.acknowledged - {*counted}]
    wrong += [f"{e['id']} has {len(e['samples'])} samples" for e in found if len(e["samples"]) != 1]
    for job in load.jobs:
        ended = server.get(f"/v1/fine_tuning/jobs/{job}")
        if ended["status"] != "succeeded":
            wrong.append(f"{job} {ended['status']}: {ended['error']}")
    return wrong + check_directories(server)


def check_directories(server: Server) -> list[str]:
    """Directories of versions and checkpoints that no row names."""
    wrong: list[str] = []
    for folder in sorted((server.state / "adapters").glob("*")):
        data = server.get(f"/v1/adapters/{folder.name}/versions")["data"]
        known = {str(version["version"]) for version in data}
        wrong += [f"stray {path}" for path in folder.iterdir() if path.name not in known]
    steps = (server.state / "jobs").glob("*/*")
    return wrong + [f"stray {path}" for path in steps if not path.name.isdigit()]


def _page(server: Server, found: list[dict[str, Any]]) -> Any:
    after = {"after": found[-1]["id"]} if found else {}
    return server.get("/v1/feedback", limit=100, **after)["data"]


def _temporary(server: Server) -> list[str]:
    """What is in TMPDIR, beside a cache of torch's that all processes of a user share."""
    names = (path.name for path in server.temporary.iterdir())
    return [name for name in names if not name.startswith("torchinductor_")]


def _shared() -> set[str]:
    return {path.name for path in SHARED.glob("*") if not path.name.startswith("PostgreSQL.")}


def _finish(server: Server, load: Load, report: Report, shared: set[str]) -> None:
    load.stop()
    report.acknowledged, report.jobs = len(load.acknowledged), len(load.jobs)
    report.violations += check_store(server, load)
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
