"""The server that `test_kill_everywhere.py` kills and starts again, seen as its clients see it:
what it has promised, and what must hold of it afterwards."""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch
from mortality import ENGINE, ENGINE_MODULE
from safetensors.torch import load

from patience import START_S, eventually

HERE = Path(__file__).parent
QUESTION = "What is the capital of France?"
ADAPTER = "formal"
CANARY = '{"messages": [{"role": "user", "content": "Hello!"}]}\n'
CONFIG = """
[model]
dtype = "float32"
threads = 1
[cache]
memory_bytes = 67108864
[scheduling]
accustom_s = 0
[learning]
rank = 4
batch_samples = 4
steps_per_version = 1
version_wait_s = 0.5
epochs = 1
held_out = 0.0
gate = "always"
canary_file = "{canary}"
[server]
port = 0
log_level = "warning"
[store]
directory = "{state}"
"""
FEEDBACKS = 4
EXAMPLES = 6
EPOCHS = 4
STEPS_AN_EPOCH = 3
STEPS = EPOCHS * STEPS_AN_EPOCH


class Mortal:
    """A server that is killed and started again, and what it has promised so far."""

    def __init__(self, directory: Path) -> None:
        self.state = directory / "state"
        self._order = directory / "order"
        self._engine = 0
        self._logs = directory
        self._config = directory / "tandem.toml"
        canary = directory / "canary.jsonl"
        canary.write_text(CANARY)
        self._config.write_text(CONFIG.format(canary=canary, state=self.state))
        self._numbers = itertools.count()
        self.acknowledged: set[str] = set()
        self.unanswered: list[dict[str, Any]] = []
        self.answers: dict[str, str] = {}
        self._starts = itertools.count()
        self.start()

    # ------------------------------------------------------------------ the process

    def start(self) -> None:
        command = [sys.executable, HERE / "mortal_server.py", self._order, "serve", "demo"]
        self._log = self._logs / f"serve-{next(self._starts)}.log"
        with self._log.open("w") as output:
            self._process = subprocess.Popen(
                [*command, "--config", self._config],
                stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip
        found: list[str] = []
        eventually(lambda: found.extend(self._ready()) or found, START_S)
        self._http = httpx.Client(base_url=found[0], timeout=START_S)

    def revive(self) -> None:
        """After a test that failed between the kill and the start."""
        self._order.unlink(missing_ok=True)
        if self._process.poll() is not None:
            self.start()

    def _ready(self) -> list[str]:
        assert self._process.poll() is None, self._log.read_text()
        return re.findall(r"ready on (http://\S+)", self._log.read_text())

    def order(self, point: str, scope: str, nth: int) -> None:
        self._engine = self._engine_pid()
        aside = self._order.with_suffix(".tmp")
        aside.write_text(f"{point}|{scope}|{nth}")
        aside.rename(self._order)

    def kill_tree(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)

    def kill_engine(self) -> None:
        self._engine = self._engine_pid()
        os.kill(self._engine, signal.SIGKILL)

    def _engine_pid(self) -> int:
        """Of the living engine; 0 while there is none."""
        for child in psutil.Process(self._process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if str(HERE / ENGINE_MODULE) in child.cmdline():
                    return child.pid
        return 0

    def wait_killed(self, scope: str) -> None:
        """Until the order was obeyed and, unless the engine alone died, the server is up again."""
        eventually(lambda: not self._order.exists(), START_S)
        if scope == ENGINE:
            eventually(lambda: self._engine_pid() not in (0, self._engine), START_S)
            eventually(lambda: self._get("/ready").status_code == 200, START_S)
            return
        assert self._process.wait(timeout=START_S) == -signal.SIGKILL
        self.close()
        self.start()

    def close(self) -> None:
        self._http.close()
        with contextlib.suppress(ProcessLookupError):
            self.kill_tree()
        self._process.wait(timeout=START_S)

    # ------------------------------------------------------------------ what clients do

    def give(self) -> None:
        """Send some preferences; whatever was answered with 202 is acknowledged."""
        for _ in range(FEEDBACKS):
            number = next(self._numbers)
            self._send(
                {
                    "feedback_id": f"fb-{number}",
                    "adapter": ADAPTER,
                    "messages": [{"role": "user", "content": f"What is {number} plus 1?"}],
                    "preference": {
                        "chosen": f"Certainly. It is {number + 1}.",
                        "rejected": f"{number + 1}!",
                    },
                }
            )

    def send_again(self) -> None:
        """As a client does that got no answer."""
        waiting, self.unanswered = self.unanswered, []
        for body in waiting:
            self._send(body)
        assert self.unanswered == []

    def _send(self, body: dict[str, Any]) -> None:
        try:
            answer = self._http.post("/v1/feedback", json=body)
        except httpx.TransportError:
            self.unanswered.append(body)
            return
        assert answer.status_code == 202, answer.text
        self.acknowledged.add(body["feedback_id"])

    def ask(self) -> tuple[str, str]:
        """Which version answers, and how."""
        body = {
            "model": f"demo:{ADAPTER}",
            "messages": [{"role": "user", "content": QUESTION}],
            "temperature": 0,
            "max_tokens": 12,
        }
        answer = self._http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        text = answer.json()["choices"][0]["message"]["content"]
        return answer.headers["x-tandem-adapter"], text

    def create_job(self, seed: int = 1) -> str:
        lines = [
            {
                "input": {"messages": [{"role": "user", "content": f"What is {n} plus 2?"}]},
                "preferred_output": [{"role": "assistant", "content": f"Indeed, it is {n + 2}."}],
                "non_preferred_output": [{"role": "assistant", "content": f"{n + 2}!"}],
            }
            for n in range(EXAMPLES)
        ]
        raw = "\n".join(json.dumps(line) for line in lines).encode()
        uploaded = self._http.post(
            "/v1/files", files={"file": ("a.jsonl", raw)}, data={"purpose": "fine-tune"}
        )
        assert uploaded.status_code == 200, uploaded.text
        numbers = {"n_epochs": EPOCHS, "batch_size": EXAMPLES // STEPS_AN_EPOCH}
        body = {
            "model": "demo",
            "training_file": uploaded.json()["id"],
            "seed": seed,
            "method": {"type": "dpo", "dpo": {"hyperparameters": numbers}},
        }
        created = self._http.post("/v1/fine_tuning/jobs", json=body)
        assert created.status_code == 200, created.text
        return created.json()["id"]

    def committed(self, job: str) -> int:
        """The last step of this job that is in a checkpoint."""
        found = self._data(f"/v1/fine_tuning/jobs/{job}/checkpoints")
        return max((each["step_number"] for each in found), default=0)

    # ------------------------------------------------------------------ what must hold

    def current(self) -> int:
        """Number of the version of the adapter that is published; 0 without any."""
        if not self.acknowledged:
            return 0
        found = self._data(f"/v1/adapters/{ADAPTER}/versions")
        return max((v["version"] for v in found if v["current"]), default=0)

    def check_serving(self, least: int) -> None:
        """A version answers that is published and not older than `least`, as it always did."""
        label, text = self.ask()
        number = 0 if label == "base" else int(label.partition("@")[2])
        assert number >= least
        assert self.answers.setdefault(label, text) == text
        versions = {v["version"]: v for v in self._data(f"/v1/adapters/{ADAPTER}/versions")}
        assert number == 0 or versions[number]["state"] == "published"

    def check_feedback(self) -> None:
        """All of it is there once, and was used for the first time once."""

        def used() -> bool:
            counted = self._get(f"/v1/adapters/{ADAPTER}").json()["learning"]["samples"]
            return counted["train"] == {"consumed": len(self.acknowledged)}

        eventually(used, START_S)
        found = self._all_feedback()
        assert Counter(each["id"] for each in found) == Counter(self.acknowledged)
        samples = [sample for each in found for sample in each["samples"]]
        assert len(samples) == len(self.acknowledged)
        versions = self._data(f"/v1/adapters/{ADAPTER}/versions")
        made = Counter(sample["version"] for sample in samples)
        # A version also takes what it need not be trained on, as it says that already.
        assert set(made) == {v["version"] for v in versions}
        assert all(made[v["version"]] >= v["metrics"]["samples"] for v in versions)
        assert {v["state"] for v in versions} == {"published"}
        assert [v["version"] for v in versions if v["current"]] == [versions[0]["version"]]
        label = f"{ADAPTER}@{versions[0]['version']}"
        eventually(lambda: self.ask()[0] == label, START_S)  # it is adopted after the commit

    def check_files(self) -> None:
        """On the disk are the versions' directories and nothing half done; after a start."""
        versions = self._data(f"/v1/adapters/{ADAPTER}/versions")
        folder = self.state / "adapters" / ADAPTER
        assert {path.name for path in folder.iterdir()} == {str(v["version"]) for v in versions}

    def check_job(self, job: str, committed: int) -> dict[str, torch.Tensor]:
        """It succeeded; steps to `committed` ran once. The parameters that it made."""
        ended: list[dict[str, Any]] = []

        def over() -> bool:
            found = self._get(f"/v1/fine_tuning/jobs/{job}").json()
            if found["status"] in ("validating_files", "queued", "running"):
                return False
            ended.append(found)
            return True

        eventually(over, START_S)
        assert ended[0]["status"] == "succeeded", ended[0]["error"]
        events = self._data(f"/v1/fine_tuning/jobs/{job}/events", limit=100)
        steps = [re.match(r"Step (\d+)/", event["message"]) for event in events]
        times = Counter(int(step[1]) for step in steps if step)
        assert set(times) == set(range(1, STEPS + 1))
        assert all(times[step] == 1 for step in range(1, committed + 1)), times
        content = self._get(f"/v1/files/{ended[0]['result_files'][0]}/content").text
        rows = list(csv.DictReader(io.StringIO(content)))
        assert [int(row["step"]) for row in rows] == list(range(1, STEPS + 1))
        folder = self.state / "jobs" / job
        assert all(path.name.isdigit() for path in folder.iterdir()), list(folder.iterdir())
        name = ended[0]["fine_tuned_model"].partition(":")[2]
        (version,) = self._data(f"/v1/adapters/{name}/versions")
        assert version["state"] == "published" and version["current"]
        packed = self._get(f"/v1/adapters/{name}/versions/{version['version']}/export").content
        with zipfile.ZipFile(io.BytesIO(packed)) as archive:
            return load(archive.read("adapter_model.safetensors"))

    def _all_feedback(self) -> list[dict[str, Any]]:
        found = self._data("/v1/feedback", limit=100)
        while page := self._data("/v1/feedback", limit=100, after=found[-1]["id"]):
            found += page
        return found

    def _get(self, path: str, **query: Any) -> httpx.Response:
        return self._http.get(path, params=query)

    def _data(self, path: str, **query: Any) -> list[dict[str, Any]]:
        answer = self._get(path, **query)
        assert answer.status_code == 200, answer.text
        return answer.json()["data"]
