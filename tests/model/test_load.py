"""Loading from disk: progress, dtype, and checkpoints that are not whole."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

import tiny_models
from tandem.config import ModelConfig
from tandem.core.errors import InvalidRequest, UnsupportedModel
from tandem.model.attention.base import attend_once
from tandem.model.attention.sdpa import SdpaKernel
from tandem.model.linear import PackedLinear
from tandem.model.load import _device_kernel, load_model


@pytest.fixture
def folder(tmp_path):
    return tiny_models.save_model(tmp_path, "llama")


def test_progress_rises_to_one(folder):
    told = []
    load_model(ModelConfig(model=str(folder)), lambda text, share: told.append((text, share)))
    shares = [share for _, share in told]
    assert shares == sorted(shares) and shares[-1] == 1.0
    assert all(text for text, _ in told)


@pytest.mark.parametrize("compiled", [False, True])
def test_compiling_is_told(folder, monkeypatch, compiled):
    monkeypatch.setattr("tandem.model.kernels.compiled", lambda: compiled)
    told = []
    load_model(
        ModelConfig(model=str(folder), device="cpu"), lambda text, share: told.append((text, share))
    )
    assert any(text.startswith("compiling") for text, _ in told) is not compiled
    assert [share for _, share in told] == sorted(share for _, share in told)


@pytest.mark.parametrize(("name", "dtype"), [("auto", torch.float32), ("bfloat16", torch.bfloat16)])
def test_dtype_follows_the_setting(folder, name, dtype):
    loaded = load_model(ModelConfig(model=str(folder), dtype=name))
    assert loaded.dtype == dtype
    assert loaded.weight_bytes == loaded.num_parameters * dtype.itemsize


@pytest.mark.parametrize(("supported", "expected"), [(True, "bfloat16"), (False, "float32")])
def test_auto_is_float32_where_a_cpu_has_no_16_bit_arithmetic(
    folder, monkeypatch, supported, expected
):
    halved = AutoModelForCausalLM.from_pretrained(folder).bfloat16()
    halved.save_pretrained(folder)
    monkeypatch.setattr(
        "tandem.model.load.computes_in", lambda dtype: supported or dtype is torch.float32
    )
    model = load_model(ModelConfig(str(folder), device="cpu"))
    assert model.dtype is getattr(torch, expected)
    packed = [each for each in model.backbone.modules() if isinstance(each, PackedLinear)]
    if "packed:panels" in model.kernels:
        # Whatever the type of the arithmetic, the weights take the checkpoint's bytes (padded).
        values = sum(each.in_features * each.out_features for each in packed)
        assert 2 * values <= sum(each.nbytes for each in packed) < 3 * values
    assert load_model(ModelConfig(str(folder), device="cpu", dtype="bfloat16")).dtype is (
        torch.bfloat16
    )


def test_kernels_off_leaves_the_modules_as_they_are(folder):
    plain = load_model(ModelConfig(model=str(folder), device="cpu", kernels="off"))
    assert plain.kernels == "sdpa"
    assert not any(isinstance(module, PackedLinear) for module in plain.backbone.modules())
    packed = load_model(ModelConfig(model=str(folder), device="cpu"))
    assert "packed" in packed.kernels
    assert any(isinstance(module, PackedLinear) for module in packed.backbone.modules())
    # Adapters name the layers of the checkpoint, however these are computed.
    assert packed.lora.linears == plain.lora.linears
    with pytest.raises(InvalidRequest, match="kernels"):
        load_model(ModelConfig(model=str(folder), kernels="fast"))


@pytest.mark.gpu
def test_a_gpu_attends_by_triton(folder):
    assert load_model(ModelConfig(str(folder), device="cuda")).kernels.startswith(
        "triton+fused+packed"
    )


class Works(SdpaKernel):
    """In place of Triton's kernel."""


class LacksCompiler(SdpaKernel):
    def prepare(self, layout):
        raise subprocess.CalledProcessError(1, "cc")


