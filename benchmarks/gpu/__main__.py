"""What one GPU gives, against its own ceilings: see docs/benchmarks.md."""

from __future__ import annotations

import time

BEGAN_S = time.perf_counter()  # before torch is imported, which the budget pays for as well

import os  # noqa: E402
from dataclasses import replace  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Annotated  # noqa: E402

import torch  # noqa: E402
import typer  # noqa: E402

from benchmarks.gpu.options import FURTHER, MODELS, PARTS, Options  # noqa: E402
from benchmarks.gpu.study import Study, small  # noqa: E402


def main(
    parts: Annotated[str, typer.Option(help="Of these, and kernels, by commas.")] = ",".join(PARTS),
    models: Annotated[
        str, typer.Option(help="Shapes by name, or directories; the first one also co-serves.")
    ] = ",".join(MODELS),
    device: Annotated[str, typer.Option(help="cuda; cpu only shows that the parts run.")] = "cuda",
    seconds: Annotated[float, typer.Option(help="Of each window of coserving.")] = 20.0,
    rate: Annotated[float, typer.Option(help="Requests a second of coserving.")] = 5.0,
    ttft_slo: Annotated[float, typer.Option(help="Seconds, of coserving.")] = 1.0,
    tpot_factor: Annotated[
        list[float] | None, typer.Option(help="Objectives over requests alone; repeatable.")
    ] = None,
    graph_gib: Annotated[
        float, typer.Option(help="For what training keeps for its gradients.")
    ] = 1.0,
    budget_s: Annotated[float, typer.Option(help="Parts that would not fit are skipped.")] = 200.0,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep an earlier run's rows of other parts.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of weights, prompts and arrivals.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("benchmarks/results"),
) -> None:
    """Measure and write gpu-DEVICE.json and .md."""
    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("skipped: torch finds no CUDA device; --device cpu shows the parts")
    wanted = tuple(filter(None, parts.split(",")))
    if unknown := [name for name in wanted if name not in (*PARTS, *FURTHER)]:
        raise typer.BadParameter(f"no part {unknown[0]!r}; known: {', '.join((*PARTS, *FURTHER))}")
    options = Options(
        parts=wanted,
        models=tuple(filter(None, models.split(","))),
        device=device,
        budget_s=budget_s,
        seconds=seconds,
        ttft_slo=ttft_slo,
        seed=seed,
        graph_bytes=int(graph_gib * 2**30),
    )
    options = replace(
        small(options) if device == "cpu" else replace(options, rate=rate),
        tpot_factors=tuple(tpot_factor) if tpot_factor else options.tpot_factors,
    )
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    study = Study(options, out, lambda text: print(text, flush=True), BEGAN_S)
    raise SystemExit(0 if study.run(keep=keep) else 1)


if __name__ == "__main__":
    typer.run(main)
