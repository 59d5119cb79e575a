"""Which kernels multiply with a model's frozen weights on this CPU.

AMX's are taken where the processor has it, ours in panels where 16 bits hold the weights. Otherwise
a few products with the model's own weights are timed by every packing that could be used, once on a
machine: what was chosen is kept. Invariants: equal starts choose alike, since another packing has
other last bits; a packing is for a whole model, since the kernels of whole layers need all
projections in one packing.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tandem.core.errors import InvalidRequest
from tandem.model import kernels
from tandem.model.linear import (
    OneDnnWeight,
    Pack,
    PackedWeight,
    PanelWeight,
    PlainWeight,
    fits_bfloat16,
    pack,
)
from tandem.model.settled_packings import SettledPackings

logger = logging.getLogger(__name__)

# Rows of decode steps and of a part of a prompt.
ROWS = (1, 8, 256)
_REPEATS = 5
# After this time, divided evenly among the weights, no product is repeated. Each is computed twice
# in any case, so a busy machine takes longer.
_LIMIT_S = 0.4
# Of one weight that is measured: more would take long, less would be found in a cache.
_SAMPLE_BYTES = 8 << 20
_SHAPES = 2
_EXAMPLE = (2048, 1024)
# Read between two products, as the other weights of a model are.
_FLUSH_BYTES = 64 << 20
# A model with less is not measured: its products take no time that could be told apart.
_SMALL_BYTES = 4 << 20
# Another packing than the first wins a trial if it is so much faster.
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
class PackingChoice:
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
) -> PackingChoice:
    """The first packing of `among`, or one that is clearly faster in most trials: those of each of
    `weights` [out, in], all of one dtype, with each number of rows."""
    first = next(iter(among))
    trials: list[Trial] = []
    flush = torch.ones(flush_bytes // 4)
    for weight in weights:
        trials += _measure(weight, among, flush, clock, _LIMIT_S / len(weights))
    wins = dict.fromkeys(among, 0)
    for i in range(0, len(trials), len(among)):
        of_first, *others = trials[i : i + len(among)]
        for other in others:
            wins[other.packing] += other.seconds * _CLEARLY < of_first.seconds
    best = max(wins, key=wins.__getitem__)
    name = best if 2 * wins[best] > len(trials) // len(among) else first
    return PackingChoice(name, among[name], tuple(trials))


def choose_for(model: nn.Module, packing: str = "auto") -> PackingChoice:
    """The packing for the linear layers of `model`, a model on the CPU: the one that is named, or
    with `auto` a fast one. Logs what was measured. Raises `InvalidRequest` for one that cannot be
    used here."""
    linears = [each for each in model.modules() if type(each) is nn.Linear]
    if not linears:
        return PackingChoice("plain", pack)
    among = packings(linears[0].weight.dtype)
    name, first = next(iter(among.items()))
    if packing != "auto":
        if packing not in among:
            said = f"model.packing is {packing!r}, which this model cannot have here; use auto"
            raise InvalidRequest(said, param="packing")
        return PackingChoice(packing, among[packing])
    nbytes = sum(each.weight.nbytes for each in linears)
    if len(among) == 1 or nbytes < _SMALL_BYTES:
        return PackingChoice(name, first)
    examples = _largest(linears)
    samples = [sample(each) for each in examples]
    if name == "panels" and all(map(fits_bfloat16, samples)):
        return PackingChoice(name, first)  # half the bytes of the others

    def measure() -> str:
        choice = choose(samples, among, min(nbytes, _FLUSH_BYTES))
        logger.info("products with frozen weights: %s", choice)
        return choice.name

    library = kernels.status().path
    assert library is not None  # else there is one packing only
    shapes = [f"{each.shape[0]}x{each.shape[1]}" for each in examples]
    key = " ".join([str(examples[0].dtype), f"threads={torch.get_num_threads()}", *shapes])
    name = SettledPackings(library.parent).find(key, among, measure)
    return PackingChoice(name, among[name])


def choose_example(dtype: torch.dtype) -> PackingChoice:
    """The packing for a middle-sized weight with bfloat16 values, computed in `dtype`."""
    weight = torch.randn(_EXAMPLE).bfloat16().to(dtype)
    return choose([weight], packings(dtype))


def _largest(linears: Sequence[nn.Linear]) -> list[Tensor]:
    """A weight of each of the shapes with the most bytes, the largest last."""
    totals: dict[tuple[int, int], int] = {}
    examples: dict[tuple[int, int], Tensor] = {}
    for each in linears:
        shape = (each.out_features, each.in_features)
        totals[shape] = totals.get(shape, 0) + each.weight.nbytes
        examples[shape] = each.weight.detach()
    return [examples[shape] for shape in sorted(totals, key=totals.__getitem__)[-_SHAPES:]]


def sample(weight: Tensor) -> Tensor:
    """The first outputs of a weight, as many as are worth a measurement."""
    row_bytes = weight.shape[1] * weight.element_size()
    return weight[: max(1, _SAMPLE_BYTES // row_bytes)].contiguous()


def _measure(
    weight: Tensor,
    among: dict[str, Pack],
    flush: Tensor,
    clock: Callable[[], float],
    limit_s: float,
) -> list[Trial]:
    """Trials of each number of rows, by every packing of `among` in order. They are computed in
    turns, so that a busy moment slows all alike; the first turn is not timed, as it may compile."""
    deadline = clock() + limit_s
    outputs, inputs = weight.shape
    packed: dict[str, PackedWeight] = {name: by(weight, None) for name, by in among.items()}
    best = {(rows, name): math.inf for rows in ROWS for name in among}
    inputs_of = {rows: torch.ones(rows, inputs, dtype=weight.dtype) for rows in ROWS}
    for turn in range(1 + _REPEATS):
        for rows, name in best:
            if turn > 1 and clock() >= deadline:
                break
            flush.sum()
            began = clock()
            packed[name].multiply(inputs_of[rows])
            taken = clock() - began
            if turn:
                best[rows, name] = min(taken, best[rows, name])
    return [
        Trial(name, outputs, inputs, rows, packed[name].nbytes, seconds)
        for (rows, name), seconds in best.items()
    ]
