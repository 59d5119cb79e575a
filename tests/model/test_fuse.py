"""Fused models against the untouched ones: outputs, gradients, wrapped projections, refusals."""

from __future__ import annotations

import copy
import weakref
from inspect import signature
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GemmaConfig, GemmaForCausalLM
from transformers.cache_utils import DynamicCache

from tandem.model import fuse, kernels
from tandem.model.fuse import (
    FusedAttention,
    FusedMlp,
    FusedRmsNorm,
    cpp_kernels,
    fuse_modules,
)
from tandem.model.linear import pack_linears
from tiny_models import make_model

pytestmark = pytest.mark.skipif(
    not kernels.status().available, reason=f"no kernels: {kernels.status().reason}"
)
KNOWN = ["llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3"]
TOKENS = torch.arange(3, 30)[None]


def make(name: str, dtype: torch.dtype = torch.float32) -> Any:
    if name == "gemma":
        torch.manual_seed(0)
        sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
        model: Any = GemmaForCausalLM(GemmaConfig(vocab_size=160, **sizes, **heads))
    else:
        model = make_model(name)
    model.config._attn_implementation = "eager"
    return model.to(dtype).eval().requires_grad_(False)


@pytest.mark.parametrize("name", KNOWN)
def test_fused_and_packed_equals_the_original(name: str) -> None:
    model = make(name)
    original = copy.deepcopy(model)
    report = fuse_modules(model, cpp_kernels())
    pack_linears(model)
    assert report.kept == []
    layers = model.config.num_hidden_layers
    kinds = [type(module) for module in model.modules()]
    assert kinds.count(FusedAttention) == kinds.count(FusedMlp) == layers
    assert kinds.count(FusedRmsNorm) >= 2 * layers + 1
    assert not [x for x in model.modules() if "RMSNorm" in type(x).__name__ or type(x) is nn.Linear]
    with torch.no_grad():
        expected, actual = original(TOKENS).logits, model(TOKENS).logits
    assert (actual - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("name", ["qwen2", "gemma3"])
def test_bfloat16_stays_as_close_as_the_dtype_allows(name: str) -> None:
    exact = make(name)
    model = copy.deepcopy(exact).bfloat16()
    with torch.no_grad():
        expected = exact(TOKENS).logits
        plain = (model(TOKENS).logits - expected).abs().mean()
        fuse_modules(model, cpp_kernels())
        pack_linears(model)
        fused = (model(TOKENS).logits - expected).abs().mean()
    assert fused <= 1.3 * plain


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2"])
def test_gradients_equal_the_original(name: str) -> None:
    model = make(name)
    original = copy.deepcopy(model)
    fuse_modules(model, cpp_kernels())
    pack_linears(model)
    gradients = []
    for each in (original, model):
        inputs = each.get_input_embeddings()(TOKENS).detach().requires_grad_()
        logits = each(inputs_embeds=inputs).logits
        logits.log_softmax(-1)[..., 7].sum().backward()
        gradients.append(inputs.grad)
    expected, actual = gradients
    assert expected.abs().max() > 0
    assert (actual - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_norm_weight_can_be_trained() -> None:
    model = make("llama")
    fuse_modules(model, cpp_kernels())
    norm = model.model.norm
    norm.weight.requires_grad_()
    model(TOKENS).logits.sum().backward()
    assert norm.weight.grad.abs().sum() > 0


class Shifted(nn.Module):
    """Stands for an adapter: wraps one projection and adds a little."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 0.1 * x.mean(-1, keepdim=True)


PROJECTIONS = [
    ("self_attn", "q_proj"),
    ("self_attn", "v_proj"),
    ("self_attn", "o_proj"),
    ("mlp", "gate_proj"),
    ("mlp", "down_proj"),
]


@pytest.mark.parametrize(("part", "name"), PROJECTIONS)
def test_a_wrapped_projection_counts(part: str, name: str) -> None:
    model = make("qwen2")
    original = copy.deepcopy(model)
    fuse_modules(model, cpp_kernels())
    pack_linears(model)
    with torch.no_grad():
        unwrapped = model(TOKENS).logits
        for each in (original, model):
            owner = each.model.layers[1].get_submodule(part)
            setattr(owner, name, Shifted(owner.get_submodule(name)))
        expected, actual = original(TOKENS).logits, model(TOKENS).logits
    assert (expected - unwrapped).abs().max() > 1e-3 * expected.abs().max()
    assert (actual - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_fused_attention_uses_a_cache() -> None:
    model = make("llama")
    whole = model(TOKENS).logits
    fuse_modules(model, cpp_kernels())
    # Its name changed with transformers 5.24.
    name = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"
    given = {name: DynamicCache(config=model.config)}
    with torch.no_grad():
        model(TOKENS[:, :20], **given)
        last = model(TOKENS[:, 20:21], **given).logits
    torch.testing.assert_close(last[0, 0], whole[0, 20], rtol=1e-4, atol=1e-4)


def test_a_module_that_differs_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("llama")
    monkeypatch.setattr(kernels, "silu_mul", lambda gate, up: gate * up)
    report = fuse_modules(model, cpp_kernels())
    assert report.kept == [f"model.layers.{i}.mlp" for i in range(model.config.num_hidden_layers)]
    assert not [module for module in model.modules() if isinstance(module, FusedMlp)]


def test_unknown_classes_and_other_activations_stay() -> None:
    model = make("olmo2")
    before = [type(module) for module in model.modules()]
    report = fuse_modules(model, cpp_kernels())
    assert report == fuse.FuseReport()
    assert [type(module) for module in model.modules()] == before
    relu = make("llama")
    for layer in relu.model.layers:
        layer.mlp.act_fn = nn.ReLU()
    assert "LlamaMLP" not in fuse_modules(relu, cpp_kernels()).replaced


def test_nothing_is_fused_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = kernels.KernelStatus(False, None, "none")
    monkeypatch.setattr(kernels, "status", lambda: missing)
    model = make("llama")
    assert fuse_modules(model, cpp_kernels()) == fuse.FuseReport()


def test_the_weights_of_one_module_at_most_exist_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("llama")
    replaced = [weakref.ref(each.mlp.gate_proj.weight) for each in model.model.layers]
    replaced += [weakref.ref(each.self_attn.q_proj.weight) for each in model.model.layers]
    agrees, alive = fuse._agrees, []

    def watched(original: Any, fused: nn.Module) -> bool:
        if isinstance(fused, FusedMlp | FusedAttention):
            alive.append(sum(each() is not None for each in replaced))
        return agrees(original, fused)

    monkeypatch.setattr(fuse, "_agrees", watched)
    fuse_modules(model, cpp_kernels())
    assert alive == list(range(len(replaced), 0, -1))
    assert not any(each() is not None for each in replaced)
