"""The kernels of a layer's gradient against the formulas in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tandem.model import kernels
from tandem.model.kernels import backward
from tandem.model.kernels.backward import DenseShape, Update
from tandem.model.kernels.layer import NormWeights, Panels

needs_amx = pytest.mark.skipif(not kernels.amx_linear(), reason="no AMX")
# One or two roundings to bfloat16; attention rounds its weights and their gradients too.
ROUNDED, ATTENTION = 5e-3, 1e-2
ROWS = 77


def random(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).bfloat16()


def error(found: Tensor, expected: Tensor) -> float:
    expected = expected.detach().double()
    return float((found.double() - expected).norm() / expected.norm())


def rows_of(tiles: Tensor, count: int = ROWS) -> Tensor:
    blocks, steps = tiles.shape[:2]
    return tiles.permute(0, 2, 1, 3).reshape(blocks * 32, steps * 32)[:count]


def packed(weight: Tensor, bias: Tensor | None = None) -> Panels:
    return Panels(kernels.pack_weight(weight), bias)


@needs_amx
def test_tiles_hold_the_rows_and_zeros_past_them():
    x = random(ROWS, 96)
    tiles = backward.row_tiles(x)
    assert torch.equal(rows_of(tiles), x)
    assert not rows_of(tiles, 96)[ROWS:].any()
    norm = NormWeights(random(96), 1e-5, True)
    tiles = backward.norm_tiles(x, norm)
    assert torch.equal(rows_of(tiles), kernels.rms_norm(x, norm.weight, 1e-5, True))
    assert not rows_of(tiles, 96)[ROWS:].any()


@needs_amx
@pytest.mark.parametrize("rows", [1, 31, ROWS, 700])
def test_a_product_takes_its_update_bias_and_residual(rows):
    x, w, low, up = random(rows, 96), random(128, 96), random(rows, 64), random(128, 64)
    bias, scale, residual = torch.randn(128), torch.rand(128), random(rows, 128)
    update = Update(backward.row_tiles(low), packed(up).packed)
    expected = x.double() @ w.double().t() + low.double() @ up.double().t()
    tiles = backward.row_tiles(x)
    found = backward.updated_rows(tiles, packed(w, bias), update, (rows, 128), residual)
    assert error(found, expected + bias + residual) < ROUNDED
    found = backward.updated_tiles(tiles, packed(w, bias), update, scale)
    assert error(rows_of(found, rows), expected * scale + bias) < ROUNDED
    found = backward.updated_rows(tiles, packed(w), None, (rows, 128))
    assert error(found, x.double() @ w.double().t()) < ROUNDED
    assert error(found, expected) > 20 * ROUNDED


@needs_amx
@pytest.mark.parametrize("gelu", [False, True])
def test_the_gates_gradient(gelu):
    x, w, joined = random(ROWS, 96), random(128, 96), 2 * random(ROWS, 256)
    leaf = joined.double().requires_grad_()
    gate, up = leaf.chunk(2, -1)
    act = functional.gelu(gate, approximate="tanh") if gelu else functional.silu(gate)
    (expected,) = torch.autograd.grad(act * up, leaf, x.double() @ w.double().t())
    tiles = backward.row_tiles(joined)
    found, product = backward.gate_gradients(backward.row_tiles(x), packed(w), None, tiles, gelu)
    assert error(rows_of(found), expected) < ROUNDED
    assert error(rows_of(product), act * up) < ROUNDED
    assert error(rows_of(backward.gated_tiles(tiles, gelu)), act * up) < ROUNDED


@needs_amx
def test_a_thin_product_sums_over_rows_in_float32():
    thin, wide = random(1000, 64), random(1000, 96)
    found = backward.thin_product(backward.row_tiles(thin), backward.row_tiles(wide))
    assert error(found, thin.double().t() @ wide.double()) < 1e-6


@pytest.mark.skipif(not kernels.status().available, reason="no kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shifted", [False, True])
def test_the_norms_gradient(dtype, shifted):
    x, gradient, residual = (random(ROWS, 96 + i)[:, :96].to(dtype).contiguous() for i in range(3))
    weight = random(96).to(dtype)
    leaf = x.double().requires_grad_()
    normal = leaf * torch.rsqrt(leaf.square().mean(-1, keepdim=True) + 1e-5)
    (expected,) = torch.autograd.grad(normal * (weight.double() + shifted), leaf, gradient.double())
    norm = NormWeights(weight, 1e-5, shifted)
    limit = 1e-6 if dtype == torch.float32 else ROUNDED
    assert error(backward.rms_norm_gradient(x, norm, gradient, None), expected) < limit
    found = backward.rms_norm_gradient(x, norm, gradient, residual)
    assert error(found, expected + residual) < limit


def attention(qkv: Tensor, shape: DenseShape) -> Tensor:
    """The formula, sequence by sequence."""
    dim = qkv.shape[1] // (shape.heads + 2 * shape.kv_heads)
    found = []
    for rows in qkv.split(list(shape.lengths)):
        heads = rows.unflatten(1, (-1, dim)).transpose(0, 1)
        query, key, value = heads.split([shape.heads, shape.kv_heads, shape.kv_heads])
        key, value = (x.repeat_interleave(shape.heads // shape.kv_heads, 0) for x in (key, value))
        place = torch.arange(len(rows))
        behind = place[:, None] - place
        seen = (behind >= 0) & ((behind < shape.window) if shape.window else True)
        scores = (query @ key.transpose(1, 2) * shape.scale).masked_fill(~seen, -math.inf)
        found.append((scores.softmax(-1) @ value).transpose(0, 1).flatten(1))
    return torch.cat(found)


SHAPES = [
    DenseShape((5,), 2, 1, 0.2, 0),
    DenseShape((64, 128), 2, 2, 0.1, 0),
    DenseShape((100, 1, 37), 4, 2, 0.15, 0),
    DenseShape((130,), 6, 2, 0.1, 20),
    DenseShape((300,), 4, 1, 0.1, 70),
]


@needs_amx
@pytest.mark.parametrize("dim", [32, 64, 96])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_and_its_gradient(shape, dim):
    rows, heads = sum(shape.lengths), shape.heads + 2 * shape.kv_heads
    qkv, gradient = random(rows, heads * dim), random(rows, shape.heads * dim)
    leaf = qkv.double().requires_grad_()
    expected = attention(leaf, shape)
    attended = backward.dense_attention(qkv, shape)
    assert error(attended[0], expected) < ROUNDED
    (wanted,) = torch.autograd.grad(expected, leaf, gradient.double())
    found = backward.dense_attention_gradient(qkv, attended, gradient, shape)
    sizes = [shape.heads * dim, shape.kv_heads * dim, shape.kv_heads * dim]
    for part, want in zip(found.split(sizes, 1), wanted.split(sizes, 1), strict=True):
        assert error(part, want) < ATTENTION
