"""Whole layers on Triton's kernels: transformers' values, few launches, and parts where due."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import GemmaConfig, GemmaForCausalLM

from devices import TRITON_DEVICE
from tandem.model.attention.base import BatchLayout, LayerKV, PagedContext, SpanArrays
from tandem.model.attention.interface import IMPLEMENTATION, register
from tandem.model.fuse import LayerKernels, fuse_modules
from tandem.model.fused_layer import FusedLayer, adapt_layers
from tandem.model.linear import PlainWeight, pack_linears
from tandem.model.lora import LoraLayers, Segment, adaptable_linears
from tandem.model.lora_files import LoraWeights
from tiny_models import make_model

pytest.importorskip("triton")
from tandem.model.attention.triton_kernel import TritonKernel
from tandem.model.gpu import adapters
from tandem.model.gpu.adapters import TableUpdates
from tandem.model.gpu.launch import watched
from tandem.model.gpu.layer import TritonLayer
from tandem.model.gpu.lora import add_updates
from tandem.model.gpu.products import BUCKETS, ThinWeight, packed_layers
from tandem.model.gpu.rows import TritonRows
from tandem.model.gpu.thin import MOST_ROWS, Cut, Stripe, Workspace

pytestmark = pytest.mark.parametrize("device", [TRITON_DEVICE])
BLOCK = 16
LAYERS = ["llama", "mistral", "qwen2", "qwen3", "gemma"]
# Between the products of a layer whose rows are all decodes.
LAUNCHES = ["_normalise", "_turn_and_store", "_attend", "_normalise", "_gate"]


def plain(weight: Tensor, bias: Tensor | None) -> PlainWeight:
    """As on a device."""
    return PlainWeight(weight.detach(), bias)


def make(name: str, device: str) -> tuple[Any, Any, dict[str, Any]]:
    """The untouched model, the fused one, and the layers that adapters may have."""
    if name == "gemma":
        torch.manual_seed(0)
        sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
        model: Any = GemmaForCausalLM(GemmaConfig(vocab_size=160, **sizes, **heads))
        model.eval().requires_grad_(False)
    else:
        model = make_model(name)
    model.config._attn_implementation = "eager"
    model = model.to(device)
    original = copy.deepcopy(model)
    linears = adaptable_linears(model.base_model, "model.")
    report = fuse_modules(model, LayerKernels(TritonRows(), TritonLayer, plain))
    assert not report.kept
    pack_linears(model, plain)
    register()
    model.set_attn_implementation(IMPLEMENTATION)
    return original, model, linears


class ByParts(PagedContext):
    """A context that the layers do not know, so that they call their parts one by one."""


def run(
    model: Any, tokens: torch.Tensor, lengths: list[int], kind: type[PagedContext] = PagedContext
) -> tuple[torch.Tensor, list[str]]:
    """Hidden states of spans that each begin at position 0, and the kernels that were launched."""
    counts = np.array(lengths)
    width = -(-int(counts.max()) // BLOCK)
    tables = np.random.default_rng(0).permutation(width * len(lengths))
    spans = SpanArrays(counts * 0, counts, tables.reshape(len(lengths), width).astype(np.int32))
    config, device = model.config, tokens.device
    layout, positions = BatchLayout.build(spans, BLOCK, device, torch.float32)
    dim = model.model.layers[0].self_attn.head_dim
    shape = (tables.size, BLOCK, config.num_key_value_heads, dim)
    cache = [
        LayerKV(*(torch.zeros(shape, device=device) for _ in range(2)))
        for _ in range(config.num_hidden_layers)
    ]
    names = []

    def watch(kernel: Any, grid: Any, args: Any, meta: Any) -> None:
        names.append(kernel.fn.__name__)
        kernel[grid](*args, **meta)

    with torch.no_grad(), watched(watch):
        hidden = model.base_model(
            input_ids=tokens[None],
            position_ids=positions[None],
            use_cache=False,
            attention_context=kind(TritonKernel().prepare(layout), cache),
        ).last_hidden_state[0]
    return hidden, names


def expect(original: Any, tokens: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    with torch.no_grad():
        rows = [
            original.base_model(each[None]).last_hidden_state[0] for each in tokens.split(lengths)
        ]
    return torch.cat(rows)


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert (found - expected).abs().max() <= 2e-5 * expected.abs().max()


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_equals_the_original(device: str, name: str) -> None:
    original, model, _ = make(name, device)
    assert all(isinstance(layer, FusedLayer) for layer in model.model.layers)
    lengths = [5, 1]
    tokens = torch.arange(sum(lengths), device=device) * 7 % 150 + 3
    found, names = run(model, tokens, lengths)
    assert_close(found, expect(original, tokens, lengths))
    assert names.count("_turn_and_store") == len(model.model.layers)
    assert "_rotate" not in names


def test_launches_between_the_products(device: str) -> None:
    _, model, _ = make("qwen3", device)
    tokens = torch.arange(3, device=device) + 3
    _, names = run(model, tokens, [1, 1, 1])
    layers = len(model.model.layers)
    assert names == LAUNCHES * layers + ["_normalise"]


def test_thin_products_within_a_layer(device: str) -> None:
    original, model, _ = make("qwen2", device)
    workspace, cut = Workspace(torch.device(device)), Cut(Stripe(32, 32, 2, 4), 2)
    for layer in packed_layers(model.model):
        workspace.reserve(MOST_ROWS, layer.out_features, cut)
        layer.weights = ThinWeight(layer.weights, dict.fromkeys(BUCKETS, cut), workspace)
    tokens = torch.arange(7, device=device) * 5 + 3
    found, names = run(model, tokens, [4, 3])
    assert_close(found, expect(original, tokens, [4, 3]))
    assert names.count("_multiply") == 4 * len(model.model.layers)


def random_adapter(linears: Any, seed: int, device: str, leave: str) -> dict[str, LoraWeights]:
    """Updates of all layers whose name does not contain `leave`, about as large as the layers."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, shape in linears.items():
        if leave not in name:
            a = torch.randn(4, shape.inputs, generator=generator) * 0.2
            b = torch.randn(shape.outputs, 4, generator=generator) * 0.2
            found[name] = LoraWeights(a.to(device), b.to(device), 1.5)
    return found


