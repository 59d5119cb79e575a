"""Grouped LoRA against the plain formula, and the table of adapters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tiny_models
from devices import TRITON_DEVICE
from fake_capture import FakeCapture
from tandem.model.gpu import lora
from tandem.model.gpu.adapters import TableUpdates, tried
from tandem.model.lora import EagerUpdates, LoraLayers, Segment, adaptable_linears
from tandem.model.lora_files import LinearShape, LoraWeights

pytestmark = pytest.mark.parametrize("device", [TRITON_DEVICE])
WIDTHS = {"q": 40, "k": 24, "v": 24}


class World:
    """Three layers over the same input, one table, adapters, and the plain formula."""

    def __init__(self, device, dtype=torch.float32, inputs=48):
        self.device, self.dtype, self.inputs = torch.device(device), dtype, inputs
        self.random = torch.Generator().manual_seed(0)
        shapes = {name: LinearShape(inputs, width) for name, width in WIDTHS.items()}
        self.model = nn.ModuleDict(
            {name: nn.Linear(inputs, width, bias=False) for name, width in WIDTHS.items()}
        ).to(self.device, dtype)
        self.updates = TableUpdates(self.device, dtype)
        self.layers = LoraLayers(self.model, shapes, self.updates)
        self.joint = self.layers.group([self.model[name] for name in WIDTHS])
        self.adapters = {}

    def randn(self, *size):
        return torch.randn(size, generator=self.random).to(self.device, self.dtype)

    def add(self, key, rank, names="qkv", scale=0.5):
        a = {name: self.randn(rank, self.inputs) / 8 for name in names}
        adapter = {
            name: LoraWeights(a[name], self.randn(WIDTHS[name], rank) / 4, scale) for name in names
        }
        self.adapters[key] = adapter
        self.layers.add(key, adapter)

    def formula(self, x, out, segments):
        wanted, column = out.double(), 0
        for name, width in WIDTHS.items():
            for each in segments:
                if (weights := self.adapters.get(each.key, {}).get(name)) is not None:
                    rows = x[each.start : each.stop].double()
                    update = rows @ weights.a.double().t() @ weights.b.double().t()
                    part = wanted[each.start : each.stop, column : column + width]
                    part += weights.scale * update
            column += width
        return wanted

    def check(self, rows, segments, activate=None):
        """Whether the joint update is the formula's."""
        x, out = self.randn(rows, self.inputs), self.randn(rows, sum(WIDTHS.values()))
        wanted = self.formula(x, out, segments)
        if activate is None:
            self.layers.activate(tuple(segments))
        else:
            activate()
        self.joint.update(x, out)
        close = 1e-5 if self.dtype == torch.float32 else 4e-3
        assert torch.allclose(out.double(), wanted, rtol=close, atol=close)


def consecutive(**rows):
    """Segments of these lengths, one after the other from row 1 on."""
    found, start = [], 1
    for key, count in rows.items():
        found.append(Segment(key, start, start + count))
        start += count
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_adapters_of_all_kinds_in_one_pass(device, dtype):
    world = World(device, dtype)
    world.add("small", 3)
    world.add("partly", 16, "qv", scale=-2.0)
    world.add("middle", 24, "k")
    world.check(40, consecutive(small=18, partly=1, middle=17))
    world.check(1, [Segment("partly", 0, 1)])


def test_ranks_that_one_program_does_not_compute(device):
    world = World(device)
    world.add("large", 70)
    world.add("small", 5)
    world.check(9, consecutive(large=4, small=4))


def test_inputs_are_split_where_programs_are_few(device):
    world = World(device, inputs=1100)
    world.add("a", 8)
    world.check(3, consecutive(a=2))


@pytest.mark.parametrize("programs", [1, 3, 7])
def test_programs_have_several_blocks_of_columns(device, monkeypatch, programs):
    monkeypatch.setattr(lora, "SHARES", lora.Shares(columns=16, expanding=programs))
    world = World(device)
    world.add("a", 8)
    world.add("b", 16, "qv")
    world.check(25, consecutive(a=20, b=1))
    reserved = world.layers.reserve(25)
    reserved.fill(segments := consecutive(b=3))
    world.check(25, segments, lambda: world.layers.activate_reserved(reserved))


