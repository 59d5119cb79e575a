"""Adapters beside frozen products on a CUDA device: what the division of their work costs.

`python -m benchmarks.gpu.tune_adapters` captures the products of some layers of an 8B Llama and all
between them but attention, for 32 rows with no adapter, one, and one a row. It prints milliseconds
for 32 such layers, with the work divided as it is and in other ways (`Shares`), and each kernel's
share. It takes less than 30 seconds; what would begin later is skipped.
"""

from __future__ import annotations

import time

BEGAN_S = time.perf_counter()  # before torch is imported, which the budget pays for as well

from collections.abc import Callable, Iterator  # noqa: E402
from dataclasses import dataclass, replace  # noqa: E402
from unittest.mock import patch  # noqa: E402

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402

from benchmarks.gpu.products import text  # noqa: E402
from tandem.executor.capture import CudaCapture  # noqa: E402
from tandem.model.gpu import lora  # noqa: E402
from tandem.model.gpu.adapters import TableUpdates  # noqa: E402
from tandem.model.gpu.lora import Shares  # noqa: E402
from tandem.model.gpu.products import BUCKETS, Arena, ThinWeight, measure  # noqa: E402
from tandem.model.gpu.rows import TritonRows  # noqa: E402
from tandem.model.gpu.thin import Workspace  # noqa: E402
from tandem.model.linear import PlainWeight  # noqa: E402
from tandem.model.lora import JointUpdate, LoraLayers, LoraLinear, ReservedTiles, Segment  # noqa: E402
from tandem.model.lora_files import LinearShape, LoraWeights  # noqa: E402

BUDGET_S = 28.0
ROWS, RANK, LAYERS, ALL_LAYERS, WIDTH = 32, 16, 8, 32, 4096
# Inputs of a layer's joint products, and outputs of their members.
PRODUCTS = {
    "qkv": (WIDTH, (WIDTH, 1024, 1024)),
    "out": (WIDTH, (WIDTH,)),
    "gate_up": (WIDTH, (14336, 14336)),
    "down": (14336, (WIDTH,)),
}
REPLAYS, TURNS = 10, 4
KINDS = {
    "none": (),
    "one": (Segment("0", 0, ROWS),),
    f"{ROWS}": tuple(Segment(str(row), row, row + 1) for row in range(ROWS)),
}
_AS_IS = lora.SHARES


def variants() -> Iterator[tuple[str, Shares]]:
    """Divisions of the work, those that compile nothing first."""
    yield "as is", _AS_IS
    for programs in (320, 1280):
        yield f"{programs} programs expand", replace(_AS_IS, expanding=programs)
    yield "shrink after the product", replace(_AS_IS, beside=False)
    yield "B not asked for ahead", replace(_AS_IS, ahead=False)
    yield "256 columns", replace(_AS_IS, columns=256)
    yield "shrink with 3 stages", replace(_AS_IS, stages=3)
    yield "shrink split for 512 programs", replace(_AS_IS, splitting=512)
    yield "splits of 256 inputs", replace(_AS_IS, inputs=256)


