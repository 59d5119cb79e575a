"""The choice of a packing: by a fake clock, within its time, and what it says."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tandem.core.errors import InvalidRequest
from tandem.model import kernels, product_choice
from tandem.model.linear import OneDnnWeight, Pack, PackedWeight, PanelWeight, PlainWeight
from tandem.model.product_choice import (
    ROWS,
    PackingChoice,
    choose,
    choose_for,
    packings,
    sample,
)
from tandem.model.settled_packings import SettledPackings


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
        (lambda rows: 1e-6 if rows == 1 else 1e-3, "first"),  # most trials decide, not their mean
        (lambda rows: 2e-3 if rows == 1 else 0.5e-3, "other"),
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


@pytest.mark.parametrize("seconds", [0.01, 0.007, 0.013])
def test_every_weight_has_its_share_of_the_time(seconds: float) -> None:
    clock = Clock()
    spent: list[float] = []

    class Timed(PlainWeight):
        def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
            spent.append(clock.now_s)
            super().__init__(weight, bias)

        def multiply(self, x: Tensor) -> Tensor:
            clock.now_s += seconds
            return super().multiply(x)

    choose(WEIGHTS, {"first": Timed, "other": Timed}, 1 << 10, clock)
    began_s, second_s = spent[0], spent[2]
    for taken_s in (second_s - began_s, clock.now_s - second_s):
        assert 0.2 - 1e-9 <= taken_s <= 0.2 + seconds + 1e-9


def model_of(*shapes: tuple[int, int], dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.ModuleList(nn.Linear(k, n, bias=False).to(dtype) for n, k in shapes)


class Measured:
    """In place of `choose`: what it was asked, and what it says."""

    def __init__(self, name: str = "onednn") -> None:
        self.name = name
        self.shapes: list[list[tuple[int, ...]]] = []
        self.flushes: list[int] = []

    def __call__(self, weights: list[Tensor], among: dict[str, Pack], flush: int) -> PackingChoice:
        self.shapes.append([tuple(each.shape) for each in weights])
        self.flushes.append(flush)
        return PackingChoice(self.name, among[self.name])


BOTH = pytest.mark.skipif(len(packings(torch.float32)) < 2, reason="one packing only")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Measured:
    """Nothing is kept yet."""
    found = Measured()
    monkeypatch.setattr(product_choice, "choose", found)
    status = kernels.KernelStatus(True, tmp_path / "tandem.so", "")
    monkeypatch.setattr(kernels, "status", lambda: status)
    return found


@BOTH
def test_small_models_are_not_measured_and_others_by_their_largest_weights(
    measured: Measured,
) -> None:
    first = next(iter(packings(torch.float32)))
    assert choose_for(model_of((32, 16))).name == first and not measured.shapes
    choose_for(model_of((4, 4), (1000, 400), (5000, 300), (1000, 400), (1000, 400)))
    assert measured.shapes == [[(1000, 400), (5000, 300)]]
    assert measured.flushes == [4 * (3 * 1000 * 400 + 5000 * 300 + 16)]


@BOTH
def test_weights_that_16_bits_hold_are_not_measured(measured: Measured) -> None:
    model = model_of((2048, 1024))
    model[0].weight.data = model[0].weight.bfloat16().float()
    assert choose_for(model).name == "panels" and not measured.shapes
    model[0].weight.data[-1, -1] = 1.0 + 2**-20
    assert choose_for(model).name == "onednn" and measured.shapes


@BOTH
def test_equal_starts_choose_alike(measured: Measured, tmp_path: Path) -> None:
    assert choose_for(model_of((2048, 1024))).name == "onednn"
    measured.name = "panels"
    choice = choose_for(model_of((2048, 1024)))  # with other values
    assert choice.name == "onednn" and choice.pack is OneDnnWeight
    assert choose_for(model_of((1024, 2048))).name == "panels"
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    assert choose_for(model_of((2048, 1024))).name == "panels"
    torch.set_num_threads(threads)
    assert len(measured.shapes) == 3
    (tmp_path / "packings.json").write_text("{half")
    assert choose_for(model_of((2048, 1024))).name == "panels"  # measured again
    assert len(measured.shapes) == 4


@BOTH
def test_a_folder_that_cannot_be_written_costs_a_measurement(
    measured: Measured, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "packings.lock").mkdir()
    for _ in range(2):
        assert choose_for(model_of((2048, 1024))).name == "onednn"
    assert len(measured.shapes) == 2 and "cannot keep the choice" in caplog.text


@BOTH
def test_a_packing_is_pinned(measured: Measured, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, by in (("panels", PanelWeight), ("onednn", OneDnnWeight)):
        for model in (model_of((2048, 1024)), model_of((32, 16))):
            assert choose_for(model, name) == PackingChoice(name, by)
    monkeypatch.setattr(kernels, "status", lambda: kernels.KernelStatus(False, None, "why"))
    with pytest.raises(InvalidRequest, match="'panels', which this model cannot have") as refused:
        choose_for(model_of((32, 16)), "panels")
    assert refused.value.param == "packing" and not measured.shapes


def test_starts_at_the_same_time_measure_once(tmp_path: Path) -> None:
    measured: list[int] = []

    def measure() -> str:
        measured.append(len(measured))
        time.sleep(0.05)
        return f"{len(measured)}"

    def find(_: int) -> str:
        return SettledPackings(tmp_path).find("key", {"1", "2", "3"}, measure)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(find, range(4))) == ["1"] * 4
    assert SettledPackings(tmp_path).find("key", {"2"}, lambda: "2") == "2"  # 1 is not possible


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
