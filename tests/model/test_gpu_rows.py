"""Triton's row kernels against the C++ ones, on columns of joint products as callers have them."""

from __future__ import annotations

import pytest
import torch

from devices import TRITON_DEVICE
from tandem.model import kernels
from tandem.model.row_kernels import CppRows

pytestmark = pytest.mark.skipif(
    not kernels.status().available, reason=f"no kernels: {kernels.status().reason}"
)
# The interpreter cannot round to bfloat16.
DTYPES = [torch.float32, torch.float16]
WIDTH = 40
EXACT = CppRows()


def make_rows():
    from tandem.model.gpu.rows import TritonRows

    return TritonRows()


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_equal(found, expected):
    """Sums may be in another order, so a rounding may differ in its last bit."""
    assert found.dtype == expected.dtype and found.is_contiguous()
    torch.testing.assert_close(found.cpu(), expected, rtol=2e-3, atol=2e-6)


@pytest.mark.parametrize("device", [TRITON_DEVICE])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shifted", [False, True])
def test_rms_norm(device, dtype, shifted):
    weight = random(WIDTH, seed=1, dtype=dtype)
    joint = random(1, 5, 6 * WIDTH, dtype=dtype)
    heads = joint.view(1, 5, 6, WIDTH)
    for x in (joint[..., :WIDTH], joint[0, :, WIDTH : 2 * WIDTH], heads[:, :, 1:4], joint[0, 0]):
        x = x if x.dim() > 1 else x[:WIDTH]
        expected = EXACT.rms_norm(x, weight, 1e-5, shifted)
        found = make_rows().rms_norm(moved(x, device), weight.to(device), 1e-5, shifted)
        assert_equal(found, expected)


def moved(x, device):
    """`x` on the device, with its strides."""
    whole = x if x._base is None else x._base
    return whole.to(device).as_strided(x.shape, x.stride(), x.storage_offset())


@pytest.mark.parametrize("device", [TRITON_DEVICE])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shifted", [False, True])
def test_the_sum_is_rounded_before_it_is_normalised(device, dtype, shifted):
    weight, joint = random(WIDTH, seed=1, dtype=dtype), random(3, 2 * WIDTH, seed=2, dtype=dtype)
    residual, x = random(3, WIDTH, dtype=dtype), joint[:, WIDTH:]
    total, normal = make_rows().add_rms_norm(
        residual.to(device), moved(x, device), weight.to(device), 1e-5, shifted
    )
    assert torch.equal(total.cpu(), residual + x)
    assert_equal(normal, EXACT.rms_norm(residual + x, weight, 1e-5, shifted))


@pytest.mark.parametrize("device", [TRITON_DEVICE])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # as meant: the gate is 0
@pytest.mark.parametrize("gate", ["silu_mul", "gelu_tanh_mul"])
@pytest.mark.parametrize("width", [WIDTH, 1100])
def test_gates(device, dtype, gate, width):
    joint = random(1, 3, 2 * width, dtype=dtype) * 4
    exact = {"silu_mul": EXACT.silu_mul, "gelu_tanh_mul": EXACT.gelu_tanh_mul}[gate]
    rows = make_rows()
    found = {"silu_mul": rows.silu_mul, "gelu_tanh_mul": rows.gelu_tanh_mul}[gate]
    pair = joint[..., :width], joint[..., width:]
    assert_equal(found(*(moved(each, device) for each in pair)), exact(*pair))


@pytest.mark.parametrize("device", [TRITON_DEVICE])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("angles", [24, 16])
def test_rotation_of_all_or_the_first_dimensions(device, dtype, angles):
    joint = random(1, 4, 6, 24, dtype=dtype)
    q, k = joint[:, :, :4], joint[:, :, 4:]
    cos, sin = random(1, 4, angles, seed=1, dtype=dtype), random(1, 4, angles, seed=2, dtype=dtype)
    found = make_rows().rotary(moved(q, device), moved(k, device), cos.to(device), sin.to(device))
    for each, expected in zip(found, EXACT.rotary(q, k, cos, sin), strict=True):
        assert_equal(each, expected)


@pytest.mark.parametrize("device", [TRITON_DEVICE])
def test_no_rows(device):
    nothing = torch.empty(0, WIDTH, device=device)
    weight = torch.ones(WIDTH, device=device)
    rows = make_rows()
    assert rows.rms_norm(nothing, weight, 1e-5).shape == (0, WIDTH)
    assert rows.silu_mul(nothing, nothing).shape == (0, WIDTH)
