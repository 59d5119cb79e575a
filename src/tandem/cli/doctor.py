"""`tandem doctor`: what this machine has, and what to do about what is missing.

Each check looks at one thing and returns a finding; nothing is changed, except that the
kernels are compiled if they were not yet. Invariant: a finding is FATAL only if no model could be
served at all.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata
from pathlib import Path

import psutil
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import tandem
from tandem.model.names import CHAT_INSTALL, CHAT_NAME, DEMO_NAME, chat_file
from tandem.processor import Watch, usable_cores

_PACKAGES = ("torch", "transformers", "safetensors", "fastapi", "uvicorn", "pydantic", "pyzmq")
_GIB = 2**30
_LITTLE_MEMORY_BYTES = 4 * _GIB
_DEMO_FILES = ("config.json", "model.safetensors", "tokenizer.json")


class Level(StrEnum):
    """How bad a finding is."""

    GOOD = "ok"
    ADVICE = "advice"
    FATAL = "missing"


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found about one subject, and what to do unless it is good."""

    subject: str
    level: Level
    found: str
    advice: str = ""


def examine() -> list[Finding]:
    """Run every check."""
    flags, watch = _cpu_flags(), Watch()
    found = [
        _versions(),
        *_torch(flags),
        *_kernels(flags),
        _memory(),
        _demo_model(),
        _chat_model(),
    ]
    return [*found, _processor(watch)]


def report(findings: Sequence[Finding], console: Console) -> int:
    """Show findings as a table; 1 if serving is impossible, else 0."""
    styles = {Level.GOOD: "green", Level.ADVICE: "yellow", Level.FATAL: "bold red"}
    table = Table("", "subject")
    table.add_column("found", overflow="fold")
    table.add_column("what to do", overflow="fold")
    for finding in findings:
        style = styles[finding.level]
        table.add_row(
            f"[{style}]{finding.level.value}[/]",
            finding.subject,
            escape(finding.found),
            escape(finding.advice),
        )
    console.print(table)
    fatal = [finding.subject for finding in findings if finding.level is Level.FATAL]
    if fatal:
        console.print(f"[bold red]serving is impossible[/]: {', '.join(fatal)}")
        return 1
    model = CHAT_NAME if chat_file() else DEMO_NAME
    console.print(f"ready to serve: tandem serve {model}")
    return 0


def _versions() -> Finding:
    found = [f"tandem {tandem.__version__}", f"Python {platform.python_version()}"]
    missing: list[str] = []
    for package in _PACKAGES:
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            missing.append(package)
    if missing:
        advice = f"install them: {sys.executable} -m pip install {' '.join(missing)}"
        return Finding("versions", Level.FATAL, f"not installed: {', '.join(missing)}", advice)
    return Finding("versions", Level.GOOD, ", ".join(found))


def _torch(flags: frozenset[str]) -> list[Finding]:
    """Device and number type that `auto` will choose from."""
    try:
        import torch
    except (ImportError, OSError) as error:
        advice = "install PyTorch for this platform: https://pytorch.org/get-started/locally"
        return [Finding("device", Level.FATAL, f"torch cannot be imported: {error}", advice)]
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        size = properties.total_memory / _GIB
        device = Finding("device", Level.GOOD, f"cuda: {properties.name}, {size:.0f} GiB")
        bf16 = torch.cuda.is_bf16_supported()
        return [device, _dtype(bf16, "the GPU has no bfloat16: --dtype float16 is faster")]
    threads = torch.get_num_threads()
    device = Finding("device", Level.GOOD, f"cpu: {threads} threads, no CUDA device")
    fast = bool(flags & {"amx_bf16", "avx512_bf16"}) or platform.machine() in ("arm64", "aarch64")
    return [device, _dtype(fast, "--dtype auto takes float32 on this CPU: bfloat16 would be slow")]


def _dtype(bf16: bool, advice: str) -> Finding:
    if bf16:
        return Finding("dtype", Level.GOOD, "bfloat16 is fast here")
    return Finding("dtype", Level.ADVICE, "no fast bfloat16", advice)


