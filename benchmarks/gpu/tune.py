"""A look inside the decode of one model on a CUDA device: what the constants of kernels cost.

`python -m benchmarks.gpu.tune` builds the engine of the study, then records its passes of 1 and 32
rows anew for each variant and prints their times at once: a whole call with the host's part, and
the device's alone. The variants with kernels that must be compiled come last.
"""

from __future__ import annotations

import time

BEGAN_S = time.perf_counter()  # before torch is imported, which the budget pays for as well

from collections.abc import Callable, Iterator, Sequence  # noqa: E402
from contextlib import ExitStack, contextmanager  # noqa: E402
from dataclasses import dataclass, replace  # noqa: E402
from statistics import median  # noqa: E402
from types import ModuleType  # noqa: E402
from typing import Annotated, Any  # noqa: E402
from unittest.mock import patch  # noqa: E402

import torch  # noqa: E402
import typer  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402

from benchmarks.gpu.engine import Engine  # noqa: E402
from benchmarks.gpu.options import Options  # noqa: E402
from benchmarks.gpu.passes import RANK, Passes  # noqa: E402
from benchmarks.gpu.products import text  # noqa: E402
from benchmarks.gpu.replays import Recorded  # noqa: E402
from tandem.core.plan import LanePlan  # noqa: E402
from tandem.core.training import LoraSpec, TrainerSpec  # noqa: E402
from tandem.executor.capture import Capture, CudaCapture  # noqa: E402
from tandem.model.attention import tiles, triton_kernel  # noqa: E402
from tandem.model.gpu import early, products, thin  # noqa: E402
from tandem.model.gpu.products import Choice, ThinWeight, packed_layers, tune_products  # noqa: E402

ROWS = (1, 32)
_TRAINER = "tune-adapters"
MOST_KERNELS, NAME_CHARS = 12, 44
# Replays of a pass on the device, one after the other.


@dataclass(frozen=True)
class Setting:
    """A constant of a module, and its value in a variant."""

    module: ModuleType
    name: str
    value: object


@dataclass(frozen=True)
class Variant:
    """Settings with which passes are recorded."""

    name: str
    settings: tuple[Setting, ...] = ()


def _bytes_ahead(kib: int) -> Variant:
    return Variant(f"weights ahead {kib} KiB", (Setting(thin, "AHEAD_BYTES", kib << 10),))


def _keys_ahead(keys: int) -> Variant:
    return Variant(f"keys ahead {keys}", (Setting(triton_kernel, "AHEAD_KEYS", keys),))


def _least_share(keys: int) -> Variant:
    return Variant(f"least share {keys}", (Setting(tiles, "LEAST_SHARE", keys),))


AS_IS = Variant("as is")
NOTHING_AHEAD = Variant(
    "nothing ahead",
    (Setting(thin, "AHEAD_BYTES", 0), Setting(triton_kernel, "AHEAD_KEYS", 0)),
)
LITTLE_AHEAD = Variant(
    "weights 80 KiB, share 256",
    (
        Setting(thin, "AHEAD_BYTES", 80 << 10),
        Setting(triton_kernel, "AHEAD_KEYS", 0),
        Setting(tiles, "LEAST_SHARE", 256),
    ),
)
# The launches are other ones, the kernels are not.
QUICK = (
    AS_IS,
    NOTHING_AHEAD,
    LITTLE_AHEAD,
    *(_bytes_ahead(kib) for kib in (0, 8, 32, 64, 128)),
    *(_keys_ahead(keys) for keys in (0, 256)),
    *(_least_share(keys) for keys in (64, 256)),
)
COMPILED = (
    Variant("attention: 3 stages", (Setting(triton_kernel, "_STAGES", {False: 3, True: 3}),)),
    Variant("attention: 4 stages", (Setting(triton_kernel, "_STAGES", {False: 3, True: 4}),)),
    Variant("attention: 32 keys a step", (Setting(triton_kernel, "_KEY_BYTES", 8192),)),
    Variant("attention: 128 keys a step", (Setting(triton_kernel, "_KEY_BYTES", 32768),)),
)
NOT_EARLY = Variant("no early start", (Setting(early, "_starts_early", lambda device: False),))


@contextmanager
def applied(variant: Variant) -> Iterator[None]:
    """The settings of `variant` hold inside."""
    with ExitStack() as stack:
        for each in variant.settings:
            stack.enter_context(patch.object(each.module, each.name, each.value))
        yield


