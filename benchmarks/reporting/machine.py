"""What the figures were measured on, accelerators included, and its name in file names and rows."""

from __future__ import annotations

import torch

from tandem.bench.machine import describe as describe_processor


def describe(device: str, threads: int) -> dict[str, object]:
    """Processor, cores, matrix instructions, memory, versions, accelerator."""
    described = describe_processor(device, threads)
    if device == "cuda":
        described["accelerator"] = torch.cuda.get_device_name()
    return described


def slug(described: dict[str, object]) -> str:
    """Name for result files, e.g. `cpu-2-amx_bf16` or `cuda-nvidia-h100`."""
    if described["device"] == "cuda":
        return "cuda-" + "-".join(str(described["accelerator"]).lower().split()[:2])
    flags = described["matrix_flags"]
    assert isinstance(flags, list)
    best = next(
        (flag for flag in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if flag in flags), ""
    )
    return "-".join(filter(None, ("cpu", str(described["cores"]), best)))


def short(described: dict[str, object]) -> str:
    """In a few words, for a row of a study that several machines may go on with."""
    return f"{described['cpu']}, {slug(described)}"
