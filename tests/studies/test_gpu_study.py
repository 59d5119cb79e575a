"""benchmarks/gpu: every part runs on a tiny model on the CPU, and reports known times rightly."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, Qwen2Config

from benchmarks.gpu import coserving
from benchmarks.gpu.ceilings import Ceilings
from benchmarks.gpu.coserving import Answer, Found
from benchmarks.gpu.engine import Engine, random_model
from benchmarks.gpu.generation import gaps_of
from benchmarks.gpu.options import FURTHER, PARTS, Options
from benchmarks.gpu.report import as_table
from benchmarks.gpu.study import Study, small
from benchmarks.peers.models import prefill_flops, streamed_bytes

SHAPE = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


@pytest.fixture
def options(tmp_path: Path) -> Options:
    LlamaConfig(**SHAPE, tie_word_embeddings=False).save_pretrained(tmp_path / "tiny")
    models = (str(tmp_path / "tiny"),)
    return small(Options(parts=(*PARTS, *FURTHER), models=models, device="cpu", seconds=3.0))


def test_every_part_runs_and_is_written(
    options: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coserving, "DRAIN_S", 120.0)
    said: list[str] = []
    study = Study(replace(options, budget_s=1e9), tmp_path, said.append, began_s=0.0)
    assert study.run(), study.findings.missing
    (path,) = tmp_path.glob("gpu-*.json")
    parts = json.loads(path.read_text())["parts"]
    assert set(parts) == {"ceilings", *PARTS, *FURTHER} - {"replays"}  # of a CUDA device alone
    assert [row["sequences"] for row in parts["decode"]] == [1, 3]
    assert [row["prompt_tokens"] for row in parts["prefill"]] == [16, 40]
    assert [row["adapters"] for row in parts["adapters"]][2:] == [
        "one, on all rows",
        "3, one a row",
    ]
    assert not any("problem" in row for row in parts["peers"])
    alone, requests, *both = parts["coserving"]
    assert alone["training_tokens_per_s"] > 0 and requests["unfinished"] == 0
    assert len(both) == len(options.tpot_factors) and {row["model"] for row in both} == {"tiny"}
    assert "## Prompts, single passes" in path.with_suffix(".md").read_text()


def test_parts_that_do_not_fit_or_fail_say_so_and_the_rest_is_kept(
    options: Options, tmp_path: Path
) -> None:
    (tmp_path / "wrong").mkdir()
    out, say = tmp_path / "out", [].append
    first = Study(replace(options, parts=("decode",), budget_s=1e9), out, say, began_s=0.0)
    assert first.run()
    few = replace(options, parts=("prefill",), budget_s=1e9, models=(str(tmp_path / "wrong"),))
    second = Study(few, out, say, began_s=0.0)
    assert not second.run(keep=True)
    assert "prefill of" in second.findings.missing[0] and "failed" in second.findings.missing[0]
    third = Study(replace(options, parts=("prefill",), budget_s=0.0), out, say, began_s=0.0)
    assert not third.run(keep=True)
    assert "skipped: needs 31 s" in third.findings.missing[0]
    (path,) = out.glob("gpu-*.json")
    assert set(json.loads(path.read_text())["parts"]) == {"ceilings", "decode"}


def test_weights_are_drawn_anew_with_norms_and_ties_as_published(tmp_path: Path) -> None:
    Qwen2Config(**SHAPE, tie_word_embeddings=True).save_pretrained(tmp_path)
    drawn = Options(device="cpu", dtype="float32")
    model, again = (random_model(str(tmp_path), drawn).requires_grad_(False) for _ in range(2))
    layer = model.model.layers[0]
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert bool((layer.input_layernorm.weight == 1).all())
    assert bool((layer.self_attn.q_proj.bias == 0).all())
    assert 0.015 < float(layer.mlp.up_proj.weight.std()) < 0.025
    assert torch.equal(layer.mlp.up_proj.weight, again.model.layers[0].mlp.up_proj.weight)
    usual = type(model)(model.config)
    assert torch.equal(model.model.rotary_emb.inv_freq, usual.model.rotary_emb.inv_freq)


def test_the_8b_shape_and_what_a_pass_reads(options: Options) -> None:
    assert streamed_bytes("llama-8b") == 2 * (8_030_261_248 - 128256 * 4096)
    assert prefill_flops("llama-8b", 4096) == pytest.approx(2 * 6.98e9 * 4096, rel=0.1)
    engine = Engine(options.models[0], options, [].append)
    assert engine.pass_bytes == 2 * streamed_bytes(options.models[0]), "float32"
    assert engine.kv_token_bytes == 2 * 2 * 2 * 16 * 4
    assert Ceilings(3.0, 2.0, 1.0).bytes_per_s == 3.0


def test_an_iteration_is_a_gap_while_all_sequences_decode() -> None:
    first, second = [1.0, 2.0, 3.0, 4.0, 9.0], [2.0, 3.0, 4.0]
    assert gaps_of([first, second]) == [1.0, 1.0, 1.0, 1.0]
    assert gaps_of([[1.0, 2.0], [3.0, 5.0]]) == [2.0], "they never decode together"


def test_latencies_are_of_complete_requests() -> None:
    answers = [Answer(1.0, [1.5, 1.6, 1.7]), Answer(2.0, [2.1])]
    row = Found(10.0, answers, 3).latencies()
    assert (row["requests"], row["unfinished"]) == (2, 1)
    assert row["ttft_p50_ms"] == pytest.approx(500) and row["tpot_p99_ms"] == pytest.approx(100)
    assert "tpot_p50_ms" not in Found(10.0, answers[1:], 3).latencies()


def test_a_table_has_the_columns_of_its_rows() -> None:
    table = as_table([{"model": "m", "ms": 1.0}, {"model": "m", "problem": "a|b\nc"}])
    assert table == [
        "| model | ms | problem |",
        "|---|---|---|",
        "| m | 1.000 |  |",
        "| m |  | a/b c |",
    ]


def test_a_look_inside_prints_every_variant(
    options: Options, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    from benchmarks.gpu import tune
    from tandem.model.gpu import thin

    monkeypatch.setattr(tune, "ROWS", (1, 3))
    (name,) = options.models
    engine, before = Engine(name, options, lambda _: None), thin.AHEAD_BYTES
    tuning = tune.Tuning(engine, replace(options, budget_s=1e9), Unused)
    tuning.run()
    printed = capsys.readouterr().out
    for variant in (*tune.QUICK, *tune.COMPILED, tune.NOT_EARLY):
        assert variant.name in printed
    assert "no early start, 3 adapters: kernels" in printed
    assert before == thin.AHEAD_BYTES


class Unused:
    """A `Capture` for a model that computes layer by layer."""

    def record(self, call):
        """See `Capture`."""
        raise AssertionError("a CPU model has no pass to record")
