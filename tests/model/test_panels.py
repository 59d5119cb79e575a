"""Products with weights in panels against float64, for any shape and number of rows and threads."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tandem.model import kernels
from tandem.model.kernels.compiler import FLAGS, SOURCES, find_compiler
from tandem.model.kernels.layer import (
    AttentionWeights,
    BatchTables,
    MlpWeights,
    NormWeights,
    Panels,
    VectorPanels,
    attention_block,
    mlp_block,
)
from tandem.model.linear import PackedLinear, PanelWeight

pytestmark = pytest.mark.skipif(not kernels.status().available, reason="no C++ compiler")

# Outputs and inputs: less than a panel, odd numbers, several panels, several slices of inputs.
SHAPES = [(1, 1), (5, 7), (16, 8), (33, 50), (96, 64), (100, 777), (130, 1536)]
ROWS = [*range(1, 65), 97, 200]


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def wrong(found: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> float:
    """Largest distance from the product in float64, relative to the largest value."""
    wide = bias.double() if bias is not None else None
    expected = functional.linear(x.double(), weight.double(), wide)
    return float((found.double() - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("half", [True, False], ids=["bf16 weights", "float32 weights"])
def test_products_are_exact_but_for_the_order_of_sums(
    shape: tuple[int, int], half: bool, threads: int
) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(shape), torch.randn(shape[0])
    if half:
        weight = weight.bfloat16().float()
    packed = PanelWeight(weight, bias)
    assert packed.panels.packed.dtype is (torch.bfloat16 if half else torch.float32)
    alone = PanelWeight(weight, None)
    x = torch.randn(max(ROWS), shape[1])
    all_rows = packed.multiply(x)
    for rows in ROWS:
        found = packed.multiply(x[:rows])
        assert wrong(found, x[:rows], weight, bias) < 4e-6
        # The order of a row's sums does not depend on the other rows.
        assert torch.equal(found, all_rows[:rows])
    assert wrong(alone.multiply(x), x, weight, None) < 4e-6


@pytest.mark.parametrize("shape", SHAPES)
def test_bfloat16_rows_round_once(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(shape).bfloat16(), torch.randn(shape[0]).bfloat16()
    packed = PanelWeight(weight, bias)
    for rows in (1, 3, 8, 33):
        x = torch.randn(rows, shape[1]).bfloat16()
        found = packed.multiply(x)
        assert found.dtype is torch.bfloat16
        assert wrong(found, x, weight, bias) < 2**-8


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("half", [True, False])
def test_a_weight_comes_back_and_its_transpose_multiplies(
    shape: tuple[int, int], half: bool
) -> None:
    weight = torch.randn(shape)
    weight = weight.bfloat16().float() if half else weight
    packed = PanelWeight(weight, None)
    assert torch.equal(kernels.unpack_panels(packed.panels.packed, *shape).float(), weight)
    gradient = torch.randn(9, shape[0])
    back = packed.transposed()
    assert back.nbytes == PanelWeight(weight.t(), None).nbytes
    assert wrong(back.multiply(gradient), gradient, weight.t(), None) < 4e-6


def test_rows_may_be_views_and_may_be_missing() -> None:
    weight = torch.randn(40, 24)
    packed = PanelWeight(weight, None)
    wide = torch.randn(3, 5, 48)
    for x in (wide[..., :24], wide[..., ::2], wide[:, 1:3, 24:], wide[1, 2, :24], wide[:0, :, :24]):
        found = packed.multiply(x)
        assert found.shape == (*x.shape[:-1], 40)
        assert torch.allclose(found, functional.linear(x, weight), atol=1e-5)


def test_bytes_are_half_where_bfloat16_has_the_values() -> None:
    weight = torch.randn(64, 96)
    assert PanelWeight(weight, None).nbytes == 2 * PanelWeight(weight.bfloat16(), None).nbytes
    assert PanelWeight(weight.bfloat16().float(), None).nbytes == 64 * 96 * 2
    weight[3, 5] = float("inf")  # which both have
    assert PanelWeight(weight.bfloat16().float(), None).nbytes == 64 * 96 * 2


def test_a_packed_layer_is_differentiable() -> None:
    layer = nn.Linear(33, 20).requires_grad_(False)
    packed = PackedLinear.of(layer, by=PanelWeight)
    x = torch.randn(4, 33, requires_grad=True)
    packed(x).square().sum().backward()
    expected = torch.autograd.grad(layer(x).square().sum(), x)[0]
    assert x.grad is not None and torch.allclose(x.grad, expected, atol=1e-4)


@pytest.mark.parametrize("shape", [(64, 96), (20, 33)])
@pytest.mark.parametrize("bias", [None, torch.zeros(7), torch.zeros(20).double()])
def test_what_does_not_fit_is_refused(shape: tuple[int, int], bias: Tensor | None) -> None:
    packed = kernels.pack_panels(torch.randn(shape))
    x = torch.randn(2, shape[1] + 2 if bias is None else shape[1])
    with pytest.raises(RuntimeError, match=r"x is \[|the bias is"):
        kernels.panel_linear(x, packed, bias, shape[0])


@pytest.mark.parametrize(
    "change",
    [
        lambda packed: packed.half(),  # read as float32 it would end past the buffer
        lambda packed: packed.double(),
        lambda packed: packed.transpose(0, 2),
        lambda packed: packed[..., :-1],
        lambda packed: packed[..., ::2],
        lambda packed: packed[:-1],
        lambda packed: packed[:, :-1],
        lambda packed: packed.flatten(),
    ],
)
def test_no_other_tensor_is_taken_for_panels(change: Callable[[Tensor], Tensor]) -> None:
    packed = change(kernels.pack_panels(torch.randn(64, 96)))
    with pytest.raises(RuntimeError, match="panels of a weight"):
        kernels.panel_linear(torch.randn(2, 96), packed, None, 64)
    with pytest.raises(RuntimeError, match="panels of a weight"):
        kernels.unpack_panels(packed, 64, 96)


@pytest.mark.parametrize(("n", "k"), [(640, 96), (64, 960), (64, 0), (-64, 96)])
def test_panels_of_another_shape_are_not_unpacked(n: int, k: int) -> None:
    with pytest.raises(RuntimeError, match="panels of a weight"):
        kernels.unpack_panels(kernels.pack_panels(torch.randn(64, 96)), n, k)


def test_a_product_has_inputs() -> None:
    empty = kernels.pack_panels(torch.randn(16, 0))  # of an adapter without a rank
    with pytest.raises(RuntimeError, match=r"x is \["):
        kernels.panel_linear(torch.randn(2, 0), empty, None, 16)
    with pytest.raises(RuntimeError, match=r"x is \["):
        kernels.panel_linear(torch.randn(2, 0), kernels.pack_panels(torch.randn(16, 2)), None, 16)


WIDTH, HEADS, HEAD, INNER = 64, 4, 16, 96


def block_weights() -> tuple[AttentionWeights, MlpWeights]:
    """Of a small layer, with every bias and norm."""

    def panels(n: int, k: int) -> VectorPanels:
        return PanelWeight(torch.randn(n, k), torch.randn(n)).panels

    norm = NormWeights(torch.ones(WIDTH), 1e-6, shifted=False)
    qkv, out = panels(3 * WIDTH, WIDTH), panels(WIDTH, WIDTH)
    heads = (torch.ones(HEAD), torch.ones(HEAD))
    attention = AttentionWeights(norm, qkv, out, *heads, scale=0.25, window=0, softcap=0.0)
    mlp = MlpWeights(norm, panels(2 * INNER, WIDTH), panels(WIDTH, INNER), gelu=False)
    return attention, mlp


def attend(weights: AttentionWeights) -> Tensor:
    cache = (torch.zeros(2, 4, HEADS, HEAD), torch.zeros(2, 4, HEADS, HEAD))
    places = [torch.tensor(each, dtype=torch.int32) for each in ([[0, 1]], [0, 3], [3])]
    tables = BatchTables(torch.arange(3), *places)
    angles = (torch.ones(3, HEAD), torch.zeros(3, HEAD))
    return attention_block(torch.randn(1, 3, WIDTH), weights, angles, cache, tables)


def with_bias(panels: Panels, bias: Tensor) -> VectorPanels:
    return VectorPanels(panels.packed, bias)


def with_packed(panels: Panels, packed: Tensor) -> VectorPanels:
    return VectorPanels(packed, panels.bias)


WRONG = [torch.zeros(8), torch.zeros(1024), torch.zeros(128)[::2], torch.zeros(64).double()]


@pytest.mark.parametrize("wrong", WRONG, ids=["short", "long", "apart", "dtype"])
def test_blocks_refuse_norms_and_biases_that_do_not_fit(wrong: Tensor) -> None:
    attention, mlp = block_weights()
    assert attend(attention).shape == (1, 3, WIDTH)
    assert mlp_block(torch.randn(3, WIDTH), mlp).shape == (3, WIDTH)
    for changed in (
        replace(attention, norm=replace(attention.norm, weight=wrong)),
        replace(attention, qkv=with_bias(attention.qkv, wrong)),
        replace(attention, out=with_bias(attention.out, wrong)),
        replace(attention, query_norm=wrong),
        replace(attention, key_norm=wrong),
    ):
        with pytest.raises(RuntimeError, match=r"the (norm|bias) .*is dense"):
            attend(changed)
    for one in (
        replace(mlp, norm=replace(mlp.norm, weight=wrong)),
        replace(mlp, gate_up=with_bias(mlp.gate_up, wrong)),
        replace(mlp, down=with_bias(mlp.down, wrong)),
    ):
        with pytest.raises(RuntimeError, match=r"the (norm|bias) .*is dense"):
            mlp_block(torch.randn(3, WIDTH), one)


def test_blocks_refuse_weights_that_are_no_panels() -> None:
    attention, mlp = block_weights()
    for changed in (
        replace(attention, qkv=with_packed(attention.qkv, attention.qkv.packed.half())),
        replace(attention, out=with_packed(attention.out, attention.out.packed[..., ::2])),
    ):
        with pytest.raises(RuntimeError, match="the weights fit it"):
            attend(changed)
    for one in (
        replace(mlp, gate_up=with_packed(mlp.gate_up, mlp.gate_up.packed.half())),
        replace(mlp, down=with_packed(mlp.down, mlp.down.packed[..., ::2])),
    ):
        with pytest.raises(RuntimeError, match="the weights fit it"):
            mlp_block(torch.randn(3, WIDTH), one)


# Processors that this one may not be: their registers and instructions.
PROCESSORS = ["icelake-server", "cooperlake", "sapphirerapids", "x86-64"]


def compile_for(target: Path, sources: list[Path], *flags: str) -> None:
    """A library of some of the kernels."""
    torch_folder = Path(torch.__file__).parent
    compiler = find_compiler()
    assert compiler is not None
    subprocess.run(
        [
            compiler, *(flag for flag in FLAGS if not flag.startswith(("-march", "-O"))), "-O1",
            *flags, "-isystem", torch_folder / "include", "-shared", *sources,
            f"-L{torch_folder / 'lib'}", "-ltorch_cpu", "-lc10", "-o", target,
        ],
        check=True,
    )  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("processor", PROCESSORS)
def test_other_processors_are_compiled_for(processor: str, tmp_path: Path) -> None:
    """All kernels; only this processor's can be loaded."""
    library = tmp_path / "kernels.so"
    compile_for(library, sorted(SOURCES.glob("*.cpp")), f"-march={processor}")
    assert library.stat().st_size > 0


