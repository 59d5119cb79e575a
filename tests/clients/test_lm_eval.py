"""lm-eval's command line: log-likelihoods through completions, and answers through both routes.

Its tokenizer is the server's (`tokenizer_backend=remote`); tasks and documents are local files.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        importlib.util.find_spec("lm_eval") is None, reason="lm-eval is not installed"
    ),
]
DOCUMENTS = (
    ("The capital of France is", (" Paris", " London", " a banana"), 0),
    ("Water is made of hydrogen and", (" stone", " oxygen", " cheese"), 1),
    ("Two plus two equals", (" four", " Paris", " the sea"), 0),
)
TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
output_type: {kind}
doc_to_text: "{text}"
doc_to_target: "{target}"
{rest}
"""
CHOICES = 'doc_to_choice: "{{choices}}"\ntarget_delimiter: ""\nmetric_list:\n  - metric: acc'
ROLLING = "metric_list:\n  - metric: bits_per_byte"
WRITTEN = """
target_delimiter: ""
generation_kwargs:
  until: ["\\n"]
  max_gen_toks: 8
  do_sample: false
metric_list:
  - metric: exact_match
"""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    file = folder / "documents.jsonl"
    lines = [
        json.dumps({"question": question, "choices": choices, "answer": answer})
        for question, choices, answer in DOCUMENTS
    ]
    file.write_text("\n".join(lines))
    for name, kind, text, target, rest in (
        ("choices", "multiple_choice", "{{question}}", "answer", CHOICES),
        ("rolling", "loglikelihood_rolling", "", "{{question}}", ROLLING),
        ("written", "generate_until", "{{question}}", "{{choices[answer]}}", WRITTEN),
    ):
        body = TASK.format(name=name, file=file, kind=kind, text=text, target=target, rest=rest)
        (folder / f"{name}.yaml").write_text(body)
    return folder


def evaluated(folder: Path, out: Path, key: str, model: str, *more: str) -> dict[str, Any]:
    """The results of a run, and the samples of each task."""
    environment = {
        **os.environ,
        "OPENAI_API_KEY": key,
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(out / "cache"),
    }
    command = [sys.executable, "-m", "lm_eval", "run", "--model", model, "--include_path",
               str(folder), "--output_path", str(out), "--log_samples", *more]  # fmt: skip
    ran = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=400, check=False
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    [results] = out.rglob("results_*.json")
    found = dict(json.loads(results.read_text())["results"])
    for file in out.rglob("samples_*.jsonl"):
        name = file.name.split("_")[1]
        found[name]["samples"] = [json.loads(line) for line in file.read_text().splitlines()]
    return found


@pytest.mark.parametrize("batch", [1, 4])
def test_log_likelihoods_through_completions(
    tasks: Path, tmp_path: Path, url: str, key: str, batch: int
) -> None:
    arguments = (
        f"model=smollm2,base_url={url}/v1/completions,tokenizer_backend=remote,"
        f"auth_token={key},num_concurrent=2"
    )
    found = evaluated(
        tasks, tmp_path, key, "local-completions", "--model_args", arguments,
        "--tasks", "choices,rolling,written", "--batch_size", str(batch),
    )  # fmt: skip
    assert found["choices"]["acc,none"] == 1.0
    assert 0 < found["rolling"]["bits_per_byte,none"] < 4
    for sample in found["choices"]["samples"]:
        values = [float(each[0]) for each in sample["filtered_resps"]]
        assert max(values) == values[sample["doc"]["answer"]] and max(values) < 0
        # " Paris" is also what the model itself would write
        greedy = [str(each[1]) for each in sample["filtered_resps"]]
        assert greedy[sample["doc"]["answer"]] == str(sample["doc_id"] == 0)
    first = next(each for each in found["written"]["samples"] if each["doc_id"] == 0)
    assert first["filtered_resps"][0].startswith(" Paris")


def test_answers_through_chats(tasks: Path, tmp_path: Path, url: str, key: str) -> None:
    found = evaluated(
        tasks, tmp_path, key, "local-chat-completions",
        "--model_args", f"model=smollm2,base_url={url}/v1/chat/completions",
        "--tasks", "written", "--apply_chat_template",
    )  # fmt: skip
    assert len(found["written"]["samples"]) == len(DOCUMENTS)
    assert all(sample["filtered_resps"][0] for sample in found["written"]["samples"])