def _cpu_flags() -> frozenset[str]:
    """Instruction sets that Linux reports; empty elsewhere."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return frozenset()
    lines = (line for line in text.splitlines() if line.startswith(("flags", "Features")))
    return frozenset(next(lines, "").partition(":")[2].split())


def _kernels(flags: frozenset[str]) -> list[Finding]:
    """What the engine itself finds: compiler, library, and whether AMX products can be called."""
    try:
        from tandem.model import kernels
        from tandem.model.kernels.compiler import find_compiler
    except (ImportError, OSError):
        return []  # without torch, which `_torch` has found
    compiler, status = find_compiler(), kernels.status()
    if compiler is None:
        advice = "install g++ (Debian: apt install g++) or set CXX, for faster kernels"
        found = [Finding("C++ compiler", Level.ADVICE, "neither CXX nor g++", advice)]
    else:
        found = [Finding("C++ compiler", Level.GOOD, compiler)]
    if status.available:
        found.append(Finding("CPU kernels", Level.GOOD, str(status.path)))
    else:
        advice = "torch's are used, which are slower: give it a C++20 compiler that works"
        found.append(Finding("CPU kernels", Level.ADVICE, status.reason, advice))
    return [*found, _matrix_kernels(flags, amx=kernels.amx_linear(), compiled=status.available)]


def _matrix_kernels(flags: frozenset[str], *, amx: bool, compiled: bool) -> Finding:
    """Which products the frozen weights get, beside the instructions that the CPU reports."""
    known = ("amx_bf16", "amx_int8", "avx512_bf16", "avx512f", "avx2", "bf16", "asimd")
    has = ", ".join(flag for flag in known if flag in flags) or "unknown"
    if amx:
        return Finding("matrix kernels", Level.GOOD, f"AMX, ours (CPU: {has})")
    if "amx_bf16" in flags and not compiled:
        advice = "the CPU has AMX, our products with it need the CPU kernels"
    elif "avx512f" in flags:
        advice = "with AMX (Sapphire Rapids) prompts and training are much faster"
    elif "avx2" in flags:
        advice = (
            "prompts and training are faster with AVX-512, and much faster with AMX (Intel "
            "Sapphire Rapids and later); single answers are as fast as the memory"
        )
    else:
        advice = "single answers are as fast as the memory, prompts and training as the cores"
    return Finding("matrix kernels", Level.ADVICE, f"{_speeds()} (CPU: {has})", advice)


def _speeds() -> str:
    """The products that a bfloat16 checkpoint gets, measured, beside what the machine can do."""
    import torch

    from tandem.executor.ceilings import measure_ceilings
    from tandem.model.load import computes_in
    from tandem.model.product_choice import ROWS, choose_example

    names = {"panels": "ours in registers", "onednn": "oneDNN's", "plain": "torch's"}
    half = computes_in(torch.bfloat16)
    choice = choose_example(torch.bfloat16 if half else torch.float32)
    limits = measure_ceilings("cpu", "bfloat16" if half else "float32")
    few, many = choice.best(ROWS[0]), choice.best(ROWS[-1])
    return (
        f"{names[choice.name]}, bfloat16 weights kept in {few.bits} bits: "
        f"{few.read_gb_s:.0f} of {limits.bytes_per_s / 1e9:.0f} GB/s with {few.rows} row, "
        f"{many.gflop_s:.0f} of {limits.flops / 1e9:.0f} GFLOP/s with {many.rows} rows"
    )


def _memory() -> Finding:
    memory = psutil.virtual_memory()
    found = f"{memory.available / _GIB:.1f} of {memory.total / _GIB:.1f} GiB free"
    if memory.available < _LITTLE_MEMORY_BYTES:
        return Finding("memory", Level.ADVICE, found, "use a small model, or set --kv-memory")
    return Finding("memory", Level.GOOD, found)


def _processor(watch: Watch) -> Finding:
    """Who else used it while the other checks ran."""
    share = watch.look()
    if share is None:
        return Finding("processor", Level.GOOD, f"{usable_cores()} cores")
    found = f"{share}; load average {os.getloadavg()[0]:.1f}"
    if share.busy:
        advice = "answers take longer while it lasts: docs/troubleshooting.md, a shared processor"
        return Finding("processor", Level.ADVICE, found, advice)
    return Finding("processor", Level.GOOD, found)


def _demo_model() -> Finding:
    folder = Path(tandem.__file__).parent / "demo_model"
    missing = [name for name in _DEMO_FILES if not (folder / name).is_file()]
    if missing:
        advice = "install the package again, or serve another model by name"
        return Finding("demo model", Level.ADVICE, f"lacks {', '.join(missing)}", advice)
    size = sum(path.stat().st_size for path in folder.iterdir()) / 2**20
    return Finding("demo model", Level.GOOD, f"{size:.1f} MiB in the package")


def _chat_model() -> Finding:
    file = chat_file()
    if file is None:
        advice = f"{sys.executable} -m {CHAT_INSTALL} (93 MB)"
        return Finding("chat model", Level.ADVICE, f"{CHAT_NAME} is not installed", advice)
    return Finding("chat model", Level.GOOD, f"{CHAT_NAME}: {file.name}")