def test_a_pass_of_many_rows_has_higher_tiles(device):
    world = World(device)
    world.add("a", 8)
    world.add("b", 8)
    assert world.updates.tiles(consecutive(a=100), 300).height == 64
    world.check(300, consecutive(a=130, b=1))


def test_without_adapters_nothing_happens(device):
    world = World(device)
    world.check(5, [])
    world.check(5, [Segment("nowhere", 0, 5)])
    world.add("a", 4, "")
    world.check(5, [Segment("a", 0, 5)])
    reserved = world.layers.reserve(5)
    world.check(5, [], lambda: world.layers.activate_reserved(reserved))


def test_outputs_may_have_other_columns_between(device):
    world = World(device)
    world.add("a", 8)
    segments = consecutive(a=3)
    world.layers.activate(tuple(segments))
    x, whole = world.randn(5, 48), world.randn(5, 100)
    before = whole.clone()
    wanted = world.formula(x, whole[:, 4:92], segments)
    world.joint.update(x, whole[:, 4:92])
    assert torch.allclose(whole[:, 4:92].double(), wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(whole[:, :4], before[:, :4]) and torch.equal(whole[:, 92:], before[:, 92:])


def test_matrices_that_kernels_cannot_read_are_copied(device):
    world = World(device)
    world.add("a", 8)
    plain = world.layers.nbytes
    own = world.adapters["a"]["q"]
    flat = torch.cat([own.a.new_zeros(1), own.a.flatten()])
    moved = {"q": LoraWeights(flat[1:].view(8, 48), own.b, own.scale)}
    world.adapters["b"] = moved
    world.layers.add("b", moved)
    assert world.layers.nbytes - plain == 2 * own.a.nbytes + own.b.nbytes
    world.check(8, consecutive(a=3, b=3))
    world.layers.drop("b")
    assert world.layers.nbytes == plain


def test_an_adapter_is_replaced_and_slots_are_used_again(device):
    world = World(device)
    world.add("a", 8)
    world.add("b", 8)
    world.check(8, consecutive(a=3, b=3))
    before = world.layers.generation
    world.add("a", 4, "q")
    world.check(8, consecutive(a=3, b=3))
    world.layers.drop("a")
    world.add("c", 16)
    assert world.updates.cut(consecutive(c=3, b=2), 16).tolist() == [[1, 3, 0, 2], [4, 2, 1, 2]]
    world.check(8, consecutive(c=3, b=3))
    assert world.layers.generation == before


def test_the_table_grows(device):
    world = World(device)
    first = world.layers.generation
    reserved = world.layers.reserve(4)
    world.add("0", 4)
    for number in range(1, 8):
        world.add(str(number), 4)
    assert world.layers.generation == first
    world.add("8", 4)
    assert world.layers.generation == first + 1
    with pytest.raises(AssertionError, match="reserve again"):
        reserved.fill([])
    world.check(12, consecutive(**{str(number): 1 for number in range(9)}))
    world.add("9", 17)
    assert world.layers.generation == first + 2
    world.check(12, consecutive(**{"3": 4, "9": 5}))


def test_a_group_that_is_made_late_finds_the_adapters(device):
    world = World(device)
    world.add("a", 4)
    world.joint = world.layers.group([world.model[name] for name in WIDTHS])
    world.check(8, consecutive(a=3))


def test_reserved_tiles_are_filled_for_each_pass(device):
    world = World(device)
    keys = [str(number) for number in range(5)]
    for key in keys:
        world.add(key, 4)
    reserved = world.layers.reserve(12)
    place = reserved.tiles.table.data_ptr()
    assert reserved.tiles.table.tolist() == [[0] * 4] * len(reserved.tiles.table)
    passes = [
        consecutive(**{"0": 11}),
        consecutive(**dict.fromkeys(keys, 2)),
        [],
        consecutive(**{"3": 1, "nowhere": 5, "2": 5}),
    ]
    for segments in passes:
        reserved.fill(segments)
        world.check(12, segments, lambda: world.layers.activate_reserved(reserved))
    assert reserved.tiles.table.data_ptr() == place
    world.layers.activate(())
    world.check(4, [])


def captured(device, call):
    """`call` as a captured pass: a function that does it again."""
    if device == "cpu":
        return FakeCapture().record(call)
    call()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def test_a_captured_pass_applies_what_was_filled_in(device):
    world = World(device)
    world.add("a", 4)
    world.add("b", 16, "qv")
    reserved = world.layers.reserve(6)
    x, out = world.randn(6, 48), world.randn(6, 88)
    before = out.clone()
    world.layers.activate_reserved(reserved)
    replay = captured(device, lambda: world.joint.update(x, out))
    world.layers.activate(())
    assert torch.equal(out, before)
    for segments in (consecutive(a=2, b=3), [], consecutive(b=1), consecutive(a=5)):
        reserved.fill(segments)
        out.copy_(before)
        replay()
        wanted = world.formula(x, before, segments)
        assert torch.allclose(out.double(), wanted, rtol=1e-5, atol=1e-5)
    world.add("a", 12)
    out.copy_(before)
    reserved.fill(segments)
    replay()
    wanted = world.formula(x, before, segments)
    assert torch.allclose(out.double(), wanted, rtol=1e-5, atol=1e-5)


def test_reserved_tiles_suffice_for_any_pass(device):
    world = World(device)
    for number in range(5):
        world.add(str(number), 4)
    for rows in (1, 3, 20, 100, 300):
        reserved = world.layers.reserve(rows)
        height, most = reserved.tiles.height, len(reserved.tiles.table)
        keys = [str(number) for number in range(min(5, rows))]
        # as uneven as can be: all but one are one row past a full tile
        lengths = [min(height + 1, 1 + (rows - len(keys)) // len(keys)) for _ in keys]
        lengths[-1] = rows - sum(lengths[:-1])
        segments = consecutive(**dict(zip(keys, lengths, strict=True)))
        assert len(world.updates.cut(segments, height)) <= most <= rows
        reserved.fill(segments)


def adapted(device, updates):
    """A tiny model, its layers, and adapters of all its linear layers and of some."""
    model = tiny_models.make_model("llama").to(device)
    linears = adaptable_linears(model.model, "model.")
    layers = LoraLayers(model, linears, updates)
    random = torch.Generator().manual_seed(1)

    def half(*size):
        return (torch.randn(size, generator=random) / 8).to(device).requires_grad_()

    for key, rank, part in (("all", 4, "proj"), ("some", 16, ".mlp.")):
        adapter = {
            name: LoraWeights(half(rank, shape.inputs), half(shape.outputs, rank), 2.0)
            for name, shape in linears.items()
            if part in name
        }
        layers.add(key, adapter)
    return model, layers


def test_a_models_hidden_states_are_those_of_the_eager_updates(device):
    tokens = torch.arange(3, 25, device=device)[None]
    found = []
    for updates in (TableUpdates(torch.device(device), torch.float32), EagerUpdates()):
        model, layers = adapted(device, updates)
        layers.activate((Segment("all", 4, 10), Segment("some", 10, 21)))
        with torch.no_grad():
            found.append(model.model(input_ids=tokens, use_cache=False).last_hidden_state)
    assert torch.allclose(found[0], found[1], rtol=1e-4, atol=1e-4)


def test_gradients_are_autograds(device):
    x = torch.randn(1, 5, 64, device=device)
    found = []
    for updates in (TableUpdates(torch.device(device), torch.float32), EagerUpdates()):
        model, layers = adapted(device, updates)
        layers.activate((Segment("all", 0, 5),))
        layer = model.get_submodule("model.layers.0.self_attn.q_proj")
        layer(x).square().sum().backward()
        weights = layer.weights("all")
        found.append((weights.a.grad, weights.b.grad))
    for ours, eager in zip(*found, strict=True):
        assert torch.equal(ours, eager) and ours.any()


def test_updates_are_tried_before_they_serve(device, monkeypatch):
    assert tried(torch.device(device), torch.float32).generation == 0
    monkeypatch.setattr("tandem.model.gpu.adapters.add_updates", lambda *given, settled: None)
    with pytest.raises(RuntimeError, match="wrong"):
        tried(torch.device(device), torch.float32)
