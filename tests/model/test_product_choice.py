"""The choice of a packing: by a fake clock, within its time, and what it says."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tandem.model import kernels, product_choice
from tandem.model.linear import OneDnnWeight, Pack, PackedWeight, PanelWeight, PlainWeight
from tandem.model.product_choice import ROWS, choose, choose_for, packings, sample


class Clock:
    """Goes on by what each product costs."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def timed(clock: Clock, seconds: Callable[[int], float]) -> Pack:
    """A packing whose products of some rows take so long."""

    class Timed(PlainWeight):
        def multiply(self, x: Tensor) -> Tensor:
            clock.now_s += seconds(x.shape[0])
            return super().multiply(x)

    return Timed


WEIGHTS = [torch.randn(32, 16), torch.randn(8, 16)]


@pytest.mark.parametrize(
    ("other", "chosen"),
    [
        (lambda rows: 0.5e-3, "other"),
        (lambda rows: 2e-3, "first"),
        (lambda rows: 0.95e-3, "first"),  # not clearly faster
        (lambda rows: 0.9e-3, "other"),
        (lambda rows: 1e-6 if rows == 1 else 1e-3, "other"),
        (lambda rows: 0.8e-3 if rows == 1 else 2e-3, "first"),  # prompts count as well
    ],
)
def test_the_clearly_fastest_is_chosen(other: Callable[[int], float], chosen: str) -> None:
    clock = Clock()
    among = {"first": timed(clock, lambda rows: 1e-3), "other": timed(clock, other)}
    choice = choose(WEIGHTS, among, 1 << 10, clock)
    assert choice.name == chosen and choice.pack is among[chosen]
    assert len(choice.trials) == len(WEIGHTS) * len(ROWS) * len(among)
    assert choice.best(1, "other").seconds == pytest.approx(other(1))
    assert choice.best(1, "first").gflop_s == pytest.approx(2 * 32 * 16 / 1e-3 / 1e9)
    assert str(choice).startswith(f"{chosen}; first 0.0 GB/s with 1 row")


def test_slow_products_are_measured_once_after_the_first_call() -> None:
    clock = Clock()
    calls: list[int] = []

    def slow(rows: int) -> float:
        calls.append(rows)
        return 5.0

    choose(WEIGHTS[:1], {"first": timed(clock, slow), "other": timed(clock, slow)}, 1 << 10, clock)
    assert len(calls) == 2 * 2 * len(ROWS)


def model_of(*shapes: tuple[int, int], dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.ModuleList(nn.Linear(k, n, bias=False).to(dtype) for n, k in shapes)


def test_small_models_are_not_measured_and_others_by_their_largest_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[list[tuple[int, ...]]] = []

    def watched(weights: list[Tensor], among: dict[str, Pack], flush: int) -> object:
        seen.append([tuple(each.shape) for each in weights])
        assert flush == 4 * (3 * 1000 * 400 + 5000 * 300 + 16)
        return choose(weights, among, 1 << 10)

    monkeypatch.setattr(product_choice, "choose", watched)
    first = next(iter(packings(torch.float32)))
    assert choose_for(model_of((32, 16))).name == first and not seen
    choose_for(model_of((4, 4), (1000, 400), (5000, 300), (1000, 400), (1000, 400)))
    assert seen == [[(1000, 400), (5000, 300)]] or seen == [[(5000, 300), (1000, 400)]]


def test_a_large_weight_is_cut() -> None:
    weight = torch.zeros(20_000, 1024)
    assert sample(weight).shape == (2048, 1024)
    assert sample(weight[:, :1]).shape == (20_000, 1)


def test_every_packing_is_for_a_type(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = kernels.status().available
    found = packings(torch.float32)
    assert (found.get("panels") is PanelWeight) == ours
    assert not torch.backends.mkldnn.is_available() or found["onednn"] is OneDnnWeight
    assert packings(torch.float16) == packings(torch.float64) == {"plain": PlainWeight}
    monkeypatch.setattr(kernels, "amx_linear", lambda: True)
    assert list(packings(torch.bfloat16)) == ["amx"]
    assert list(packings(torch.float32)) == list(found)
    monkeypatch.setattr(kernels, "status", lambda: kernels.KernelStatus(False, None, "why"))
    assert "panels" not in packings(torch.float32)


def test_the_real_ones_are_measured_in_time() -> None:
    weight = torch.randn(512, 256).bfloat16().float()
    choice = choose([weight], packings(torch.float32), 1 << 20)
    packed: PackedWeight = choice.pack(weight, None)
    assert choice.best(1).nbytes == packed.nbytes
    x = torch.randn(3, 256)
    assert torch.allclose(packed.multiply(x), x @ weight.t(), atol=1e-3)
