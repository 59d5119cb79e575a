"""`kill -9` of the shipped server at every stage of learning: what was acknowledged is used once.

The demo model behind HTTP, started by `mortal_server.py`, which dies where it is told to: the whole
process tree, the engine alone, or the server alone. One state directory lives through all of it, so
each kill also meets what the ones before it left. Afterwards every acknowledged feedback is there
once and trained on once, the version that was published last (or a newer one) serves and answers as
it did, and a job that was running ends with the parameters of a job that nobody killed.
"""

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
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from mortality import ENGINE, ENGINE_MODULE, SERVER, TREE
from safetensors.torch import load

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
[learning]
rank = 4
batch_samples = 4
steps_per_version = 1
epochs = 1
held_out = 0.0
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
ACCEPTED = "accepted"
PATIENCE_S = 300.0  # what takes this long never happens; a busy machine is no reason to fail
FULL = pytest.mark.full


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
        eventually(lambda: found.extend(self._ready()) or found)
        self._http = httpx.Client(base_url=found[0], timeout=PATIENCE_S)

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
        eventually(lambda: not self._order.exists())
        if scope == ENGINE:
            eventually(lambda: self._engine_pid() not in (0, self._engine))
            eventually(lambda: self._get("/ready").status_code == 200)
            return
        assert self._process.wait(timeout=PATIENCE_S) == -signal.SIGKILL
        self.close()
        self.start()

    def close(self) -> None:
        self._http.close()
        with contextlib.suppress(ProcessLookupError):
            self.kill_tree()
        self._process.wait(timeout=PATIENCE_S)

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

        eventually(used)
        found = self._all_feedback()
        assert Counter(each["id"] for each in found) == Counter(self.acknowledged)
        samples = [sample for each in found for sample in each["samples"]]
        assert len(samples) == len(self.acknowledged)
        versions = self._data(f"/v1/adapters/{ADAPTER}/versions")
        made = Counter(sample["version"] for sample in samples)
        assert made == {v["version"]: v["metrics"]["samples"] for v in versions}
        assert {v["state"] for v in versions} == {"published"}
        assert [v["version"] for v in versions if v["current"]] == [versions[0]["version"]]
        label = f"{ADAPTER}@{versions[0]['version']}"
        eventually(lambda: self.ask()[0] == label)  # it is adopted after the commit

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

        eventually(over)
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


def eventually(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def one_life(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mortal]:
    made = Mortal(tmp_path_factory.mktemp("mortal"))
    yield made
    made.close()


@pytest.fixture
def mortal(one_life: Mortal) -> Mortal:
    """The server, up."""
    one_life.revive()
    return one_life


@pytest.fixture(scope="module")
def unharmed(one_life: Mortal) -> dict[str, torch.Tensor]:
    """What a job makes that nobody kills."""
    return one_life.check_job(one_life.create_job(), STEPS)


@pytest.mark.parametrize(
    ("point", "scope"),
    [
        (ACCEPTED, TREE),
        ("after commit", TREE),
        pytest.param("committed", TREE, marks=FULL),
        pytest.param("before rename", TREE, marks=FULL),
        pytest.param("after rename", TREE, marks=FULL),
        pytest.param("before commit", TREE, marks=FULL),
        pytest.param("before adopt", TREE, marks=FULL),
        pytest.param("after adopt", TREE, marks=FULL),
        pytest.param("committed", SERVER, marks=FULL),
        pytest.param("after rename", SERVER, marks=FULL),
        *(
            pytest.param(point, ENGINE, marks=FULL)
            for point in ("before rename", "after rename", "before commit", "after commit",
                          "before adopt", "after adopt")
        ),
    ],
)  # fmt: skip
def test_feedback_survives_a_kill_around_its_commit(mortal: Mortal, point: str, scope: str) -> None:
    before = mortal.current()
    if point != ACCEPTED:
        mortal.order(point, scope, 1)
    mortal.give()
    if point == ACCEPTED:
        mortal.kill_tree()
    mortal.wait_killed(scope)
    mortal.send_again()
    mortal.check_serving(before)
    mortal.check_feedback()
    if scope != ENGINE:
        mortal.check_files()


def test_learning_goes_on_after_the_engine_died_between_two_feedbacks(mortal: Mortal) -> None:
    """Its trainer was open and waited for more; nobody has told the learner that it is gone."""
    mortal.give()
    mortal.check_feedback()
    mortal.kill_engine()
    mortal.wait_killed(ENGINE)
    mortal.give()
    mortal.check_feedback()


@pytest.mark.parametrize(
    ("point", "scope"),
    [
        ("mid-forward", TREE),
        ("mid-backward", ENGINE),
        pytest.param("mid-forward", ENGINE, marks=FULL),
        pytest.param("mid-backward", TREE, marks=FULL),
        *(
            pytest.param(point, scope, marks=FULL)
            for point in ("between slices", "before update", "after update",
                          "files written", "files complete")
            for scope in (TREE, ENGINE)
        ),
    ],
)  # fmt: skip
def test_steps_survive_a_kill_in_their_middle(
    mortal: Mortal, unharmed: dict[str, torch.Tensor], point: str, scope: str
) -> None:
    """Of a job and of feedback, which train side by side."""
    before = mortal.current()
    job = mortal.create_job()
    eventually(lambda: mortal.committed(job))
    committed = mortal.committed(job)
    mortal.order(point, scope, 1)
    mortal.give()
    mortal.wait_killed(scope)
    mortal.send_again()
    mortal.check_serving(before)
    made = mortal.check_job(job, committed)
    check_same(made, unharmed)
    mortal.check_feedback()


@pytest.mark.parametrize(
    ("point", "committed"),
    [
        ("job after rename", STEPS_AN_EPOCH),
        pytest.param("job before rename", STEPS_AN_EPOCH, marks=FULL),
        pytest.param("job after commit", 2 * STEPS_AN_EPOCH, marks=FULL),
    ],
)
@pytest.mark.parametrize("scope", [TREE, pytest.param(ENGINE, marks=FULL)])
def test_a_job_goes_on_from_its_last_commit(
    mortal: Mortal, unharmed: dict[str, torch.Tensor], point: str, committed: int, scope: str
) -> None:
    """At the second commit; what was renamed but not committed is done again."""
    mortal.order(point, scope, 2)
    job = mortal.create_job()
    mortal.wait_killed(scope)
    check_same(mortal.check_job(job, committed), unharmed)


def test_other_parameters_are_noticed(mortal: Mortal, unharmed: dict[str, torch.Tensor]) -> None:
    """Negative control: a job with its examples in another order."""
    other = mortal.check_job(mortal.create_job(seed=2), STEPS)
    with pytest.raises(AssertionError):
        check_same(other, unharmed)


def check_same(made: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """The same parameters but for rounding, relative to how far they went (B begins at zero)."""
    assert made.keys() == wanted.keys()
    travelled = sum(float(value.norm()) ** 2 for key, value in wanted.items() if "lora_B" in key)
    gap = sum(float((made[key] - value).norm()) ** 2 for key, value in wanted.items())
    print(f"{(gap / travelled) ** 0.5:.1e} apart, relative to the distance")
    assert travelled > 0.0 and gap < (1e-2**2) * travelled
