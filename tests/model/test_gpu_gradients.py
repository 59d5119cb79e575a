"""The Triton kernels of a layer's gradient against the formulas in float64, in Triton's interpreter
or on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from devices import INTERPRETED, TRITON
from tandem.model.gradient_rows import Operands
from tandem.model.joint import Joint
from tandem.model.kernels.backward import HeadTurn
from tandem.model.kernels.layer import NormWeights
from tandem.model.linear import PackedLinear
from tandem.model.lora_files import LoraWeights

ROWS, EPS = 5, 1e-5
# By the number of roundings. The interpreter neither rounds to bfloat16 nor multiplies in it.
LIMITS = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
DTYPES = [torch.float32, torch.float16] if INTERPRETED else list(LIMITS)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.parametrize("kernel", [TRITON])


@pytest.fixture
def rows(kernel):
    from tandem.model.gpu.gradients import TritonGradientRows

    return TritonGradientRows()


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def error(found: Tensor, expected: Tensor) -> float:
    expected = expected.detach().double()
    return float((found.double() - expected).norm() / expected.norm())


def normal(x: Tensor, weight: Tensor, shifted: bool) -> Tensor:
    factor = torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
    return x * factor * (weight.double() + shifted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shifted", [False, True])
def test_the_norm_and_its_gradient(rows, dtype, shifted):
    x, gradient, residual = (
        random(ROWS, 96 + i, dtype=dtype)[:, :96].contiguous() for i in (0, 1, 2)
    )
    norm = NormWeights(random(96, dtype=dtype), EPS, shifted)
    leaf = x.double().requires_grad_()
    expected = normal(leaf, norm.weight, shifted)
    (slope,) = torch.autograd.grad(expected, leaf, gradient.double())
    assert error(rows.rms_norm(x, norm), expected) < LIMITS[dtype]
    found = rows.rms_norm_gradient(x, norm, gradient, residual)
    assert error(found, slope + residual) < LIMITS[dtype]
    assert error(found, slope) > 0.1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gelu", [False, True])
def test_the_gate_and_its_gradient(rows, dtype, gelu):
    joined, product = 2 * random(ROWS, 2 * 1100, dtype=dtype), random(ROWS, 1100, dtype=dtype)
    leaf = joined.double().requires_grad_()
    gate, up = leaf.chunk(2, -1)
    act = functional.gelu(gate, approximate="tanh") if gelu else functional.silu(gate)
    (expected,) = torch.autograd.grad(act * up, leaf, product.double())
    assert error(rows.gated(joined, gelu), act * up) < LIMITS[dtype]
    found, gated = rows.gate_gradient(joined, product, gelu)
    assert error(found, expected) < LIMITS[dtype]
    assert error(gated, act * up) < LIMITS[dtype]


def turned(qkv: Tensor, turn: HeadTurn, dim: int) -> Tensor:
    """The formula."""
    sizes = (turn.heads, turn.kv_heads, turn.kv_heads)
    query, key, value = qkv.unflatten(1, (-1, dim)).split(sizes, dim=1)
    if turn.query_norm is not None:
        query = normal(query, turn.query_norm, turn.norm.shifted)
        key = normal(key, turn.key_norm, turn.norm.shifted)
    angles = turn.cos.shape[1]
    cos, sin = turn.cos.double()[:, None], turn.sin.double()[:, None]
    found = []
    for heads in (query, key):
        some, rest = heads[..., :angles], heads[..., angles:]
        first, second = some.chunk(2, -1)
        some = some * cos + torch.cat([-second, first], -1) * sin
        found.append(torch.cat([some, rest], -1))
    return torch.cat([*found, value], dim=1).flatten(1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("dim", "angles", "norm", "shifted"),
    [(16, 16, False, False), (32, 32, True, False), (24, 16, True, True)],
)
def test_the_turn_of_heads_and_its_gradient(rows, dtype, dim, angles, norm, shifted):
    heads, kv_heads = 6, 2
    qkv = random(ROWS, (heads + 2 * kv_heads) * dim, dtype=dtype)
    gradient = random(*qkv.shape, dtype=dtype) + 1
    weights = (random(dim, dtype=dtype), random(dim, dtype=dtype) + 1) if norm else (None, None)
    # Each half of the angles is its own here, which shows that the right one is read.
    cos, sin = random(ROWS, angles, dtype=dtype), random(ROWS, angles, dtype=dtype) + 1
    kind = NormWeights(random(1), EPS, shifted)
    turn = HeadTurn(*weights, kind, cos, sin, heads, kv_heads)
    leaf = qkv.double().requires_grad_()
    expected = turned(leaf, turn, dim)
    (slope,) = torch.autograd.grad(expected, leaf, gradient.double())
    assert error(rows.turn_heads(qkv, turn), expected) < LIMITS[dtype]
    assert error(rows.turn_heads_gradient(gradient, qkv, turn), slope) < LIMITS[dtype]


WIDTHS, INPUTS = (160, 32, 40), 96


def joint(adapted: dict[int, int], count: int, dtype: torch.dtype) -> Joint:
    """`count` projections of one input; `adapted` ranks by place."""
    ends = [sum(WIDTHS[: place + 1]) for place in range(count)]
    frozen = PackedLinear(random(ends[-1], INPUTS, dtype=dtype), None)
    parts = [(str(place), end - WIDTHS[place], end) for place, end in enumerate(ends)]
    adapter = {
        str(place): LoraWeights(
            random(rank, INPUTS, dtype=dtype),
            random(WIDTHS[place], rank, dtype=dtype),
            2.0 - place / 2,
        )
        for place, rank in adapted.items()
    }
    return Joint(frozen, parts, adapter, 8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("adapted", [{0: 8}, {0: 4, 1: 4, 2: 4}, {1: 3}, {0: 70, 2: 5}], ids=str)
def test_gradients_of_an_adapter(rows, dtype, adapted):
    count = 1 if list(adapted) == [0] else 3
    both = joint(adapted, count, dtype)
    many = 70
    entering = random(many, INPUTS, dtype=dtype)
    gradient = random(many, sum(WIDTHS[:count]), dtype=dtype)
    low, low_gradient = entering @ both.a.t(), gradient @ both.scaled_b
    found = rows.pairs(Operands(entering, low, gradient, low_gradient), both)
    assert set(found) == {str(place) for place in adapted}
    for member in both.members:
        if not member.rank:
            continue
        columns = slice(member.low, member.low + member.rank)
        a, b = found[member.name]
        assert a.dtype == b.dtype == torch.float32
        assert a.is_contiguous() and b.is_contiguous()
        some = gradient[:, member.start : member.end].double()
        expected = some.t() @ low[:, columns].double() * member.scale
        assert error(a, low_gradient[:, columns].double().t() @ entering.double()) < 1e-6
        assert error(b, expected) < 1e-6