WIDER = """
import sys, torch
torch.ops.load_library(sys.argv[1])
ops = torch.ops.tandem
torch.manual_seed(0)
for n, k in [(1, 1), (5, 7), (33, 50), (96, 64), (100, 777)]:
    weight = torch.randn(n, k).bfloat16()
    packed = ops.pack_panels(weight)
    assert packed.shape == (-(-n // 32), -(-k // 2), 64), packed.shape
    for rows in (1, 7, 12, 13, 30, 100):
        for dtype, bound in ((torch.float32, 4e-6), (torch.bfloat16, 2**-8)):
            x = torch.randn(rows, k).to(dtype)
            expected = x.double() @ weight.double().t()
            found = ops.panel_linear(x, packed, None, n)
            error = (found.double() - expected).abs().max() / expected.abs().max()
            assert found.dtype is dtype and error < bound, (n, k, rows, dtype, error)
"""


@pytest.mark.full
def test_wider_registers_and_pairs_multiply_alike(tmp_path: Path) -> None:
    """The code for AVX-512 with products of pairs, which the compiler divides for this processor;
    only the one instruction is another."""
    library = tmp_path / "wider.so"
    sources = [SOURCES / "panels.cpp"]
    compile_for(
        library, sources, "-march=native", "-DTANDEM_VECTOR_BYTES=64", "-DTANDEM_PAIR_PRODUCTS"
    )
    environ = os.environ | {"PYTHONPATH": ""}
    subprocess.run([sys.executable, "-c", WIDER, library], check=True, env=environ)
