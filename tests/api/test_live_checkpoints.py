"""Checkpoints of a job in a real engine answer as PEFT does with their files."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from openai.types.fine_tuning import FineTuningJob
from test_live_peft import QUESTION, base_model, logprobs, sequence

from live_learning_client import User, live_user

# PEFT asks transformers for an attribute that is on its way out.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")


def trained(user: User) -> FineTuningJob:
    """Two epochs of two steps."""
    turns = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": "Paris, sir."}]
    raw = "\n".join(json.dumps({"messages": turns}) for _ in range(8)).encode()
    file = user.client.files.create(file=("train.jsonl", raw), purpose="fine-tune")
    hyperparameters: Any = {"n_epochs": 2, "batch_size": 4, "learning_rate_multiplier": 5}
    job = user.client.fine_tuning.jobs.create(
        model="demo",
        training_file=file.id,
        method={"type": "supervised", "supervised": {"hyperparameters": hyperparameters}},
    )
    deadline = time.monotonic() + 120
    while not job.finished_at:
        assert time.monotonic() < deadline, job
        time.sleep(0.1)
        job = user.client.fine_tuning.jobs.retrieve(job.id)
    assert job.status == "succeeded", job.error
    return job


def by_peft(directory: Path, tokens: Sequence[int]) -> list[float]:
    model = peft.PeftModel.from_pretrained(base_model(), str(directory)).eval()
    with torch.no_grad():
        found: list[float] = logprobs(model, tokens).tolist()
    return found


def apart(one: Sequence[float], other: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def test_each_checkpoint_answers_as_peft_does_with_its_files(tmp_path: Path) -> None:
    with live_user(store={"directory": str(tmp_path)}) as user:
        job, tokens = trained(user), sequence(user)
        found = user.client.fine_tuning.jobs.checkpoints.list(job.id).data
        names = {each.step_number: each.fine_tuned_model_checkpoint for each in found}
        assert sorted(names) == [2, 4]
        models = [names[2], names[4], str(job.fine_tuned_model), "demo"]
        with ThreadPoolExecutor(len(models)) as pool:  # in one batch, and the first time at once
            first, last, version, base = pool.map(lambda name: user.logprobs(name, tokens), models)
        wanted = {step: by_peft(tmp_path / "jobs" / job.id / str(step), tokens) for step in names}
        assert first == pytest.approx(wanted[2], abs=1e-3)
        assert last == pytest.approx(wanted[4], abs=1e-3)
        assert version == pytest.approx(last, abs=1e-3)  # the job's last state is its version
        assert apart(first, base) > 0.05 and apart(first, last) > 0.05
        said = user.greedy(names[2], QUESTION)
        assert said.version == names[2].removeprefix("demo:")
