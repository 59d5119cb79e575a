"""Whole layers in two kernel calls: equal values, and the parts one by one wherever that is due.

With tiles in bfloat16 where there is AMX, and with panels in float32 everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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
from tandem.model.fuse import cpp_kernels, fuse_modules
from tandem.model.fused_layer import FusedLayer
from tandem.model.kernels.layer import Exports
from tandem.model.linear import Pack, PanelWeight, pack, pack_linears
from tandem.model.lora import LoraLayers, Segment, adaptable_linears
from tandem.model.lora_files import LinearShape, Lora, LoraWeights

amx = pytest.mark.skipif(not kernels.amx_linear(), reason="no AMX")
pytestmark = pytest.mark.skipif(not kernels.status().available, reason="no C++ compiler")

MODELS: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "gemma": (GemmaConfig, GemmaForCausalLM),
    "wide": (LlamaConfig, LlamaForCausalLM),
}
BLOCK, KV_HEADS, DIM = 16, 2, 32
# Single rows, half and whole tiles, more than one slice of rows, mixes.
SPANS = [[1], [1] * 9, [1] * 20, [3, 1, 1, 40], [64] * 5, [600, 1]]


@dataclass(frozen=True)
class Maker:
    """Makes models whose layers are packed in one way."""

    dtype: torch.dtype
    pack: Pack
    noise: float = 0.0  # added to the weights, so that bfloat16 does not have their values

    def __call__(self, name: str) -> Any:
        """Two layers; the inner width is longer than what a kernel takes in one slice, that of
        `wide` too."""
        torch.manual_seed(0)
        config, model_class = MODELS[name]
        sizes = {"hidden_size": 1248 if name == "wide" else 96}
        sizes |= {"intermediate_size": 1312, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 3 * KV_HEADS, "num_key_value_heads": KV_HEADS}
        options = {"vocab_size": 160, "head_dim": DIM, **sizes, **heads}
        model = model_class(config(**options)).bfloat16().to(self.dtype).eval()
        for parameter in model.requires_grad_(False).parameters():
            if parameter.dim() == 1:  # norms and biases, which start as constants
                parameter.add_(torch.randn_like(parameter) * 0.2)
            elif self.noise:
                parameter.add_(torch.randn_like(parameter) * self.noise)
        register()
        linears = adaptable_linears(model.base_model, "model.")
        fuse_modules(model, cpp_kernels(self.pack))
        pack_linears(model, self.pack)
        model.set_attn_implementation(IMPLEMENTATION)
        return model, linears


MAKERS = {
    "amx": pytest.param(Maker(torch.bfloat16, pack), marks=amx),
    "panels": Maker(torch.float32, PanelWeight),
    "panels-32": Maker(torch.float32, PanelWeight, noise=1e-5),
    "panels-16": Maker(torch.bfloat16, PanelWeight),
}


@pytest.fixture(params=MAKERS.values(), ids=MAKERS.keys())
def make(request: pytest.FixtureRequest) -> Maker:
    maker: Maker = request.param
    return maker


class ByParts(PagedContext):
    """A context that the layers do not know, so that they call their parts one by one."""


def run(
    model: Any, lengths: list[int], kind: type[PagedContext], wanted: Tensor | None = None
) -> tuple[Tensor, list[LayerKV]]:
    """Hidden states and the cache after one pass over spans that start at various positions."""
    counts = np.array(lengths)
    starts = np.arange(len(lengths)) * 5
    width = -(-int((starts + counts).max()) // BLOCK)
    tables = np.random.default_rng(0).permutation(width * len(lengths))
    spans = SpanArrays(starts, counts, tables.reshape(len(lengths), width).astype(np.int32))
    layout, positions = BatchLayout.build(spans, BLOCK, torch.device("cpu"), model.dtype)
    generator = torch.Generator().manual_seed(1)
    shape = (tables.size, BLOCK, KV_HEADS, DIM)
    cache = [
        LayerKV(*(torch.randn(shape, generator=generator).to(model.dtype) for _ in range(2)))
        for _ in range(2)
    ]
    tokens = torch.arange(len(positions)) % 150 + 3  # no padding token
    hidden = model.base_model(
        input_ids=tokens[None],
        position_ids=positions[None],
        use_cache=False,
        attention_context=kind(CpuKernel().prepare(layout), cache, wanted),
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
def test_blocks_equal_the_parts_bit_by_bit(make: Maker, name: str, calls: list[str]) -> None:
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


@pytest.mark.parametrize("name", ["qwen2", "gemma"])
@pytest.mark.parametrize("lengths", SPANS)
@pytest.mark.parametrize("every", [1, 7, 0])
def test_only_wanted_rows_leave_the_last_layer(
    make: Maker, name: str, lengths: list[int], every: int
) -> None:
    model, _ = make(name)
    rows = torch.arange(sum(lengths))
    wanted = rows[every - 1 :: every] if every else rows[:0]
    with torch.no_grad():
        all_rows, all_cache = run(model, lengths, PagedContext)
        some, some_cache = run(model, lengths, PagedContext, wanted)
    assert some.shape == all_rows.shape
    assert torch.equal(some[:, wanted], all_rows[:, wanted])
    others = rows[~torch.isin(rows, wanted)]
    assert some[:, others].count_nonzero() == 0
    for one, other in zip(some_cache, all_cache, strict=True):
        assert torch.equal(one.keys, other.keys) and torch.equal(one.values, other.values)


def test_an_adapter_acts_only_when_it_is_asked_for(make: Maker, calls: list[str]) -> None:
    model, linears = make("llama")
    with torch.no_grad():
        expected, _ = run(model, [4, 3], PagedContext)
    lora = LoraLayers(model, linears)
    name = "model.layers.1.mlp.down_proj"
    shape = linears[name]
    low = [torch.randn(size).to(make.dtype) for size in ((2, shape.inputs), (shape.outputs, 2))]
    lora.add("a", {name: LoraWeights(*low, 1.0)})
    calls.clear()
    with torch.no_grad():
        assert torch.equal(run(model, [4, 3], PagedContext)[0], expected)
        assert len(calls) == 4
        lora.activate((Segment("a", 4, 7),))
        adapted, _ = run(model, [4, 3], PagedContext)
        assert len(calls) == 8
        assert torch.equal(adapted[:, :4], expected[:, :4])
        assert not torch.equal(adapted[:, 4:], expected[:, 4:])
        lora.activate(())
        assert torch.equal(run(model, [4, 3], PagedContext)[0], expected)
    assert len(calls) == 12


# Rank, factor and the projections that each adapter has; in layer 1 alone for the last one.
ADAPTERS: dict[str, tuple[int, float, tuple[str, ...]]] = {
    "all": (4, 2.0, ("q", "k", "v", "o", "gate", "up", "down")),
    "wide": (40, 0.3, ("q", "up", "down")),
    "odd": (5, 1.7, ("v", "o", "gate")),
    "late": (16, 1.0, ("k", "up")),
}


def make_lora(linears: Mapping[str, LinearShape], kind: str, seed: int, dtype: torch.dtype) -> Lora:
    """Updates about as large as what the layers compute."""
    rank, scale, names = ADAPTERS[kind]
    generator = torch.Generator().manual_seed(seed)
    found: Lora = {}
    for name, shape in linears.items():
        short = name.rpartition(".")[2].removesuffix("_proj")
        if short not in names or (kind == "late" and ".layers.0." in name):
            continue
        a = torch.randn(rank, shape.inputs, generator=generator) / shape.inputs**0.5
        b = torch.randn(shape.outputs, rank, generator=generator) * 0.5 / rank**0.5 / scale
        found[name] = LoraWeights(a.to(dtype), b.to(dtype), scale)
    return found


def cut(lengths: list[int], keys: list[str]) -> tuple[Segment, ...]:
    """One segment a span, the spans taking `keys` in turns; an empty one is no adapter."""
    segments, first = [], 0
    for index, length in enumerate(lengths):
        if key := keys[index % len(keys)]:
            segments.append(Segment(key, first, first + length))
        first += length
    return tuple(segments)


def row_errors(found: Tensor, expected: Tensor) -> Tensor:
    """Distance of each row of [1, T, hidden] relative to its length."""
    return ((found - expected).float().norm(dim=-1) / expected.float().norm(dim=-1))[0]


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma"])
@pytest.mark.parametrize("lengths", SPANS)
@pytest.mark.parametrize("keys", [["all"], ["", "wide", "odd"], ["late", "all", "", "odd"]])
def test_adapters_within_the_blocks(
    make: Maker, name: str, lengths: list[int], keys: list[str], calls: list[str]
) -> None:
    model, linears = make(name)
    lora = LoraLayers(model, linears)
    for seed, kind in enumerate(ADAPTERS):
        lora.add(kind, make_lora(linears, kind, seed, make.dtype))
    with torch.no_grad():
        base, _ = run(model, lengths, PagedContext)
        segments = cut(lengths, keys)
        lora.activate(segments)
        calls.clear()
        whole, whole_cache = run(model, lengths, PagedContext)
        assert len(calls) == 4
        parts, parts_cache = run(model, lengths, ByParts)
    assert len(calls) == 4
    adapted = torch.zeros(whole.shape[1], dtype=torch.bool)
    for segment in segments:
        adapted[segment.start : segment.stop] = True
    # Rows without adapter keep their bits; the others differ from the parts by roundings alone: a
    # percent as a rule, of two layers in bfloat16.
    assert torch.equal(whole[:, ~adapted], base[:, ~adapted])
    assert bool((row_errors(whole, parts) < 0.04).all())
    assert bool((row_errors(whole, base)[adapted] > 0.06).all())
    for one, other in zip(whole_cache, parts_cache, strict=True):
        for a, b in ((one.keys, other.keys), (one.values, other.values)):
            assert (a - b).float().norm() < 0.01 * b.float().norm()


def test_an_adapter_that_is_put_again_or_dropped_is_not_remembered(make: Maker) -> None:
    model, linears = make("llama")
    lora = LoraLayers(model, linears)
    with torch.no_grad():
        lora.add("a", make_lora(linears, "all", 0, make.dtype))
        lora.activate((Segment("a", 0, 5),))
        before, _ = run(model, [5], PagedContext)
        nbytes = lora.nbytes
        lora.add("a", make_lora(linears, "all", 1, make.dtype))
        after, _ = run(model, [5], PagedContext)
        assert lora.nbytes == nbytes
        assert bool((row_errors(after, before) > 0.1).all())
        assert bool((row_errors(after, run(model, [5], ByParts)[0]) < 0.02).all())
        lora.drop("a")
        assert lora.nbytes == 0
        lora.add("a", make_lora(linears, "odd", 0, make.dtype))
        third, _ = run(model, [5], PagedContext)
        assert bool((row_errors(third, run(model, [5], ByParts)[0]) < 0.02).all())


def test_rows_with_an_adapter_do_not_depend_on_the_others(make: Maker) -> None:
    model, linears = make("qwen2")
    lora = LoraLayers(model, linears)
    lora.add("all", make_lora(linears, "all", 0, make.dtype))
    lora.add("odd", make_lora(linears, "odd", 1, make.dtype))
    with torch.no_grad():
        lora.activate(cut([40], ["all"]))
        alone, _ = run(model, [40], PagedContext)
        lora.activate(cut([40, 1, 33], ["all", "odd", ""]))
        together, _ = run(model, [40, 1, 33], PagedContext)
    # The spans' blocks differ, their keys and values do not.
    assert torch.equal(together[:, :40], alone)


class Doubled(nn.Module):
    """A wrapper that the layers do not know."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.base(x)


