"""The C++ kernels against plain torch, over shapes, dtypes, strides and garbage in the cache."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tandem.model import kernels
from tandem.model.kernels import compiler

needs_kernels = pytest.mark.skipif(
    not kernels.status().available, reason=f"no kernels: {kernels.status().reason}"
)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def test_kernels_are_there_where_they_can_be() -> None:
    """So that a build that fails is not taken for a machine without a compiler."""
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("no C++ compiler")
    assert kernels.status().available, kernels.status().reason
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists() and " amx_bf16" in cpuinfo.read_text():
        assert kernels.amx_linear()


@dataclass
class Paged:
    """Spans (query tokens, context tokens) over a shuffled cache."""

    q: Tensor
    k: Tensor
    v: Tensor
    table: Tensor
    query_start: Tensor
    context: Tensor
    block_size: int

    def attend(self, **options: float) -> Tensor:
        return kernels.paged_attention(
            self.q, self.k, self.v, self.table, self.query_start, self.context, **options
        )

    def expected(self, *, scale: float, window: int = 0, softcap: float = 0.0) -> Tensor:
        group = self.q.shape[1] // self.k.shape[2]
        parts = []
        for s, length in enumerate(self.context.tolist()):
            first, last = self.query_start[s : s + 2].tolist()
            k, v = (
                x[self.table[s].long()].flatten(0, 1)[:length].float().repeat_interleave(group, 1)
                for x in (self.k, self.v)
            )
            scores = torch.einsum("qhd,khd->hqk", self.q[first:last].float(), k) * scale
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            behind = torch.arange(length - last + first, length)[:, None] - torch.arange(length)
            seen = (behind >= 0) & ((behind < window) if window else True)
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            parts.append(torch.einsum("hqk,khd->qhd", weights, v))
        return torch.cat(parts)

    def spoil(self) -> None:
        """NaN wherever no context reaches: freed blocks hold anything."""
        used = torch.zeros(self.k.shape[:2], dtype=torch.bool)
        for s, length in enumerate(self.context.tolist()):
            for i in range(length):
                used[self.table[s, i // self.block_size], i % self.block_size] = True
        self.k[~used] = torch.nan
        self.v[~used] = torch.nan


def paged(
    spans: list[tuple[int, int]], heads: tuple[int, int], dim: int, block: int, dtype: torch.dtype
) -> Paged:
    generator = torch.Generator().manual_seed(len(spans) + dim)
    widths = [-(-context // block) for _, context in spans]
    blocks = sum(widths) + 2
    order = torch.randperm(blocks, generator=generator).int()
    table = torch.zeros(len(spans), max(widths), dtype=torch.int32)
    for s, width in enumerate(widths):
        start = sum(widths[:s])
        table[s, :width] = order[start : start + width]
    tokens = [n for n, _ in spans]
    shape = (blocks, block, heads[1], dim)
    # Queries as a view of a wider projection, as a fused one hands them out.
    fused = torch.randn(sum(tokens), heads[0] + 3, dim, generator=generator).to(dtype)
    return Paged(
        fused[:, : heads[0]],
        torch.randn(shape, generator=generator).to(dtype),
        torch.randn(shape, generator=generator).to(dtype),
        table,
        torch.tensor([0, *tokens]).cumsum(0).int(),
        torch.tensor([c for _, c in spans], dtype=torch.int32),
        block,
    )


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("spans", "heads", "dim", "block"),
    [
        ([(1, 160), (1, 1), (1, 33)], (14, 2), 64, 16),
        ([(7, 160), (1, 5), (33, 33)], (4, 4), 64, 16),
        ([(40, 700), (1, 1700)], (8, 1), 128, 32),
        ([(5, 300)], (40, 1), 96, 16),
        ([(3, 50), (1, 1)], (4, 2), 48, 16),
        ([(9, 61), (1, 12)], (4, 2), 32, 8),
        ([(3, 260), (2, 2)], (4, 2), 256, 16),
        ([(5, 20)], (2, 1), 16, 4),
        ([(130, 333), (1, 90), (64, 64)], (14, 2), 64, 16),
        ([(70, 201), (300, 300)], (8, 2), 192, 16),
    ],
)
@pytest.mark.parametrize("options", [{}, {"window": 7}, {"window": 40}, {"softcap": 3.0}])
def test_attention_equals_the_formula(
    spans: list[tuple[int, int]],
    heads: tuple[int, int],
    dim: int,
    block: int,
    dtype: torch.dtype,
    options: dict[str, float],
) -> None:
    case = paged(spans, heads, dim, block, dtype)
    expected = case.expected(scale=dim**-0.5, **options)
    case.spoil()
    actual = case.attend(scale=dim**-0.5, **options)
    assert actual.dtype == dtype
    torch.testing.assert_close(
        actual.float(), expected, rtol=TOLERANCE[dtype], atol=2 * TOLERANCE[dtype]
    )


@needs_kernels
def test_attention_does_not_depend_on_its_neighbours() -> None:
    both = paged([(3, 90), (1, 45)], (4, 2), 64, 16, torch.bfloat16)
    together = both.attend(scale=0.125)
    both.query_start, both.context = both.query_start[:2], both.context[:1]
    both.q, both.table = both.q[:3], both.table[:1]
    assert torch.equal(both.attend(scale=0.125), together[:3])


@needs_kernels
def test_attention_of_no_spans_is_empty() -> None:
    case = paged([(1, 3)], (2, 1), 32, 16, torch.float32)
    out = kernels.paged_attention(
        case.q[:0], case.k, case.v, case.table[:0], case.query_start[:1], case.context[:0], scale=1
    )
    assert out.shape == (0, 2, 32)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_write_kv_scatters_views(dtype: torch.dtype) -> None:
    fused = torch.randn(100, 6, 32).to(dtype)
    k, v = fused[:, 2:4], fused[:, 4:6]
    caches = [torch.zeros(20, 8, 2, 32, dtype=dtype) for _ in range(2)]
    slots = torch.randperm(160)[:100]
    kernels.write_kv(k, v, *caches, slots)
    for given, cache in zip((k, v), caches, strict=True):
        assert torch.equal(cache.flatten(0, 1)[slots], given)
        assert cache.count_nonzero() == given.count_nonzero()


@needs_kernels
@pytest.mark.parametrize("slot", [-1, 160])
def test_write_kv_refuses_a_slot_outside(slot: int) -> None:
    cache = torch.zeros(20, 8, 2, 32)
    rows = torch.ones(2, 2, 32)
    with pytest.raises(RuntimeError, match="outside the cache"):
        kernels.write_kv(rows, rows, cache, cache.clone(), torch.tensor([3, slot]))
    assert cache.count_nonzero() == 0


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_turns_pairs_and_keeps_the_rest(dtype: torch.dtype) -> None:
    fused = torch.randn(1, 37, 6, 80).to(dtype)
    q, k = fused[:, :, :4], fused[:, :, 4:]
    angle = torch.randn(1, 37, 32)
    cos, sin = (torch.cat([x, x], -1).to(dtype) for x in (angle.cos(), angle.sin()))
    for given, actual in zip((q, k), kernels.rotary(q, k, cos, sin), strict=True):
        x, y = given[..., :32].float(), given[..., 32:64].float()
        c, s = cos[..., None, :32].float(), sin[..., None, :32].float()
        expected = torch.cat([x * c - y * s, y * c + x * s, given[..., 64:].float()], -1)
        torch.testing.assert_close(actual, expected.to(dtype), rtol=TOLERANCE[dtype], atol=1e-6)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_gating_equals_torch(dtype: torch.dtype) -> None:
    """Torch's in float64: its own in bfloat16 is rounded twice, too, not always the same way."""
    torch.manual_seed(0)
    fused = torch.cat([torch.randn(33, 202) * 10, torch.full((2, 202), 1e4)]).to(dtype)
    gate, up = fused[:, :101], fused[:, 101:]
    silu = (functional.silu(gate.double()) * up.double()).to(dtype)
    torch.testing.assert_close(kernels.silu_mul(gate, up), silu, rtol=TOLERANCE[dtype], atol=1e-5)
    gelu = functional.gelu(gate, approximate="tanh") * up
    actual = kernels.gelu_tanh_mul(gate, up)
    torch.testing.assert_close(actual, gelu, rtol=10 * TOLERANCE[dtype], atol=3e-4)


