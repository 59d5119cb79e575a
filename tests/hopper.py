"""Compiles Triton kernels for an H100 on a machine that has none.

`compiled` collects what a wrapper launches for tensors on the CPU, which are never computed with,
and compiles each variant as Triton would on the device. It does not work in the interpreter, so a
test runs a script of its own (`run_script`).
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

TESTS = Path(__file__).parent
_POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.uint8: "*u8",
}


@dataclass(frozen=True)
class Variant:
    """A compiled kernel: its name, PTX, bytes of shared memory, registers a thread, and bytes that
    were spilled from them."""

    name: str
    ptx: str
    shared: int
    registers: int
    spilled: int


def run_script(script: Path) -> str:
    """Output of `script`, run without the interpreter. Its error is the test's."""
    paths = os.pathsep.join([str(TESTS), *sys.path])
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def compiled(run) -> list[Variant]:
    """The variants that `run()` launches, each once."""
    from tandem.model.gpu import early

    launches = []
    modules = [module for name, module in sys.modules.items() if name.startswith("tandem.model.")]
    kept = [(module, vars(module)["launch"]) for module in modules if "launch" in vars(module)]

    def record(kernel, grid, *args, **meta):
        launches.append((kernel, args, meta))

    for module, _ in kept:
        module.launch = record
    starts_early, early._starts_early = early._starts_early, lambda device: True
    try:
        run()
    finally:
        early._starts_early = starts_early
        for module, launch in kept:
            module.launch = launch
    found = {}
    for kernel, args, meta in launches:
        source, options = _source(kernel, args, meta)
        key = (kernel.__name__, str(source.signature), str(source.constants), str(source.attrs))
        if key not in found:
            found[key] = _compile(kernel.__name__, source, options)
    return list(found.values())


def _source(kernel, args, meta):
    from triton.compiler import ASTSource

    values = dict(zip(kernel.arg_names, args, strict=False))
    options = {name: value for name, value in meta.items() if name not in kernel.arg_names}
    values |= {name: value for name, value in meta.items() if name in kernel.arg_names}
    assert set(values) == set(kernel.arg_names), "all arguments are given"
    signature, constants, attributes = {}, {}, {}
    for parameter in kernel.params:
        name, value, place = parameter.name, values[parameter.name], (parameter.num,)
        special = not parameter.do_not_specialize
        aligned = False
        if (
            parameter.is_constexpr
            or value is None
            or (special and type(value) is int and value == 1)
        ):
            signature[name], constants[place] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name], aligned = _POINTERS[value.dtype], value.data_ptr() % 16 == 0
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            aligned = special and value % 16 == 0
        if aligned:
            attributes[place] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constants, attributes), options


def _compile(name, source, options):
    import triton
    from triton.backends.compiler import GPUTarget

    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    registers, spilled = _resources(kernel.asm["cubin"])
    return Variant(name, kernel.asm["ptx"], kernel.metadata.shared, registers, spilled)


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers a thread and bytes of stack, by the tool that Triton brings along."""
    from triton import knobs

    tool = knobs.nvidia.cuobjdump.path
    path = Path(os.environ.get("TMPDIR", "/tmp")) / f"hopper-{os.getpid()}.cubin"
    path.write_bytes(cubin)
    try:
        text = subprocess.run(
            [tool, "-res-usage", str(path)], capture_output=True, text=True, check=True
        ).stdout
    finally:
        path.unlink()
    fields = dict(part.split(":", 1) for part in text.split() if part.count(":") == 1)
    return int(fields["REG"]), int(fields["STACK"])
