"""The arithmetic and the worker handling of benchmarks/peers; no engine is run."""

from __future__ import annotations

import time
from pathlib import Path
from random import Random

import gguf
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

import tiny_gguf
from benchmarks.peers.comparison import Comparison, _with_file
from benchmarks.peers.driver import Workers, WorkerSpec
from benchmarks.peers.gguf_files import ensure_gguf
from benchmarks.peers.jobs import JOBS, Job, medians
from benchmarks.peers.models import prefill_flops, streamed_bytes
from benchmarks.peers.report import as_data, as_markdown


def test_figures_of_known_times() -> None:
    job = Job("x", 2, 128, 4)
    figures = job.figures([[1.0, 2.0, 3.0, 4.0], [2.0, 3.0, 4.0, 5.0]])
    assert figures["total"] == pytest.approx(8 / 5.0)
    assert figures["decode"] == pytest.approx(5 / 3.0), "tokens at 3, 4 and 3, 4, 5"
    assert Job("p", 1, 1024, 1).figures([[0.5]]) == {"prefill": 2048.0}
    assert medians([{"a": 1.0}, {"a": 5.0}, {"a": 2.0}]) == {"a": 2.0}


def test_prompts_differ_between_rounds() -> None:
    rng = Random(0)
    first, second = (JOBS[2].request(rng, 1000) for _ in range(2))
    assert len(first["prompts"]) == 8 and {len(p) for p in first["prompts"]} == {128}
    assert first["prompts"] != second["prompts"]


def test_weights_and_flops_of_the_published_shape() -> None:
    assert streamed_bytes("qwen2.5-0.5b") == 2 * 494_032_768
    flops = prefill_flops("qwen2.5-0.5b", 1024)
    assert flops == pytest.approx(2 * 357.9e6 * 1024, rel=0.15)


def test_shares_and_ratios() -> None:
    comparison = Comparison("m", streamed_bytes=1000, prefill_flops=1024.0 * 10)
    comparison.workers = {"tandem": {"versions": {"tandem": "1"}}, "peer": {"versions": {}}}
    comparison.ceilings = [{"read_bytes_per_s": 2000.0, "flops": 1000.0}] * 2
    comparison.samples = {
        "prefill 1024": {"tandem": [{"prefill": 50.0}] * 2, "peer": [{"prefill": 25.0}] * 2},
        "8 sequences": {
            "tandem": [{"total": 4.0, "decode": 8.0}, {"total": 4.0, "decode": 12.0}],
            "peer": [{"total": 2.0, "decode": 8.0}, {"total": 2.0, "decode": 4.0}],
        },
    }
    assert comparison.share(JOBS[0], "prefill", "tandem") == pytest.approx(0.5)
    assert comparison.share(JOBS[2], "decode", "tandem") == pytest.approx(10 / 16)
    assert comparison.ratio("8 sequences", "decode", "tandem", "peer") == pytest.approx(2.0)
    page = as_markdown(as_data({"cpu": "x"}, [comparison], "tandem"), "tandem")
    row = "| 8 sequences | output tokens/s, prefill included | 4.0 (25%) | 2.0 (12%) | 2.00 |"
    assert row in page


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize(("kind", "error"), [("bf16", 0.0), ("q8_0", 1e-2)])
def test_a_file_for_llama_cpp_has_the_weights_of_the_checkpoint(
    architecture: str, kind: str, error: float, tmp_path: Path
) -> None:
    model = tiny_gguf.make(architecture).bfloat16()
    folder = tmp_path / "tiny"
    model.save_pretrained(folder)
    file = ensure_gguf(folder, kind, tmp_path / "cache")
    assert [each.name for each in (tmp_path / "cache").iterdir()] == [f"tiny-{kind}.gguf"]
    found = {each.name: each for each in gguf.GGUFReader(file).tensors}
    weights = [each for each in found.values() if len(each.shape) == 2]
    assert {each.tensor_type.name.lower() for each in weights} == {kind}
    # transformers' reader turns the heads back, as for any file that llama.cpp made.
    read = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, config=model.config, dtype=torch.float32
    )
    for name, expected in model.float().state_dict().items():
        assert (read.state_dict()[name] - expected).abs().max() <= error, name


@pytest.mark.full
def test_a_worker_of_llama_cpp_gets_the_file_of_the_model(tmp_path: Path) -> None:
    spec = WorkerSpec("llama.cpp q8_0", "engine", options={"threads": 1, "gguf": "q8_0"})
    tiny_gguf.make().save_pretrained(tmp_path / "tiny")
    found = _with_file(spec, tmp_path / "tiny", tmp_path).options["file"]
    assert Path(found) == tmp_path / "tiny-q8_0.gguf" and Path(found).is_file()
    plain = WorkerSpec("tandem", "engine")
    assert _with_file(plain, tmp_path, tmp_path) is plain


@pytest.mark.full
def test_idle_workers_are_stopped_and_end(tmp_path: Path) -> None:
    spec = WorkerSpec(
        "ceilings", "benchmarks.peers.engine_ceilings", options={"device": "cpu", "threads": 1}
    )
    others = set(psutil.Process().children())  # of tests before
    with Workers([spec], tmp_path, tmp_path) as workers:
        worker = workers.by_name["ceilings"]
        answer = worker.run({"repeats": 1})
        assert answer["flops"] > 0 and answer["read_bytes_per_s"] > 0
        (child,) = set(psutil.Process().children()) - others
        time.sleep(0.2)
        assert child.status() == psutil.STATUS_STOPPED
        worker.run({"repeats": 1})
        assert worker.idle_cpu_s < 0.1
    assert not child.is_running()
    with pytest.raises(RuntimeError, match="the absent worker ended"):
        Workers([WorkerSpec("absent", "peers.absent", options=spec.options)], tmp_path, tmp_path)


def test_a_worker_that_fails_ends_although_a_thread_of_its_engine_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "failing.py").write_text(
        "import threading\n"
        "def versions(): return {}\n"
        "class Engine:\n"
        "    def run(self, job): raise AssertionError('the manager stopped')\n"
        "def start(model, options):\n"
        "    threading.Thread(target=threading.Event().wait).start()\n"
        "    return Engine()\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with (
        Workers([WorkerSpec("failing", "failing")], tmp_path, tmp_path) as workers,
        pytest.raises(RuntimeError, match=r"(?s)the failing worker ended.*the manager stopped"),
    ):
        workers.by_name["failing"].run({})