@pytest.mark.skipif(not kernels.amx_linear(), reason="no AMX")
@pytest.mark.parametrize(("n", "k"), [(100, 64), (32, 32), (70, 1120), (200, 2080)])
def test_packed_linear_equals_linear(n: int, k: int) -> None:
    generator = torch.Generator().manual_seed(n)
    weight = torch.randn(n, k, generator=generator).bfloat16()
    packed = kernels.pack_weight(weight)
    assert torch.equal(kernels.unpack_weight(packed, n), weight)
    bias = torch.zeros(packed.shape[0] * 32)
    bias[:n] = torch.randn(n, generator=generator)
    for rows in (0, 1, 5, 16, 17, 31, 32, 33, 100, 600):
        x = torch.randn(rows, k + 8, generator=generator).bfloat16()[:, :k]
        for given in (None, bias):
            actual = kernels.packed_linear(x, packed, given, n)
            expected = functional.linear(
                x.float(), weight.float(), None if given is None else bias[:n]
            )
            torch.testing.assert_close(actual.float(), expected, rtol=5e-3, atol=2e-2)


def test_a_missing_compiler_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(compiler.BuildFailed, match="no C\\+\\+ compiler"):
        compiler.build()


def test_a_failing_compiler_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TANDEM_KERNEL_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(compiler.BuildFailed, match="compiler failed"):
        compiler.build()
    assert not list(tmp_path.rglob("*.so")) + list(tmp_path.rglob("*.o"))


