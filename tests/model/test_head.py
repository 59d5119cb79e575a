"""Scores and their slopes: the kernel's and torch's way, against double precision."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tandem.model import kernels
from tandem.model.head import Head
from tandem.model.linear import PackedLinear

amx = pytest.mark.skipif(not kernels.amx_linear(), reason="no AMX")
WIDTH = 96
# More than one chunk of the kernel (8,192 tokens), the last one short.
VOCAB = 8192 + 160
# float32 sums, and powers within 3e-6.
NEAR = 2e-5
# Powers and the slope itself are rounded to bfloat16, by 2^-9 each at most.
ROUNDED = 2.0**-8


def make_head(spread: float = 1.0, *, bias: bool = False, vocab: int = VOCAB) -> Head:
    """Logits of a hidden row of unit variance are about `spread` large."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(vocab, WIDTH, generator=generator) * spread / WIDTH**0.5
    some = torch.randn(vocab, generator=generator).bfloat16() if bias else None
    return Head(PackedLinear(weight.bfloat16(), some))


def make_rows(rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, WIDTH, generator=generator).bfloat16()
    return hidden, torch.randint(VOCAB, (rows,), generator=generator)


def exact(head: Head, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """In double precision from the model's own logits, which are rounded to bfloat16."""
    linear = head.linear
    assert isinstance(linear, PackedLinear)
    chances = linear(hidden).double().log_softmax(-1)
    bend = -chances.exp()
    # 1 - p, where p may be almost 1: the sum of the others.
    bend.scatter_(1, targets[:, None], 0.0)
    bend.scatter_(1, targets[:, None], -bend.sum(1, keepdim=True))
    back = linear.backward_weights().multiply(torch.eye(head.linear.out_features).bfloat16())
    return chances.gather(1, targets[:, None])[:, 0], bend @ back.double()


def check(head: Head, hidden: Tensor, targets: Tensor) -> None:
    logprobs, slopes = head.score(hidden, targets, gradient=True)
    assert slopes is not None and slopes.dtype == torch.bfloat16
    expected, expected_slopes = exact(head, hidden, targets)
    assert (logprobs - expected).abs().max() <= NEAR * max(1.0, float(expected.abs().max()))
    error = (slopes.double() - expected_slopes).norm(dim=1)
    assert bool((error <= ROUNDED * expected_slopes.norm(dim=1)).all())
    alone, none = head.score(hidden, targets, gradient=False)
    assert none is None and torch.equal(alone, logprobs)


@amx
@settings(max_examples=25)
@given(st.one_of(st.integers(1, 70), st.integers(71, 600)))
def test_any_number_of_rows(rows: int) -> None:
    check(make_head(2.0), *make_rows(rows))


@amx
@pytest.mark.parametrize("bias", [False, True])
def test_a_target_is_the_first_token_the_last_one_or_nearly_certain(bias: bool) -> None:
    head = make_head(12.0, bias=bias)
    hidden, targets = make_rows(40)
    targets[:4] = torch.tensor([0, VOCAB - 1, 8191, 8192])
    targets[4:] = head.linear(hidden)[4:].argmax(1)
    check(head, hidden, targets)
    assert float(head.score(hidden, targets, gradient=False)[0].max()) > -0.01


@amx
def test_logits_so_far_apart_that_powers_would_overflow() -> None:
    head = make_head(60.0)
    hidden, targets = make_rows(70)
    logits = head.linear(hidden)
    targets[:35] = logits[:35].argmin(1)
    # Peaks in the first chunk for some rows, for others in the second.
    places = logits.argmax(1) < 8192
    assert float((logits.amax(1) - logits.amin(1)).min()) > 300 and places.unique().numel() == 2
    check(head, hidden, targets)


@amx
@pytest.mark.parametrize("rows", [33, 70, 530])
def test_a_row_does_not_depend_on_the_others(rows: int) -> None:
    head = make_head(30.0)
    hidden, targets = make_rows(rows)
    together = head.score(hidden, targets, gradient=True)
    for row in (0, 32, rows - 1):
        alone = head.score(hidden[row : row + 1], targets[row : row + 1], gradient=True)
        for one, all_of_them in zip(alone, together, strict=True):
            assert one is not None and all_of_them is not None
            assert torch.equal(one[0], all_of_them[row])


@amx
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_stays_alone(bad: float) -> None:
    head = make_head()
    hidden, targets = make_rows(40)
    expected = head.score(hidden, targets, gradient=True)
    hidden[7, 5] = bad
    found = head.score(hidden, targets, gradient=True)
    others = torch.arange(40) != 7
    assert found[0][7].isnan()
    for one, other in zip(found, expected, strict=True):
        assert one is not None and other is not None
        assert torch.equal(one[others], other[others])


@amx
def test_a_target_outside_of_the_vocabulary_is_refused() -> None:
    hidden, targets = make_rows(2)
    targets[1] = VOCAB
    with pytest.raises(RuntimeError, match="no token"):
        make_head().score(hidden, targets, gradient=False)


@amx
def test_no_rows() -> None:
    logprobs, slopes = make_head().score(*make_rows(0), gradient=True)
    assert logprobs.shape == (0,) and slopes is not None and slopes.shape == (0, WIDTH)


@amx
def test_only_the_kernel_takes_many_rows() -> None:
    cpu = torch.device("cpu")
    assert make_head().rows_at_once(cpu) == 2048
    # A transposed weight of this many inputs has no panels.
    assert make_head(vocab=(1 << 16) + 1).rows_at_once(cpu) == 63
    capped = make_head(vocab=1 << 16)
    capped.softcap = 3.0
    assert capped.rows_at_once(cpu) == 64


@pytest.mark.parametrize(("device", "rows"), [("cpu", 64), ("cuda", 1280)])
def test_logits_at_once_depend_on_the_device(device: str, rows: int) -> None:
    head = Head(nn.Linear(8, 1 << 16, bias=False))
    assert head.logits_at_once(torch.device(device)) == rows
    assert head.rows_at_once(torch.device(device)) == rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [{}, {"softcap": 2.0}, {"factor": 0.25, "divisor": 2.0}])
@pytest.mark.parametrize("spread", [1.0, 200.0], ids=["usual", "powers overflow"])
def test_what_follows_the_head_counts(
    shape: dict[str, float], dtype: torch.dtype, spread: float
) -> None:
    if "softcap" in shape:
        shape = {"softcap": shape["softcap"] * spread}
    generator = torch.Generator().manual_seed(5)
    plain = nn.Linear(32, 50, bias=False).requires_grad_(False)
    plain.weight.copy_(torch.randn(50, 32, generator=generator) * spread)
    head = Head(PackedLinear(plain.weight.to(dtype)), **shape)
    hidden = torch.randn(9, 32, generator=generator).to(dtype)
    targets = torch.randint(50, (9,), generator=generator)
    logprobs, slopes = head.score(hidden, targets, gradient=True)
    alone, none = head.score(hidden, targets, gradient=False)
    assert none is None and torch.equal(alone, logprobs)
    leaf = hidden.double().requires_grad_()
    wide = Head(nn.Linear(32, 50, bias=False).double().requires_grad_(False), **shape)
    assert isinstance(wide.linear, nn.Linear)
    wide.linear.weight.copy_(plain.weight.to(dtype))
    expected = wide(leaf).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    (expected_slopes,) = torch.autograd.grad(expected.sum(), leaf)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    largest = max(5.0, float(expected.detach().abs().max()))
    assert (logprobs - expected.detach()).abs().max() <= tolerance * largest
    assert slopes is not None
    assert (slopes.double() - expected_slopes).norm() <= tolerance * expected_slopes.norm()