@pytest.mark.parametrize("found", [Works, LacksCompiler])
def test_a_kernel_that_cannot_compile_is_not_chosen(monkeypatch, caplog, found):
    module = SimpleNamespace(TritonKernel=found)
    monkeypatch.setitem(sys.modules, "tandem.model.attention.triton_kernel", module)
    monkeypatch.setattr(
        "tandem.model.load.attend_once",
        lambda kernel, device, dtype: attend_once(kernel, torch.device("cpu"), dtype),
    )
    model = SimpleNamespace(device=torch.device("cuda"), dtype=torch.float32)
    works = found is Works
    assert type(_device_kernel(model)) is (Works if works else SdpaKernel)
    assert works is not ("not available" in caplog.text)


def test_a_checkpoint_without_some_weights_is_refused(folder):
    file = folder / "model.safetensors"
    weights = load_file(file)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r"lacks weights: model\.layers\.1\.mlp\.up_proj"):
        load_model(ModelConfig(model=str(folder)))


def test_weights_without_a_place_are_told(folder, caplog):
    file = folder / "model.safetensors"
    weights = load_file(file)
    weights["model.layers.1.mlp.up_proj.bias"] = torch.zeros(4)
    save_file(weights, file, metadata={"format": "pt"})
    load_model(ModelConfig(model=str(folder)))
    assert "has 1 weights for which the model has no place, such as model.layers.1" in caplog.text


def with_settings(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def with_index(folder, index):
    model = AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="100KB")
    (folder / "model.safetensors.index.json").write_text(index)


@pytest.mark.parametrize(
    ("breaks", "message"),
    [
        (partial(with_settings, num_attention_heads=0), "cannot serve"),
        (partial(with_settings, num_attention_heads=5), "number of attention heads"),
        (
            partial(with_settings, num_key_value_heads=1),
            r"config\.json: model\.layers\.0\.self_attn\.k_proj\.weight has the shape \[32, 64\]",
        ),
        (partial(with_settings, num_key_value_heads=0), "ZeroDivisionError"),
        (partial(with_settings, num_hidden_layers=0), "has no layers"),
        (partial(with_settings, vocab_size=10), "lm_head"),
        (partial(with_settings, hidden_act="wavy"), "KeyError: 'wavy'"),
        (partial(with_settings, hidden_size="64"), "expected int, got str"),
        (partial(with_index, index="{"), "JSONDecodeError"),
        (partial(with_index, index="[]"), "cannot load the weights"),
        (partial(with_index, index="{}"), "KeyError: 'weight_map'"),
        (
            partial(with_index, index='{"metadata": {}, "weight_map": {"a": "b.safetensors"}}'),
            r"b\.safetensors",
        ),
    ],
    ids=lambda value: str(value.keywords) if isinstance(value, partial) else value,
)
def test_a_checkpoint_that_makes_no_sense_is_one_clear_line(folder, breaks, message):
    breaks(folder)
    with pytest.raises(UnsupportedModel, match=message) as refused:
        load_model(ModelConfig(model=str(folder), kernels="off"))
    assert "\n" not in str(refused.value)


def test_a_negative_length_is_none(folder):
    with_settings(folder, max_position_embeddings=-5)
    with pytest.raises(InvalidRequest, match="names no maximum length"):
        load_model(ModelConfig(model=str(folder), kernels="off"))


@pytest.mark.parametrize(
    ("generation", "config", "tokenizer", "ends"),
    [
        ([7, 2], 2, "<b>", (7, 2, 4)),
        (None, 5, "<b>", (5, 4)),
        (3, [3, 9], None, (3, 9)),
        (None, None, "<a>", (3,)),
        (None, None, None, ()),
    ],
)
def test_all_that_any_file_calls_the_end_ends_an_answer(
    folder, generation, config, tokenizer, ends
):
    with_settings(folder, eos_token_id=config)
    GenerationConfig(eos_token_id=generation).save_pretrained(folder)
    if tokenizer:
        words = {f"<{letter}>": place + 3 for place, letter in enumerate("abc")}
        backend = Tokenizer(WordLevel(words, unk_token="<c>"))
        PreTrainedTokenizerFast(
            tokenizer_object=backend, eos_token=tokenizer, unk_token="<c>"
        ).save_pretrained(folder)
    loaded = load_model(ModelConfig(model=str(folder), kernels="off"))
    assert loaded.eos_token_ids == ends


def test_broken_weights_are_refused(folder):
    (folder / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(UnsupportedModel, match="cannot load the weights"):
        load_model(ModelConfig(model=str(folder)))
