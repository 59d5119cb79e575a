"""Compiles the C++ kernels for this processor, once, into the user's cache.

There is one shared library per (sources, flags, torch, processor). It is built in a private folder
and renamed under a file lock, so processes that start together compile once, and a killed build is
never loaded. It uses torch's OpenMP runtime, since another one would start a second pool of
threads. Knows nothing of what the kernels compute.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

SOURCES = Path(__file__).parent
FLAGS = (
    *("-std=c++20", "-O3", "-march=native", "-fPIC", "-fopenmp", "-w"),
    *("-fno-math-errno", "-fno-trapping-math"),
)
COMPILE_LIMIT_S = 600
_PARTIAL = ".partial-"

logger = logging.getLogger(__name__)


class BuildFailed(Exception):
    """The kernels cannot be compiled here. The message says why in one line."""


def cache_folder() -> Path:
    """Where libraries are kept: `TANDEM_KERNEL_CACHE`, else the user's cache folder."""
    if chosen := os.environ.get("TANDEM_KERNEL_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tandem" / "kernels"


def compiled() -> bool:
    """Whether `build` has nothing to compile: the library is cached, or there is no compiler."""
    compiler = find_compiler()
    return compiler is None or _library(compiler).exists()


def build() -> Path:
    """Path of the library. Compiles it first (half a minute) unless it is cached.

    Raises `BuildFailed` without a compiler, if the compiler fails, or if the cache cannot be
    written.
    """
    compiler = find_compiler()
    if compiler is None:
        raise BuildFailed("no C++ compiler found (install g++ or set CXX)")
    library = _library(compiler)
    if library.exists():
        return library
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with (library.parent / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not library.exists():
                logger.warning("compiling the CPU kernels for this machine, once (about 30 s)")
                _compile(compiler, library)
    except OSError as error:
        raise BuildFailed(f"cannot build in {library.parent}: {error}") from error
    return library


def find_compiler() -> str | None:
    """The compiler: `CXX`, else g++; None if there is none."""
    return shutil.which(os.environ.get("CXX", "g++"))


def _library(compiler: str) -> Path:
    return cache_folder() / _fingerprint(compiler) / "tandem.so"


def _fingerprint(compiler: str) -> str:
    sources = [p.read_bytes() for p in sorted(SOURCES.iterdir()) if p.suffix in {".cpp", ".h"}]
    facts = [compiler, torch.__version__, *FLAGS, *_processor()]
    return hashlib.sha256(b"\0".join([*sources, *map(str.encode, facts)])).hexdigest()[:20]


def _processor() -> list[str]:
    """What `-march=native` depends on: the architecture and the instruction sets."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    kinds = ("flags", "Features", "model name")
    return [platform.machine(), *sorted({x for x in lines if x.startswith(kinds)})]


def _compile(compiler: str, library: Path) -> None:
    # While the lock is held, no process writes these: they were left behind.
    for left in library.parent.glob(f"{_PARTIAL}*"):
        shutil.rmtree(left, ignore_errors=True)
    torch_folder = Path(torch.__file__).parent
    include: list[str | Path] = ["-isystem", torch_folder / "include"]
    with tempfile.TemporaryDirectory(prefix=_PARTIAL, dir=library.parent) as folder:
        objects = {source: Path(folder) / f"{source.stem}.o" for source in SOURCES.glob("*.cpp")}
        with ThreadPoolExecutor() as pool:
            done = [
                pool.submit(_run, compiler, *FLAGS, *include, "-c", source, "-o", target)
                for source, target in objects.items()
            ]
        for one in done:
            one.result()
        made = Path(folder) / library.name
        libraries = [f"-L{torch_folder / 'lib'}", "-ltorch_cpu", "-lc10"]
        _run(compiler, "-shared", *objects.values(), *libraries, "-o", made)
        made.rename(library)


def _run(*command: str | Path) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=COMPILE_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired as late:
        raise BuildFailed(f"the compiler took longer than {COMPILE_LIMIT_S} s") from late
    if done.returncode != 0:
        lines = done.stderr.splitlines()
        first = next((line for line in lines if "error" in line), done.stderr.strip()[:300])
        raise BuildFailed(f"the compiler failed: {first}")
