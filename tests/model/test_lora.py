"""Reading PEFT directories: what is loaded, what is refused, and what a base batch costs."""

from __future__ import annotations

import json
from codecs import BOM_UTF8

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import tiny_models
from tandem.core.errors import AdapterError
from tandem.model.lora import LoraLayers, Segment, adaptable_linears
from tandem.model.lora_files import LinearShape, read_lora

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def linears():
    model = tiny_models.make_model("llama")
    return adaptable_linears(model.model, "model.")


@pytest.fixture
def folder(tmp_path):
    return tiny_models.save_adapter(tmp_path, "llama", 1)


def read(folder, linears, **options):
    return read_lora(folder, linears, device=CPU, dtype=torch.float32, **options)


def change_config(folder, **changes):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def change_weights(folder, change):
    file = folder / "adapter_model.safetensors"
    weights = load_file(file)
    save_file(change(weights), file)


def test_every_target_gets_its_weights(folder, linears):
    adapter = read(folder, linears)
    assert set(adapter) == {
        f"model.layers.{i}.self_attn.{name}" for i in range(3) for name in ("q_proj", "v_proj")
    }
    weights = adapter["model.layers.0.self_attn.v_proj"]
    assert (weights.a.shape, weights.b.shape, weights.scale) == ((4, 64), (32, 4), 2.0)


@pytest.mark.parametrize(
    "lora",
    [
        {"target_modules": "all-linear"},
        {"target_modules": r".*layers\.[01]\.mlp\.(gate|up)_proj"},
        {"target_modules": ["q_proj", "mlp.up_proj"], "exclude_modules": ["layers.1.mlp.up_proj"]},
        {"target_modules": ["o_proj"], "layers_to_transform": [0, 2], "layers_pattern": "layers"},
        {"target_modules": ["k_proj"], "layers_to_transform": 1},
        {"target_modules": ["q_proj", "k_proj"], "rank_pattern": {r"layers\.1\..*q_proj": 2}},
        {"target_modules": ["q_proj"], "init_lora_weights": "gaussian", "lora_dropout": 0.1},
    ],
)
def test_targets_resolve_as_peft_resolves_them(tmp_path, linears, lora):
    folder = tiny_models.save_adapter(tmp_path, "llama", 2, **lora)
    keys = load_file(folder / "adapter_model.safetensors")
    assert len(read(folder, linears)) == len(keys) // 2 > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"bias": "lora_only"}, "bias='lora_only'"),
        ({"lora_bias": True}, "lora_bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"target_parameters": ["experts.up"]}, "target_parameters"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"something_new": 3}, "something_new"),
        ({"init_lora_weights": "pissa"}, "pissa"),
        ({"peft_type": "IA3"}, "IA3"),
        ({"r": 5}, "rank 4, but the configuration says 5"),
        ({"lora_alpha": "much"}, "lora_alpha 'much'"),
        ({"target_modules": ["q_proj"]}, "target_modules omits"),
        ({"target_modules": ["q_proj", "v_proj", "k_proj"]}, "no weights for it"),
        ({"target_modules": "("}, "no regular expression"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(folder, linears, changes, message):
    change_config(folder, **changes)
    with pytest.raises(AdapterError, match=message):
        read(folder, linears)


KEY = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"


def poison(weights):
    weights[KEY][1, 2] = float("nan")
    return weights


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (poison, "not finite"),
        (lambda w: {k: v for k, v in w.items() if k != KEY}, "lora_A or lora_B is missing"),
        (lambda w: w | {KEY: torch.zeros(4, 65)}, "another base model"),
        (lambda w: w | {KEY: torch.zeros(3, 64)}, "do not fit together"),
        (lambda w: w | {KEY: torch.zeros(4, 64, dtype=torch.int8)}, "not floating point"),
        (lambda w: {k.replace("layers.2", "layers.9"): v for k, v in w.items()}, "layers.9"),
        (lambda w: w | {"base_model.model.lm_head.lora_embedding_A": torch.zeros(1)}, "embedding"),
        (lambda w: {}, "holds no weights"),
    ],
)
def test_bad_weights_are_refused(folder, linears, change, message):
    change_weights(folder, change)
    with pytest.raises(AdapterError, match=message):
        read(folder, linears)


def test_missing_or_broken_files_are_refused(folder, linears):
    with pytest.raises(AdapterError, match=r"no adapter_config\.json"):
        read(folder / "nowhere", linears)
    (folder / "adapter_model.safetensors").write_bytes(b"not tensors")
    with pytest.raises(AdapterError, match="cannot read"):
        read(folder, linears)
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(AdapterError, match=r"no adapter_model\.safetensors"):
        read(folder, linears)
    (folder / "adapter_config.json").write_text("[1")
    with pytest.raises(AdapterError, match="cannot read"):
        read(folder, linears)


def test_a_byte_order_mark_before_the_configuration_is_skipped(folder, linears):
    plain = read(folder, linears)
    file = folder / "adapter_config.json"
    file.write_bytes(BOM_UTF8 + file.read_bytes())
    marked = read(folder, linears)
    assert set(marked) == set(plain)
    assert all(weights.scale == plain[module].scale for module, weights in marked.items())


def test_rank_limit(folder, linears):
    assert read(folder, linears, max_rank=4)
    with pytest.raises(AdapterError, match=r"adapters\.max_rank \(3\)"):
        read(folder, linears, max_rank=3)


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
def test_a_heads_adapter_is_refused(tmp_path, linears):
    folder = tiny_models.save_adapter(tmp_path, "llama", 4, target_modules=["q_proj", "lm_head"])
    with pytest.raises(AdapterError, match="lm_head"):
        read(folder, linears)


class Counting(torch.overrides.TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


def test_a_base_batch_costs_no_operation(folder, linears):
    plain = nn.Sequential(nn.Linear(6, 6, bias=False))
    x = torch.randn(1, 4, 6)
    with torch.no_grad(), Counting() as before:
        expected = plain(x)
    layers = LoraLayers(plain, {"0": LinearShape(6, 6)})
    with torch.no_grad(), Counting() as after:
        found = plain(x)
    assert torch.equal(found, expected)
    assert after.calls == before.calls > 0
    assert "a" not in layers


def test_rows_outside_of_a_segment_keep_their_bits(folder, linears):
    model = tiny_models.make_model("llama")
    layers = LoraLayers(model, linears)
    layers.add("a", read(folder, linears))
    projection = model.get_submodule("model.layers.0.self_attn.q_proj")
    x = torch.randn(1, 6, 64)
    with torch.no_grad():
        base = projection(x)
        layers.activate((Segment("a", 2, 5),))
        mixed = projection(x)
    changed = (base != mixed).any(-1)[0].tolist()
    assert changed == [False, False, True, True, True, False]
    layers.drop("a")
    assert "a" not in layers
    with torch.no_grad():
        assert torch.equal(projection(x), base)


def test_an_adapter_takes_the_place_of_the_whole_one_before(folder, linears):
    layers = LoraLayers(tiny_models.make_model("llama"), linears)
    whole = read(folder, linears)
    layers.add("a", whole)
    before = layers.nbytes
    layers.add("a", {name: whole[name] for name in list(whole)[:1]})
    assert 0 < layers.nbytes < before


def test_layers_of_single_experts_are_not_adaptable():
    expert = nn.Module()
    expert.gate = nn.Linear(2, 2)
    experts = nn.ModuleDict({"experts": nn.ModuleList([expert]), "shared_expert": nn.Linear(2, 3)})
    assert set(adaptable_linears(experts, "m.")) == {"m.shared_expert"}