def test_adapters_within_a_layer(device: str) -> None:
    _, model, linears = make("qwen2", device)
    lengths = [3, 1, 4]
    tokens = torch.arange(8, device=device) * 3 + 3
    base, _ = run(model, tokens, lengths)
    lora = LoraLayers(model, linears)
    without, names = run(model, tokens, lengths)
    assert "_turn_and_store" not in names  # nobody has said what adapts the joint products
    assert_close(without, base)
    adapt_layers(model, lora)
    lora.add("a", random_adapter(linears, 0, device, leave="k_proj"))
    lora.add("b", random_adapter(linears, 1, device, leave="mlp"))
    lora.activate((Segment("a", 0, 3), Segment("b", 4, 8)))
    found, names = run(model, tokens, lengths)
    assert names.count("_turn_and_store") == len(model.model.layers)
    parts, names = run(model, tokens, lengths, ByParts)
    assert "_turn_and_store" not in names
    assert_close(found, parts)
    assert_close(found[3:4], base[3:4])
    rows = (found - base).norm(dim=-1) / base.norm(dim=-1)
    assert (rows[:3] > 0.05).all() and (rows[4:] > 0.05).all()
    lora.activate(())
    assert_close(run(model, tokens, lengths)[0], base)


@pytest.mark.full
def test_updates_may_run_beside_our_products_only(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, model, linears = make("qwen2", device)
    layers = list(packed_layers(model.model))
    lora = LoraLayers(model, linears, TableUpdates(torch.device(device), torch.float32))
    adapt_layers(model, lora)
    lora.add("a", random_adapter(linears, 0, device, leave="k_proj"))
    tokens = torch.arange(7, device=device) * 5 + 3
    found: list[bool] = []

    def watched_updates(*given: Any, settled: bool) -> None:
        found.append(settled)
        add_updates(*given, settled=settled)

    monkeypatch.setattr(adapters, "add_updates", watched_updates)
    lora.activate((Segment("a", 1, 5),))
    plain, _ = run(model, tokens, [4, 3])
    products = 4 * len(model.model.layers)
    assert found == [False] * products
    workspace, cut = Workspace(torch.device(device)), Cut(Stripe(32, 32, 2, 4), 2)
    for layer in layers:
        workspace.reserve(MOST_ROWS, layer.out_features, cut)
        layer.weights = ThinWeight(layer.weights, dict.fromkeys(BUCKETS, cut), workspace)
    lora.activate((Segment("a", 1, 5),))
    thin, _ = run(model, tokens, [4, 3])
    assert_close(thin, plain)
    assert found == [False] * products + [True] * products


class Doubled(nn.Module):
    """A wrapper that the layers do not know."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.base(x)


@pytest.mark.parametrize("path", ["self_attn.k_proj", "mlp.down_proj"])
def test_an_unknown_wrapper_counts(device: str, path: str) -> None:
    original, model, _ = make("llama", device)
    for each in (original, model):
        owner_path, _, child = path.partition(".")
        owner = each.model.layers[0].get_submodule(owner_path)
        setattr(owner, child, Doubled(owner.get_submodule(child)))
    tokens = torch.arange(6, device=device) + 3
    found, names = run(model, tokens, [6])
    assert_close(found, expect(original, tokens, [6]))
    assert names.count("_turn_and_store") == len(model.model.layers) - 1


def test_nothing_is_computed_whole_where_a_gradient_is_wanted(device: str) -> None:
    _, model, _ = make("llama", device)
    layer = model.model.layers[0]
    called: list[bool] = []

    class Never(TritonLayer):
        def run(self, *given: Any) -> None:
            called.append(True)

    layer.whole = Never(layer.whole._parts)
    angles = torch.ones(1, 3, 16, device=device)
    x = torch.ones(1, 3, 64, device=device)
    for gradient in (True, False):
        with torch.set_grad_enabled(gradient), pytest.raises(AttributeError):
            layer(x, position_embeddings=(angles, angles), attention_context=PagedContext(None, []))  # type: ignore[arg-type]
        assert bool(called) is not gradient
