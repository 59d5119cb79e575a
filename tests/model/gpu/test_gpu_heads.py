"""Head norms, rotation and the write to the cache, against the formula."""

from __future__ import annotations

import pytest
import torch

from devices import HAS_TRITON, TRITON_DEVICE
from tandem.model.attention.base import LayerKV

if not HAS_TRITON:
    pytest.skip("no Triton here", allow_module_level=True)

from tandem.model.gpu.heads import HeadNorms, store, turn_and_store

pytestmark = pytest.mark.parametrize("device", [TRITON_DEVICE])
SLOTS = [5, -1, 0, 11, -1]


def rotated(x, cos, sin):
    """The first dimensions of x [rows, heads, d], half by half."""
    angles = cos.shape[1]
    part, rest = x[..., :angles].float(), x[..., angles:]
    low, high = part.chunk(2, -1)
    turned = part * cos.float()[:, None] + torch.cat([-high, low], -1) * sin.float()[:, None]
    return torch.cat([turned.to(x.dtype), rest], -1)


def normalised(x, weight, norms):
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norms.eps)
    if norms.shifted:
        return (wide * (1.0 + weight.float())).to(x.dtype)
    return wide.to(x.dtype) * weight


def caches(kv_heads, dim, dtype, device):
    return LayerKV(*(torch.randn(3, 4, kv_heads, dim).to(device, dtype) for _ in range(2)))


def same(found, expected):
    """Equal, but for roundings to 16 bits, which the interpreter truncates."""
    if found.dtype == torch.float32:
        torch.testing.assert_close(found, expected)
        return
    error = (found.double() - expected.double()).norm() / expected.double().norm()
    assert found.dtype == expected.dtype and error < 1e-2


def expect_stored(cache, before, key, value):
    slots = torch.tensor(SLOTS, device=key.device)
    for store_, was, rows in ((cache.keys, before.keys, key), (cache.values, before.values, value)):
        expected = was.clone()
        expected.flatten(0, 1)[slots[slots >= 0]] = rows[slots >= 0]
        same(store_, expected)


@pytest.mark.parametrize(
    ("shape", "angles", "shifted", "dtype"),
    [
        ((3, 1, 8), 8, None, torch.float32),
        ((4, 2, 24), 12, False, torch.float32),
        ((2, 2, 8), 4, True, torch.float32),
        ((20, 2, 64), 64, None, torch.bfloat16),
        ((2, 1, 64), 64, False, torch.bfloat16),
    ],
)
def test_heads_are_turned_and_stored(device, shape, angles, shifted, dtype):
    torch.manual_seed(1)
    (heads, kv_heads, dim), rows = shape, len(SLOTS)
    width = (heads + 2 * kv_heads) * dim
    qkv = torch.randn(rows, width + 16).to(device, dtype)[:, :width]
    cos, sin = (torch.randn(rows, angles).to(device, dtype) for _ in range(2))
    cache = caches(kv_heads, dim, dtype, device)
    before = LayerKV(cache.keys.clone(), cache.values.clone())
    slots = torch.tensor(SLOTS, device=device)
    norms = None
    query, key, value = (
        part.reshape(rows, -1, dim)
        for part in qkv.split([heads * dim, kv_heads * dim, kv_heads * dim], 1)
    )
    if shifted is not None:
        weights = (torch.randn(dim).to(device, dtype) for _ in range(2))
        norms = HeadNorms(*weights, 1e-5, shifted)
        query, key = normalised(query, norms.query, norms), normalised(key, norms.key, norms)
    found = turn_and_store(qkv, cos, sin, slots, cache, heads, kv_heads, norms)
    same(found, rotated(query, cos, sin))
    expect_stored(cache, before, rotated(key, cos, sin), value)


@pytest.mark.parametrize("shape", [(1, 8), (9, 24)])
def test_rows_with_a_slot_are_stored(device, shape):
    cache = caches(*shape, torch.float32, device)
    before = LayerKV(cache.keys.clone(), cache.values.clone())
    # As attention gets them: views of other orders of dimensions.
    key = torch.randn(shape[0], len(SLOTS), shape[1], device=device).transpose(0, 1)
    value = torch.randn(len(SLOTS), shape[1], shape[0], device=device).transpose(1, 2)
    store(key, value, cache, torch.tensor(SLOTS, device=device))
    expect_stored(cache, before, key, value)
