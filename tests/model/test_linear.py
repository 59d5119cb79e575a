"""Packed linear layers against `F.linear`: outputs, gradients, groups, memory."""

from __future__ import annotations

import copy
import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from tandem.model import linear as packing
from tandem.model.linear import (
    GroupMember,
    LinearGroup,
    OneDnnWeight,
    PackedLinear,
    PlainWeight,
    fits_bfloat16,
    pack_linears,
)

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1e-2}


def reference(x: Tensor, layer: nn.Linear) -> Tensor:
    bias = None if layer.bias is None else layer.bias.detach().float()
    return functional.linear(x.float(), layer.weight.detach().float(), bias)


def close(actual: Tensor, expected: Tensor) -> bool:
    error = (actual.float() - expected).abs().max()
    return bool(error <= TOLERANCE[actual.dtype] * expected.abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 96), (64, 50), (40, 64)])
def test_forward_and_gradient_equal_linear(
    dtype: torch.dtype, bias: bool, inputs: int, outputs: int
) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(inputs, outputs, bias=bias).to(dtype)
    packed = PackedLinear.of(layer)
    for rows in (1, 7, 40):
        x = torch.randn(2, rows, inputs).to(dtype).requires_grad_()
        with torch.no_grad():
            assert close(packed(x), reference(x, layer))
        out = packed(x)
        assert close(out.detach(), reference(x.detach(), layer))
        gradient = torch.randn(outputs, 2, rows).to(dtype).permute(1, 2, 0)  # not contiguous
        out.backward(gradient)
        assert x.grad is not None
        assert close(x.grad, gradient.float() @ layer.weight.detach().float())


def test_backward_weights_come_on_demand_and_nothing_is_saved() -> None:
    packed = PackedLinear.of(nn.Linear(64, 64, bias=False).bfloat16())
    forward_only = packed.nbytes
    x = torch.randn(3, 64, dtype=torch.bfloat16, requires_grad=True)
    out = packed(x)
    input_alive = weakref.ref(x)
    assert packed.nbytes == forward_only
    out.sum().backward()
    assert packed.nbytes == 2 * forward_only
    detached = torch.randn(3, 64, dtype=torch.bfloat16)
    assert not packed(detached).requires_grad
    del x, out
    gc.collect()
    assert input_alive() is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_onednn_packing_and_its_transpose(dtype: torch.dtype) -> None:
    if dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("oneDNN has no bf16 here")
    layer = nn.Linear(64, 48).to(dtype)
    weights = OneDnnWeight(layer.weight.detach(), layer.bias.detach())
    x = torch.randn(5, 64).to(dtype)
    assert close(weights.multiply(x), reference(x, layer))
    gradient = torch.randn(5, 48).to(dtype)
    back = weights.transposed().multiply(gradient)
    assert close(back, gradient.float() @ layer.weight.detach().float())


def test_rows_come_in_few_numbers_that_are_hardly_larger() -> None:
    numbers = [packing.compiled_rows(rows) for rows in range(1, 2049)]
    assert all(rows <= number < rows * 33 / 32 for rows, number in enumerate(numbers, 1))
    assert numbers == sorted(numbers)
    assert [packing.compiled_rows(number) for number in numbers] == numbers
    assert numbers[:64] == list(range(1, 65))
    assert len(set(numbers)) == 64 + 5 * 32


