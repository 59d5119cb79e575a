"""Whole layers in two kernel calls: equal values, and the parts one by one wherever that is due."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tandem.model import fused_layer, kernels
from tandem.model.attention.base import BatchLayout, LayerKV, PagedContext, SpanArrays
from tandem.model.attention.cpu import CpuKernel
from tandem.model.attention.interface import IMPLEMENTATION, register
from tandem.model.fuse import fuse_modules
from tandem.model.fused_layer import FusedLayer
from tandem.model.linear import pack_linears
from tandem.model.lora import LoraLayers, Segment, adaptable_linears
from tandem.model.lora_files import LoraWeights

pytestmark = pytest.mark.skipif(not kernels.amx_linear(), reason="no AMX")

MODELS: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "gemma": (GemmaConfig, GemmaForCausalLM),
}
BLOCK, KV_HEADS, DIM = 16, 2, 32
# Single rows, half and whole tiles, more than one slice of rows, mixes.
SPANS = [[1], [1] * 9, [1] * 20, [3, 1, 1, 40], [64] * 5, [600, 1]]


def make(name: str) -> Any:
    """Two layers; the inner width is longer than what the kernel takes in one slice."""
    torch.manual_seed(0)
    config, model_class = MODELS[name]
    sizes = {"hidden_size": 96, "intermediate_size": 1312, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 3 * KV_HEADS, "num_key_value_heads": KV_HEADS, "head_dim": DIM}
    model = model_class(config(vocab_size=160, **sizes, **heads)).bfloat16().eval()
    for parameter in model.requires_grad_(False).parameters():
        if parameter.dim() == 1:  # norms and biases, which start as constants
            parameter.add_(torch.randn_like(parameter) * 0.2)
    register()
    fuse_modules(model)
    linears = adaptable_linears(model.base_model, "model.")
    pack_linears(model)
    model.set_attn_implementation(IMPLEMENTATION)
    return model, linears


class ByParts(PagedContext):
    """A context that the layers do not know, so that they call their parts one by one."""


def run(model: Any, lengths: list[int], kind: type[PagedContext]) -> tuple[Tensor, list[LayerKV]]:
    """Hidden states and the cache after one pass over spans that start at various positions."""
    counts = np.array(lengths)
    starts = np.arange(len(lengths)) * 5
    width = -(-int((starts + counts).max()) // BLOCK)
    tables = np.random.default_rng(0).permutation(width * len(lengths))
    spans = SpanArrays(starts, counts, tables.reshape(len(lengths), width).astype(np.int32))
    layout, positions = BatchLayout.build(spans, BLOCK, torch.device("cpu"), torch.bfloat16)
    generator = torch.Generator().manual_seed(1)
    shape = (tables.size, BLOCK, KV_HEADS, DIM)
    cache = [
        LayerKV(*(torch.randn(shape, generator=generator).bfloat16() for _ in range(2)))
        for _ in range(2)
    ]
    tokens = torch.arange(len(positions)) % 150 + 3  # no padding token
    hidden = model.base_model(
        input_ids=tokens[None],
        position_ids=positions[None],
        use_cache=False,
        attention_context=kind(CpuKernel().prepare(layout), cache),
    ).last_hidden_state
    return hidden, cache


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the whole-block kernels that were called."""
    made: list[str] = []
    for name in ("attention_block", "mlp_block"):
        block = getattr(fused_layer, name)

        def counted(*args: Any, name: str = name, block: Any = block) -> Tensor:
            made.append(name)
            return block(*args)

        monkeypatch.setattr(fused_layer, name, counted)
    return made


@pytest.mark.parametrize("name", list(MODELS))
def test_blocks_equal_the_parts_bit_by_bit(name: str, calls: list[str]) -> None:
    model, _ = make(name)
    assert all(isinstance(layer, FusedLayer) for layer in model.model.layers)
    for lengths in SPANS:
        calls.clear()
        with torch.no_grad():
            whole, whole_cache = run(model, lengths, PagedContext)
            assert calls == ["attention_block", "mlp_block"] * 2
            parts, parts_cache = run(model, lengths, ByParts)
        assert len(calls) == 4
        assert parts.isfinite().all() and parts.abs().max() > 0.1
        assert torch.equal(whole, parts)
        for one, other in zip(whole_cache, parts_cache, strict=True):
            assert torch.equal(one.keys, other.keys) and torch.equal(one.values, other.values)


def test_an_adapter_acts_only_when_it_is_asked_for(calls: list[str]) -> None:
    model, linears = make("llama")
    with torch.no_grad():
        expected, _ = run(model, [4, 3], PagedContext)
    lora = LoraLayers(model, linears)
    name = "model.layers.1.mlp.down_proj"
    shape = linears[name]
    low = torch.randn(2, shape.inputs).bfloat16(), torch.randn(shape.outputs, 2).bfloat16()
    lora.add("a", {name: LoraWeights(*low, 1.0)})
    calls.clear()
    with torch.no_grad():
        assert torch.equal(run(model, [4, 3], PagedContext)[0], expected)
        assert len(calls) == 4
        lora.activate((Segment("a", 4, 7),))
        adapted, _ = run(model, [4, 3], PagedContext)
        assert len(calls) == 4
        assert torch.equal(adapted[:, :4], expected[:, :4])
        assert not torch.equal(adapted[:, 4:], expected[:, 4:])
        lora.activate(())
        assert torch.equal(run(model, [4, 3], PagedContext)[0], expected)
    assert len(calls) == 8


class Doubled(nn.Module):
    """A wrapper that the layers do not know."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.base(x)


@pytest.mark.parametrize("path", ["self_attn.k_proj", "self_attn.o_proj", "mlp.up_proj"])
def test_an_unknown_wrapper_counts(path: str, calls: list[str]) -> None:
    model, _ = make("qwen2")
    with torch.no_grad():
        before, _ = run(model, [5], PagedContext)
        calls.clear()
        part, _, child = path.partition(".")
        owner = model.model.layers[0].get_submodule(part)
        setattr(owner, child, Doubled(owner.get_submodule(child)))
        after, _ = run(model, [5], PagedContext)
    assert calls == ["attention_block", "mlp_block"]  # of the other layer
    assert not torch.equal(before, after)


def test_nothing_is_computed_by_blocks_where_a_gradient_is_wanted(calls: list[str]) -> None:
    model, _ = make("llama")
    with torch.enable_grad():
        run(model, [5], PagedContext)
    assert calls == []


def test_a_slot_outside_the_cache_is_refused() -> None:
    model, _ = make("llama")
    layer = model.model.layers[0]
    spans = SpanArrays(np.array([0]), np.array([1]), np.array([[0]], dtype=np.int32))
    layout, _ = BatchLayout.build(spans, BLOCK, torch.device("cpu"), torch.bfloat16)
    layout.slots.fill_(BLOCK)
    cache = LayerKV(*(torch.zeros(1, BLOCK, KV_HEADS, DIM).bfloat16() for _ in range(2)))
    context = PagedContext(CpuKernel().prepare(layout), [cache])
    angles = torch.ones(1, 1, DIM).bfloat16()
    x = torch.ones(1, 1, 96).bfloat16()
    with torch.no_grad(), pytest.raises(RuntimeError, match="outside the cache"):
        layer(x, position_embeddings=(angles, angles), attention_context=context)
    assert cache.keys.count_nonzero() == 0