@pytest.mark.parametrize("path", ["self_attn.k_proj", "self_attn.o_proj", "mlp.up_proj"])
def test_an_unknown_wrapper_counts(make: Maker, path: str, calls: list[str]) -> None:
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


def test_nothing_is_computed_by_blocks_where_a_gradient_is_wanted(
    make: Maker, calls: list[str]
) -> None:
    model, _ = make("llama")
    with torch.enable_grad():
        run(model, [5], PagedContext)
    assert calls == []


@amx
def test_gate_and_up_of_some_rows_are_exported() -> None:
    model, _ = Maker(torch.bfloat16, pack)("qwen2")
    layer = model.model.layers[0]
    weights = layer.whole.current().weights[1]
    for rows in (7, 70):
        x = torch.randn(1, rows, 96).bfloat16()
        normal = layer.post_attention_layernorm(x[0])
        joined = torch.cat([layer.mlp.gate_proj(normal), layer.mlp.up_proj(normal)], dim=-1)
        tiles = [torch.full((3, 2 * 1312 // 32, 32, 32), 9.0).bfloat16() for _ in range(2)]
        exports = Exports([1, 4, 30, 5, rows, 0], tiles)
        out = fused_layer.mlp_block(x, weights, exports=exports)
        assert torch.equal(out, fused_layer.mlp_block(x, weights))
        first, second = (each.transpose(1, 2).flatten(0, 1).flatten(1) for each in tiles)
        assert torch.equal(first[30:33], joined[1:4])
        assert torch.equal(second[: rows - 5], joined[5:])
        assert (first[:30] == 9.0).all() and (first[33:] == 9.0).all()
        assert (second[rows - 5 :] == 9.0).all()
        bad = [[0, 4], [0, rows + 1, 0], [4, 3, 0], [0, 4, 93], [0, 4, -1]]
        for ranges in bad:
            with pytest.raises(RuntimeError, match="export"):
                fused_layer.mlp_block(x, weights, exports=Exports(ranges, tiles[:1]))


def test_a_slot_outside_the_cache_is_refused(make: Maker) -> None:
    model, _ = make("llama")
    layer = model.model.layers[0]
    spans = SpanArrays(np.array([0]), np.array([1]), np.array([[0]], dtype=np.int32))
    layout, _ = BatchLayout.build(spans, BLOCK, torch.device("cpu"), make.dtype)
    layout.slots.fill_(BLOCK)
    cache = LayerKV(*(torch.zeros(1, BLOCK, KV_HEADS, DIM).to(make.dtype) for _ in range(2)))
    context = PagedContext(CpuKernel().prepare(layout), [cache])
    angles = torch.ones(1, 1, DIM).to(make.dtype)
    x = torch.ones(1, 1, 96).to(make.dtype)
    with torch.no_grad(), pytest.raises(RuntimeError, match="outside the cache"):
        layer(x, position_embeddings=(angles, angles), attention_context=context)
    assert cache.keys.count_nonzero() == 0
