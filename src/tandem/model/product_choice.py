"""Which kernels multiply with a model's frozen weights on this CPU: measured when it is loaded.

A few products with the model's own weights are timed by every packing that could be used, within a
bounded time. Where the processor has AMX, its kernel is taken unmeasured. Invariant: a packing is
chosen for a whole model, since the kernels of whole layers need all projections in one packing.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tandem.model import kernels
from tandem.model.linear import OneDnnWeight, Pack, PackedWeight, PanelWeight, PlainWeight, pack

logger = logging.getLogger(__name__)

# Rows of decode steps and of a part of a prompt.
ROWS = (1, 8, 256)
_REPEATS = 5
# All measurements together. Every packing is measured once at least.
_LIMIT_S = 0.4
# Of one weight that is measured: more would take long, less would be found in a cache.
_SAMPLE_BYTES = 8 << 20
_SHAPES = 2
_EXAMPLE = (2048, 1024)
# Read between two products, as the other weights of a model are.
_FLUSH_BYTES = 64 << 20
# A model with less is not measured: its products take no time that could be told apart.
_SMALL_BYTES = 4 << 20
# Another packing than the first has to be so much faster, so that equal ones do not take turns.
_CLEARLY = 1.1


@dataclass(frozen=True, slots=True)
class Trial:
    """The best time of one packing's product of `rows` rows with a weight [outputs, inputs]."""

    packing: str
    outputs: int
    inputs: int
    rows: int
    nbytes: int  # of the packed weight
    seconds: float

    @property
    def bits(self) -> int:
        """Of one weight."""
        return round(8 * self.nbytes / (self.outputs * self.inputs))

    @property
    def read_gb_s(self) -> float:
        """Speed of reading the weight."""
        return self.nbytes / self.seconds / 1e9

    @property
    def gflop_s(self) -> float:
        """Speed of the arithmetic."""
        return 2.0 * self.outputs * self.inputs * self.rows / self.seconds / 1e9


@dataclass(frozen=True, slots=True)
class Choice:
    """The packing for a model's weights, by name, and what was measured (nothing: no choice)."""

    name: str
    pack: Pack
    trials: tuple[Trial, ...] = ()

    def best(self, rows: int, packing: str | None = None) -> Trial:
        """The fastest product of so many rows, by the chosen packing or another one."""
        name = packing or self.name
        own = [each for each in self.trials if (each.packing, each.rows) == (name, rows)]
        return max(own, key=lambda each: each.gflop_s)

    def __str__(self) -> str:
        measured = [
            f"{name} {self.best(ROWS[0], name).read_gb_s:.1f} GB/s with {ROWS[0]} row, "
            f"{self.best(ROWS[-1], name).gflop_s:.0f} GFLOP/s with {ROWS[-1]} rows"
            for name in dict.fromkeys(each.packing for each in self.trials)
        ]
        return "; ".join([self.name, *measured])


def packings(dtype: torch.dtype) -> dict[str, Pack]:
    """The packings that can hold weights of `dtype` on this CPU, by name."""
    if dtype is torch.bfloat16 and kernels.amx_linear():
        return {"amx": pack}
    found: dict[str, Pack] = {}
    if dtype in (torch.float32, torch.bfloat16):
        if kernels.status().available:
            found["panels"] = PanelWeight
        if torch.backends.mkldnn.is_available() and (
            dtype is torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()
        ):
            found["onednn"] = OneDnnWeight
    return found or {"plain": PlainWeight}


def choose(
    weights: Sequence[Tensor],
    among: dict[str, Pack],
    flush_bytes: int = _FLUSH_BYTES,
    clock: Callable[[], float] = time.perf_counter,
) -> Choice:
    """The first packing of `among`, or one that is clearly faster with `weights` [out, in] of one
    dtype: in the mean over weights and numbers of rows, which count alike."""
    first = next(iter(among))
    trials: list[Trial] = []
    flush, deadline = torch.ones(flush_bytes // 4), clock() + _LIMIT_S
    for weight in weights:
        trials += _measure(weight, among, flush, clock, deadline)
    logs = dict.fromkeys(among, 0.0)
    for trial in trials:
        logs[trial.packing] += math.log(trial.seconds) * len(among) / len(trials)
    best = min(logs, key=logs.__getitem__)
    name = best if logs[first] - logs[best] > math.log(_CLEARLY) else first
    return Choice(name, among[name], tuple(trials))


def choose_for(model: nn.Module) -> Choice:
    """The packing for the linear layers of `model`, a model on the CPU. Logs what was measured."""
    linears = [each for each in model.modules() if type(each) is nn.Linear]
    if not linears:
        return Choice("plain", pack)
    among = packings(linears[0].weight.dtype)
    nbytes = sum(each.weight.nbytes for each in linears)
    if len(among) == 1 or nbytes < _SMALL_BYTES:
        name, first = next(iter(among.items()))
        return Choice(name, first)
    totals: dict[tuple[int, int], int] = {}
    examples: dict[tuple[int, int], Tensor] = {}
    for each in linears:
        shape = (each.out_features, each.in_features)
        totals[shape] = totals.get(shape, 0) + each.weight.nbytes
        examples[shape] = each.weight.detach()
    largest = sorted(totals, key=totals.__getitem__)[-_SHAPES:]
    samples = [sample(examples[shape]) for shape in largest]
    choice = choose(samples, among, min(nbytes, _FLUSH_BYTES))
    logger.info("products with frozen weights: %s", choice)
    return choice


def choose_example(dtype: torch.dtype) -> Choice:
    """The packing for a middle-sized weight with bfloat16 values, computed in `dtype`."""
    weight = torch.randn(_EXAMPLE).bfloat16().to(dtype)
    return choose([weight], packings(dtype))


def sample(weight: Tensor) -> Tensor:
    """The first outputs of a weight, as many as are worth a measurement."""
    row_bytes = weight.shape[1] * weight.element_size()
    return weight[: max(1, _SAMPLE_BYTES // row_bytes)].contiguous()


def _measure(
    weight: Tensor,
    among: dict[str, Pack],
    flush: Tensor,
    clock: Callable[[], float],
    deadline: float,
) -> list[Trial]:
    """Every packing and number of rows in turns, so that a busy moment slows all alike."""
    outputs, inputs = weight.shape
    packed: dict[str, PackedWeight] = {name: by(weight, None) for name, by in among.items()}
    inputs_of = {rows: torch.ones(rows, inputs, dtype=weight.dtype) for rows in ROWS}
    best: dict[tuple[str, int], float] = {}
    for turn in range(1 + _REPEATS):
        for rows, x in inputs_of.items():
            for name, each in packed.items():
                flush.sum()
                began = clock()
                each.multiply(x)
                taken = clock() - began
                if turn:  # the first call may compile
                    best[name, rows] = min(taken, best.get((name, rows), math.inf))
        if turn and clock() > deadline:
            break
    return [
        Trial(name, outputs, inputs, rows, packed[name].nbytes, seconds)
        for (name, rows), seconds in best.items()
    ]