@pytest.mark.full
def test_builds_at_once_compile_once(tmp_path: Path) -> None:
    """Two processes meet a compiler that counts its runs; both get the same library."""
    script = tmp_path / "compiler"
    script.write_text(
        '#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\n'
        f'sleep 0.2; echo run >> {tmp_path}/runs; echo made > "$2"\n'
    )
    script.chmod(0o755)
    code = (
        "from tandem.model.kernels.compiler import build, compiled; "
        "print(build()); assert compiled()"
    )
    environment = os.environ | {"CXX": str(script), "TANDEM_KERNEL_CACHE": str(tmp_path / "c")}
    both = [
        subprocess.Popen(
            [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    paths = {process.communicate()[0].strip() for process in both}
    assert len(paths) == 1
    assert Path(paths.pop()).read_text() == "made\n"
    sources = len(list(compiler.SOURCES.glob("*.cpp")))
    assert (tmp_path / "runs").read_text().count("run") == sources + 1


def test_what_a_killed_build_left_is_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "compiler"
    script.write_text(
        '#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\n'
        f'echo half > "$2"; while [ ! -e {tmp_path}/on ]; do sleep 0.05; done; echo made > "$2"\n'
    )
    script.chmod(0o755)
    cache = tmp_path / "cache"
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setenv("TANDEM_KERNEL_CACHE", str(cache))
    code = "from tandem.model.kernels.compiler import build; build()"
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    try:
        while not list(cache.rglob("*.o")):
            assert process.poll() is None
            time.sleep(0.02)
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # its compilers, too
        process.wait()
    (tmp_path / "on").touch()
    [folder] = cache.iterdir()
    assert len(list(folder.iterdir())) == 2  # what was begun, and the lock
    library = compiler.build()
    assert library.read_text() == "made\n"
    assert sorted(path.name for path in folder.iterdir()) == ["lock", library.name]


def test_status_falls_back_when_nothing_can_be_built() -> None:
    code = (
        "from tandem.model import kernels; s = kernels.status();"
        "assert not s.available and 'no C++ compiler' in s.reason and not kernels.amx_linear()"
    )
    environment = os.environ | {"CXX": "no-such-compiler"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "using torch's" in done.stderr


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 1000])
def test_a_mask_forbids_exactly_the_tokens_whose_bit_is_not_set(vocab: int) -> None:
    torch.manual_seed(vocab)
    scores, rows = torch.randn(7, vocab), torch.tensor([5, 0, 3])
    allowed = torch.rand(3, -(-vocab // 32) * 32) < 0.5
    allowed[:, 64:128], allowed[1] = True, False  # whole words
    words = (allowed.view(3, -1, 32).long() << torch.arange(32)).sum(-1).to(torch.int32)
    expected = scores.clone()
    expected[rows] = expected[rows].masked_fill(~allowed[:, :vocab], -torch.inf)
    kernels.forbid_tokens(scores, words, rows)
    assert torch.equal(scores, expected)


def test_a_mask_of_a_row_that_is_not_there_changes_nothing() -> None:
    scores = torch.zeros(2, 40)
    with pytest.raises(RuntimeError, match="a row of the scores"):
        kernels.forbid_tokens(scores, torch.zeros(2, 2, dtype=torch.int32), torch.tensor([0, 2]))
    assert not scores.any()