class Tuning:
    """One run. `capture` makes a capture with memory of its own."""

    def __init__(self, engine: Engine, options: Options, capture: Callable[[], Capture]) -> None:
        self._engine, self._options, self._capture = engine, options, capture
        self._recorded = Recorded(capture())
        self._passes = Passes(engine, options)
        # Under the profiler, since it takes its time to add up what it saw.
        self._few = replace(options, rounds=4, warm_up=1)
        self._profiled = Passes(engine, self._few)
        self._cuda = options.device == "cuda"
        self._plans = {rows: self._passes.decode([None] * rows) for rows in ROWS}

    def run(self) -> None:
        """All of it, until the budget is spent."""
        steps: list[Callable[[], None]] = [lambda each=each: self._variant(each) for each in QUICK]
        steps += [self._products, lambda: self._kernels("early start")]
        steps += [lambda: self._variant(NOT_EARLY), self._alone]
        steps += [lambda each=each: self._variant(each) for each in COMPILED]
        for step in steps:
            if self._now_s() > self._options.budget_s:
                say("the rest is skipped: no time is left")
                return
            step()
        say(f"{self._now_s():.1f} s")

    def _variant(self, variant: Variant) -> None:
        found = []
        with applied(variant):
            self._record_anew()
            for rows, plan in self._plans.items():
                whole_s = median(self._passes.times([plan])[0])
                found.append(
                    f"{rows:2} rows {1e3 * whole_s:6.3f} ms, device {self._device_ms():6.3f}"
                )
        say(f"{self._now_s():5.1f} s  {variant.name:28} {'   '.join(found)}")

    def _record_anew(self) -> None:
        """Every pass is recorded when it next runs."""
        self._recorded = Recorded(self._capture())
        self._engine.executor.capture_passes(self._recorded, 0.0)

    def _device_ms(self) -> float:
        """Of the pass that was recorded last."""
        return self._recorded.device_ms() if self._cuda else 0.0

    def _products(self) -> None:
        """All products by cuBLAS, all by ours, and as they are measured once more."""
        if not self._cuda:
            return
        self._plain()
        self._variant(Variant("layers' products by cuBLAS"))
        with applied(Variant("", (Setting(products, "FAVOUR", float("inf")),))):
            choices = tune_products(self._engine.loaded.backbone)
        for (shape, most), choice in choices.items():
            say(_line(shape, most, choice))
        self._variant(Variant("layers' products by ours"))
        self._plain()
        tune_products(self._engine.loaded.backbone)
        self._variant(Variant("measured once more"))

    def _plain(self) -> None:
        for layer in packed_layers(self._engine.loaded.backbone):
            if isinstance(layer.weights, ThinWeight):
                layer.weights = layer.weights.plain

    def _alone(self) -> None:
        """Kernels' own times, since none starts before another one ends; with adapters, too."""
        with applied(NOT_EARLY):
            self._kernels("no early start")
            executor = self._engine.executor
            executor.open_trainer(TrainerSpec(_TRAINER, LoraSpec(rank=RANK)))
            snapshot = executor.snapshot_trainer(_TRAINER)
            executor.close_trainer(_TRAINER)
            keys = [f"tune-{place}" for place in range(max(ROWS))]
            for key in keys:
                executor.adopt(snapshot, key)
            self._profile("no early start, one adapter", self._passes.decode([keys[0]] * len(keys)))
            self._profile(f"no early start, {len(keys)} adapters", self._passes.decode(keys))
            for key in keys:
                executor.drop_adapter(key)

    def _kernels(self, name: str) -> None:
        self._record_anew()
        for rows, plan in self._plans.items():
            self._profile(f"{name}, {rows} rows", plan)

    def _profile(self, name: str, plan: LanePlan) -> None:
        """Kernels of a pass by name, and how one layer's follow each other."""
        self._passes.times([plan])
        kind = ProfilerActivity.CUDA if self._cuda else ProfilerActivity.CPU
        with profile(activities=[kind]) as profiler:
            repeats = len(self._profiled.times([plan])[0]) + self._few.warm_up
        found = [
            (each.device_time_total if self._cuda else each.cpu_time_total, each.count, each.key)
            for each in profiler.key_averages()
        ]
        say(f"{self._now_s():5.1f} s  {name}: kernels, microseconds a pass and a call")
        for spent_us, count, key in sorted(found, reverse=True)[:MOST_KERNELS]:
            say(f"    {key[:NAME_CHARS]:{NAME_CHARS}} {count / repeats:6.1f} calls "
                f"{spent_us / repeats:8.1f} {spent_us / count:7.2f}")  # fmt: skip
        if self._cuda:
            _say_layer(list(profiler.events()))

    def _now_s(self) -> float:
        return time.perf_counter() - BEGAN_S


def _say_layer(events: Sequence[Any]) -> None:
    """Begin, end and name of the kernels of a layer in the middle of the last pass."""
    kernels = sorted(
        (each.time_range.start, each.time_range.end, each.name)
        for each in events
        if each.device_type == torch.autograd.DeviceType.CUDA
    )
    attends = [place for place, each in enumerate(kernels) if each[2].startswith("_attend")]
    if len(attends) < 4:
        return
    first, last = attends[-4], attends[-3]
    origin = kernels[first][0]
    say("    one layer, microseconds: " + ", ".join(
        f"{name[:16]} {start - origin:.1f} to {end - origin:.1f}"
        for start, end, name in kernels[first : last + 1]
    ))  # fmt: skip


def _line(shape: products.Shape, most: int, choice: Choice) -> str:
    return (
        f"    {shape[0]:6} x {shape[1]:5}, up to {most:2} rows: ours {choice.us:7.1f} us, "
        f"cuBLAS {choice.cublas_us:7.1f} us, {text(choice.cut)}"
    )


def say(line: str) -> None:
    """Print at once."""
    print(line, flush=True)


def main(
    model: Annotated[str, typer.Option(help="A shape by name, or a directory.")] = "llama-8b",
    budget_s: Annotated[float, typer.Option(help="What would begin later is skipped.")] = 70.0,
) -> None:
    """Measure and print."""
    if not torch.cuda.is_available():
        raise SystemExit("skipped: torch finds no CUDA device")
    options = replace(Options(), models=(model,), budget_s=budget_s)
    engine = Engine(
        model, options, lambda line: say(f"{time.perf_counter() - BEGAN_S:5.1f} s  {line}")
    )
    Tuning(engine, options, lambda: CudaCapture(torch.device("cuda"))).run()


if __name__ == "__main__":
    typer.run(main)
