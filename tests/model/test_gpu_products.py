"""Products of few rows: every cut against the plain formula, and which of them is chosen."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from devices import CUDA, TRITON_DEVICE
from tandem.model.linear import LinearGroup, PackedLinear, PlainWeight

pytest.importorskip("triton")
from tandem.model.gpu import products
from tandem.model.gpu.products import ThinWeight, candidates, tune_products
from tandem.model.gpu.thin import MOST_ROWS, Cut, Stripe, Workspace, multiply

# Small for the interpreter.
STRIPE = Stripe(32, 32, 2, 4)


def random(*shape, seed=0, dtype=torch.float32, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cpu").to(device=device, dtype=dtype)


@pytest.mark.parametrize("device", [TRITON_DEVICE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("rows", [1, 5, 20, 64])
@pytest.mark.parametrize(
    ("shape", "parts"), [((64, 96), 1), ((70, 130), 3), ((33, 200), 4), ((40, 60), 16)]
)
def test_a_cut_product(device, dtype, rows, shape, parts):
    outputs, inputs = shape
    given = {"dtype": dtype, "device": device}
    x, weight = random(rows, inputs + 3, **given)[:, :inputs], random(*shape, seed=1, **given)
    bias = random(outputs, seed=2, **given)
    residual = random(rows, outputs, seed=3, **given)
    cut, workspace = Cut(STRIPE, parts), Workspace(torch.device(device))
    workspace.reserve(rows, outputs, cut)
    product = linear(x.double(), weight.double())
    tolerance = (
        {"rtol": 1e-5, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 2e-3, "atol": 0.02}
    )
    for has_bias in (False, True):
        for has_residual in (False, True):
            found = multiply(
                x, weight, bias if has_bias else None, residual if has_residual else None,
                cut, workspace,
            )  # fmt: skip
            expected = (product + bias.double() if has_bias else product).to(dtype)
            expected = residual + expected if has_residual else expected
            torch.testing.assert_close(found, expected, **tolerance)
    again = multiply(x, weight, bias, residual, cut, workspace)
    assert torch.equal(again, found)
    assert workspace.counters.count_nonzero() == 0


@pytest.mark.parametrize("device", [TRITON_DEVICE])
def test_a_thin_weight_takes_few_rows_and_leaves_the_others(device, monkeypatch):
    calls = []

    def counted(x, *others):
        calls.append(len(x))
        return multiply(x, *others)

    monkeypatch.setattr(products, "multiply", counted)
    plain = PlainWeight(random(48, 64, device=device), random(48, seed=1, device=device))
    workspace = Workspace(torch.device(device))
    cut = Cut(STRIPE, 2)
    workspace.reserve(MOST_ROWS, 48, cut)
    weight = ThinWeight(plain, {1: None, 16: cut, 32: None, MOST_ROWS: cut}, workspace)
    residual = random(1, 80, 48, seed=3, device=device)
    for rows, thin in (
        (0, False),
        (1, False),
        (2, True),
        (16, True),
        (17, False),
        (33, True),
        (65, False),
    ):
        calls.clear()
        x = random(1, rows, 64, seed=2, device=device)
        torch.testing.assert_close(weight.multiply(x), plain.multiply(x), rtol=1e-4, atol=1e-4)
        onto = weight.multiply_onto(residual[:, :rows], x)
        torch.testing.assert_close(
            onto, residual[:, :rows] + plain.multiply(x), rtol=1e-4, atol=1e-4
        )
        assert calls == [rows] * (2 if thin else 0)
    gradient = random(3, 48, seed=4, device=device)
    assert torch.equal(weight.transposed().multiply(gradient), gradient @ plain.weight)
    assert weight.nbytes == plain.nbytes


SHAPES = [
    (6144, 4096),
    (4096, 14336),
    (28672, 4096),
    (128256, 4096),
    (1152, 896),
    (896, 896),
    (8, 8),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [1, 8, 32, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_candidates_cover_all_inputs_and_need_little_memory(shape, rows, dtype):
    found = list(candidates(shape, rows, dtype, 132))
    aligned = shape[1] % 16 == 0
    assert aligned <= len(found) == len(set(found)) <= 12 * aligned
    for cut in found:
        steps = -(-shape[1] // cut.stripe.inputs)
        assert 1 <= cut.parts <= max(1, steps // 2)
        # Sums of parts are fewer bytes than the weight, or few.
        if cut.parts > 1:
            sums = 4 * cut.parts * rows * shape[0]
            assert sums <= max(shape[0] * shape[1] * dtype.itemsize, 8 << 20)


@pytest.mark.parametrize("device", [TRITON_DEVICE])
def test_the_fastest_serves_every_layer_of_a_shape(device, monkeypatch):
    cut = Cut(STRIPE)
    monkeypatch.setattr(
        products,
        "measure",
        lambda weight, rows, arena, workspace: products.Choice(
            cut if rows <= 8 and weight.shape[0] == 64 else None, 1.0, 2.0
        ),
    )
    monkeypatch.setattr(products, "_ARENA_BYTES", 1 << 10)
    model = nn.Module()
    with torch.device(device):
        group = LinearGroup(nn.Linear(32, 24), nn.Linear(32, 40))
        model.first, model.second = group.members
        model.third = PackedLinear(random(64, 32))
        model.fourth = PackedLinear(random(32, 64))
    layers = [group.joined, model.third, model.fourth]
    for layer in layers:  # as on a device
        weight = random(layer.out_features, layer.in_features, device=device)
        layer.weights = PlainWeight(weight, None)
    choices = tune_products(model)
    assert choices[(64, 32), 1].cut == choices[(64, 32), 16].cut == cut
    assert choices[(64, 32), 32].cut is None and choices[(32, 64), 1].cut is None
    assert all(isinstance(layer.weights, ThinWeight) for layer in layers)
    x = random(3, 32, device=device)
    for layer in layers[:2]:
        expected = layer.weights.plain.multiply(x)
        torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", [TRITON_DEVICE])
@pytest.mark.parametrize(("ours_us", "chosen"), [(1.0, True), (1.01, True), (1.1, False)])
def test_ours_serves_unless_cublas_is_clearly_faster(device, monkeypatch, ours_us, chosen):
    cut, times = Cut(STRIPE), iter([1.0, ours_us])

    def timed(product, weights):
        torch.testing.assert_close(product(weights[0]).shape, torch.Size([4, 32]))
        return next(times)

    properties = SimpleNamespace(multi_processor_count=132, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(products, "_ARENA_BYTES", 1 << 14)
    monkeypatch.setattr(products, "_time_us", timed)
    monkeypatch.setattr(products, "candidates", lambda *_: [cut])
    weight = random(32, 64, device=device)
    arena, workspace = products.Arena(weight), Workspace(weight.device)
    choice = products.measure(weight, 4, arena, workspace)
    assert choice == products.Choice(cut if chosen else None, ours_us, 1.0)


@pytest.mark.parametrize("device", [CUDA])
def test_a_measurement_takes_no_longer_than_serving_may_wait(device):
    model = nn.Module()
    model.layer = PackedLinear(random(6144, 4096, dtype=torch.bfloat16, device=device))
    choices = tune_products(model)
    assert len(choices) == 4
    assert all(0 < choice.cublas_us < 1e4 for choice in choices.values())
    for choice in choices.values():
        assert (choice.cut is None) == (choice.us > products.FAVOUR * choice.cublas_us)