def test_onednn_keeps_a_bounded_number_of_kernels_unless_somebody_says_how_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(packing.os, "environ", environ := {})
    packing.keep_kernels()
    ((name, count),) = environ.items()
    numbers = {packing.compiled_rows(rows) for rows in range(1, 1025)}
    assert int(count) >= 2 * 5 * len(numbers), "those of five shapes up to 1,024 rows"
    assert int(count) * packing._KERNEL_BYTES < 600 << 20
    environ[name] = "7"
    packing.keep_kernels()
    assert environ == {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "7"}
    del environ[name]
    environ["DNNL_PRIMITIVE_CACHE_CAPACITY"] = "8"
    packing.keep_kernels()
    assert environ == {"DNNL_PRIMITIVE_CACHE_CAPACITY": "8"}


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch has no oneDNN here")
@pytest.mark.parametrize("shape", [(67,), (1, 67), (3, 43)])
def test_rows_that_are_added_do_not_show(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = nn.Linear(64, 48)
    weights = OneDnnWeight(layer.weight.detach(), layer.bias.detach())
    seen: list[int] = []
    product = weights._product

    def watched(x: Tensor) -> Tensor:
        seen.append(x.numel() // x.shape[-1])
        return product(x)

    monkeypatch.setattr(weights, "_product", watched)
    x = torch.randn(*shape, 64)
    out = weights.multiply(x)
    assert out.shape == (*shape, 48) and close(out, reference(x, layer))
    assert seen == [packing.compiled_rows(math.prod(shape))] != [math.prod(shape)]


def test_a_padded_product_may_be_changed_in_place_where_a_gradient_is_wanted() -> None:
    """As some models do, which clip their queries."""
    layer = nn.Linear(64, 48, bias=False)
    x = torch.randn(67, 64, requires_grad=True)
    PackedLinear.of(layer)(x).clamp_(-0.1, 0.1).sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch has no oneDNN here")
def test_float32_is_packed_and_float64_stays_a_plain_matrix() -> None:
    assert isinstance(packing.pack(torch.randn(8, 8), None), OneDnnWeight)
    assert isinstance(packing.pack(torch.randn(8, 8).double(), None), PlainWeight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_group_computes_once_for_all_members(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = [nn.Linear(64, n, bias=n != 32).to(dtype) for n in (96, 32, 20)]
    group = LinearGroup(*layers)
    calls = 0
    joined = group.joined.forward

    def counted(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return joined(x)

    monkeypatch.setattr(group.joined, "forward", counted)
    x = torch.randn(4, 64).to(dtype)
    for member, layer in zip(group.members, layers, strict=True):
        assert (member.in_features, member.out_features) == (64, layer.out_features)
        assert close(member(x), reference(x, layer).detach())
    assert calls == 1
    first = group.members[0]
    before = first(x)
    x.add_(1)  # the same tensor object with other values must not be served from memory
    assert not torch.equal(first(x), before)
    assert close(first(x), reference(x, layers[0]).detach())


def test_group_lets_its_output_go() -> None:
    group = LinearGroup(nn.Linear(8, 8), nn.Linear(8, 8))
    x = torch.randn(2, 8)
    alive = weakref.ref(x)
    for member in group.members:
        member(x)
    del x
    assert alive() is None


def test_group_gradients_sum_over_members() -> None:
    layers = [nn.Linear(32, 32), nn.Linear(32, 64)]
    group = LinearGroup(*layers)
    x = torch.randn(3, 32, requires_grad=True)
    (group.members[0](x).sum() + group.members[1](x).square().sum()).backward()
    plain = x.detach().clone().requires_grad_()
    (layers[0](plain).sum() + layers[1](plain).square().sum()).backward()
    torch.testing.assert_close(x.grad, plain.grad)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def test_pack_linears_replaces_all_and_keeps_a_tied_embedding() -> None:
    model = Tied().bfloat16().requires_grad_(False)
    original = copy.deepcopy(model)
    freed = weakref.ref(model.layers[0].weight)
    report = pack_linears(model)
    ids = torch.arange(9)
    assert report.layers == 3
    assert report.nbytes >= sum(p.nbytes for p in original.layers.parameters() if p.dim() == 2)
    assert not [m for m in model.modules() if isinstance(m, nn.Linear)]
    assert close(model(ids), original.float()(ids))
    assert torch.equal(model.embed.weight.float(), original.embed.weight)
    gc.collect()
    if torch.cpu._is_amx_tile_supported():
        assert freed() is None


def test_pack_linears_counts_a_group_once() -> None:
    model = nn.Module()
    model.first, model.second = LinearGroup(nn.Linear(8, 8), nn.Linear(8, 24)).members
    assert isinstance(model.first, GroupMember)
    report = pack_linears(model)
    assert report.layers == 1
    assert report.nbytes == 32 * 8 * 4
    assert report.pads == torch.backends.mkldnn.is_available()


def test_only_models_all_of_whose_weights_are_onednns_gain_by_more_rows() -> None:
    assert not pack_linears(nn.ModuleList([nn.LayerNorm(8)])).pads
    mixed = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8).double()])
    assert not pack_linears(mixed).pads


class Sizes(TorchDispatchMode):
    """Numbers of values of the tensors that operations made."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[int] = []

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.made.append(result.numel())
        return result


def test_a_weight_is_compared_in_slices_up_to_the_first_difference() -> None:
    weight = torch.randn(4096, 512).bfloat16().float()
    with Sizes() as sizes:
        assert fits_bfloat16(weight)
    assert max(sizes.made) <= weight.numel() // 8 and len(sizes.made) >= 16
    for row, most in ((0, 2), (-1, 16)):
        other = weight.clone()
        other[row, 3] = 1.0 + 2**-20
        with Sizes() as sizes:
            assert not fits_bfloat16(other)
        assert len(sizes.made) <= most
    assert fits_bfloat16(weight.bfloat16()) and fits_bfloat16(weight.t())
    assert not fits_bfloat16(torch.tensor([[float("nan")]]))  # kept as it is