@dataclass(frozen=True)
class Product:
    """A frozen product and its adapters' update, as in `TritonLayer`."""

    weights: ThinWeight
    update: JointUpdate

    def of(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """The product, onto `residual` if there is one, with all updates."""
        weights = self.weights
        out = weights.multiply(x) if residual is None else weights.multiply_onto(residual, x)
        self.update.update(x, out, settled=weights.settles(len(x)))
        return out


class Stack:
    """Layers without attention: the values between products come from some of the columns."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.rows = device, TritonRows()
        self.factor = self._random(WIDTH)
        shapes = {
            f"{layer} {name} {member}": LinearShape(inputs, width)
            for layer in range(LAYERS)
            for name, (inputs, widths) in PRODUCTS.items()
            for member, width in enumerate(widths)
        }
        places = nn.ModuleDict({name: nn.Identity() for name in shapes})
        self.lora = LoraLayers(places, shapes, TableUpdates(device, torch.bfloat16))
        self.layers: list[dict[str, Product]] = [{} for _ in range(LAYERS)]
        arena, workspace = Arena(self._random(0)), Workspace(device)
        for name, (inputs, widths) in PRODUCTS.items():
            choice = measure(self._random(sum(widths), inputs), ROWS, arena, workspace)
            say(f"{name}: {choice.us:.1f} us, cuBLAS {choice.cublas_us:.1f}, {text(choice.cut)}")
            if choice.cut is not None:
                workspace.reserve(ROWS, sum(widths), choice.cut)
            for number, layer in enumerate(self.layers):
                plain = PlainWeight(self._random(sum(widths), inputs), None)
                weights = ThinWeight(plain, dict.fromkeys(BUCKETS, choice.cut), workspace)
                members = (places[f"{number} {name} {each}"] for each in range(len(widths)))
                wrapped = [each for each in members if isinstance(each, LoraLinear)]
                layer[name] = Product(weights, self.lora.group(wrapped))
        for key in range(ROWS):
            self.lora.add(str(key), {name: self._adapter(shape) for name, shape in shapes.items()})
        self.tiles = self.lora.reserve(ROWS)
        self.x, self.out = self._random(ROWS, WIDTH), self._random(ROWS, WIDTH)

    def record(self, tiles: ReservedTiles | None) -> Callable[[], None]:
        """A captured pass over all layers, from `x` to `out`."""
        return CudaCapture(self.device).record(lambda: self._compute(tiles))

    def _compute(self, tiles: ReservedTiles | None) -> None:
        x = self.x
        if tiles is not None:
            self.lora.activate_reserved(tiles)
        with torch.no_grad():
            for layer in self.layers:
                normal = self.rows.rms_norm(x, self.factor, 1e-6)
                qkv = layer["qkv"].of(normal)
                mixed = self.rows.rms_norm(qkv[:, :WIDTH], self.factor, 1e-6)
                projected = layer["out"].of(mixed)
                x, normal = self.rows.add_rms_norm(x, projected, self.factor, 1e-6)
                gate, up = layer["gate_up"].of(normal).chunk(2, dim=-1)
                x = layer["down"].of(self.rows.silu_mul(gate, up), x)
            self.out.copy_(x)
        self.lora.activate(())

    def _random(self, *size: int) -> Tensor:
        return torch.randn(size, device=self.device, dtype=torch.bfloat16) * 0.02

    def _adapter(self, shape: LinearShape) -> LoraWeights:
        return LoraWeights(self._random(RANK, shape.inputs), self._random(shape.outputs, RANK), 1.0)


def measured(stack: Stack, name: str, expected: dict[str, Tensor]) -> None:
    """Print a variant's times; say if its results are not the first variant's."""
    tiles = stack.tiles
    assert tiles is not None
    replays = {True: stack.record(None), False: stack.record(tiles)}
    best = dict.fromkeys(KINDS, float("inf"))
    for _ in range(TURNS):
        for kind, segments in KINDS.items():
            tiles.fill(segments)
            best[kind] = min(best[kind], _ms(replays[not segments]))
    words = []
    for kind, segments in KINDS.items():
        tiles.fill(segments)
        replays[not segments]()
        error = (stack.out - expected.setdefault(kind, stack.out.clone())).abs().max().item()
        words.append(f"{kind} {best[kind]:6.3f} ms ({best[kind] / best['none']:.3f}, {error:.0e})")
    say(f"{name:30} {'   '.join(words)}")


def kernels(stack: Stack) -> None:
    """Microseconds of each kernel for 32 layers; early starts count as they wait."""
    tiles = stack.tiles
    assert tiles is not None
    for kind, segments in KINDS.items():
        replay = stack.record(tiles if segments else None)
        tiles.fill(segments)
        replay()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            replay()
            torch.cuda.synchronize()
        found = {each.key: (each.device_time_total, each.count) for each in profiler.key_averages()}
        longest = sorted(found.items(), key=lambda item: -item[1][0])[:7]
        for name, (us, calls) in longest:
            say(f"{kind:5} {name[:40]:40} {us / calls:7.1f} us a call, {calls / LAYERS:4.1f} calls "
                f"and {us / LAYERS:6.1f} us a layer")  # fmt: skip


def _ms(replay: Callable[[], None]) -> float:
    """Of all layers of the model."""
    replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(REPLAYS):
        replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / REPLAYS * ALL_LAYERS / LAYERS


def say(line: str) -> None:
    """Print with the time since the start."""
    print(f"{time.perf_counter() - BEGAN_S:5.1f} s  {line}", flush=True)


def main() -> None:
    """Measure and print."""
    stack = Stack(torch.device("cuda"))
    expected: dict[str, Tensor] = {}
    for place, (name, shares) in enumerate(variants()):
        if time.perf_counter() - BEGAN_S > BUDGET_S:
            say("the rest is skipped: no time is left")
            break
        with patch.object(lora, "SHARES", shares):
            measured(stack, name, expected)
        if place == 0:
            kernels(stack)


if __name__ == "__main__":
    main()
