"""Every kernel against attention written out for one row at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from attention_cases import case, reference
from devices import INTERPRETED, TRITON
from tandem.core.errors import UnsupportedModel
from tandem.model import kernels
from tandem.model.attention import tiles
from tandem.model.attention.base import AttentionParams, BatchLayout, SpanArrays
from tandem.model.attention.cpu import CpuKernel
from tandem.model.attention.interface import tandem_attention
from tandem.model.attention.sdpa import SdpaKernel, _buckets
from tandem.model.attention.tiles import PROMPT_ROWS, cut, decode_tiles, prompt_tiles

KERNELS = ["sdpa", "cpu", TRITON]
# Triton's interpreter is slow: window and soft cap of the mixes that it computes.
INTERPRETED_CASES = {
    "decode": [(0, 0.0)],
    "first_chunks": [(0, 1.5)],
    "later_chunks": [(8, 0.0)],
    "long": [(0, 0.0), (8, 0.0)],
    "mixed": [(3, 1.5)],
}


def make_kernel(name):
    if name == "triton":
        from tandem.model.attention.triton_kernel import TritonKernel

        return TritonKernel()
    return SdpaKernel() if name == "sdpa" else CpuKernel()


MIXES = {
    "decode": [(5, 1), (0, 1), (70, 1), (9, 1), (130, 1), (31, 1)],
    "first_chunks": [(0, 7), (0, 7), (0, 12), (0, 2)],
    "later_chunks": [(4, 5), (4, 5), (13, 9), (3, 4)],
    "long": [(1300, 1), (700, 30), (620, 1), (1030, 3)],  # in several parts of the keys
    "mixed": [(6, 1), (0, 9), (40, 1), (17, 6), (0, 1), (17, 6), (3, 1)],
}


def compare(kernel, mix, window, softcap, device):
    params = AttentionParams(scale=0.3, window=window, softcap=softcap)
    cache, layout, _, new = case(MIXES[mix], device=device)
    expected = reference(cache, layout, new, params)
    batch = kernel.prepare(layout)
    for _ in range(2):  # a second layer of the same iteration reuses the metadata
        out = batch.attend(*new, cache, params)
        assert torch.allclose(out.double(), expected, atol=2e-5)
    assert torch.equal(cache.keys.flatten(0, 1)[layout.slots], new[1])
    assert torch.equal(cache.values.flatten(0, 1)[layout.slots], new[2])


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("window", [0, 3, 8])
@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("mix", sorted(MIXES))
def test_equals_the_formula(name, mix, window, softcap):
    if name == "triton" and INTERPRETED and (window, softcap) not in INTERPRETED_CASES[mix]:
        pytest.skip("left to a GPU")
    if name == "cpu" and not kernels.status().available:
        pytest.skip("no C++ kernels on this machine")
    device = "cuda" if name == "triton" and not INTERPRETED else "cpu"
    compare(make_kernel(name), mix, window, softcap, device)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("mix", sorted(MIXES))
def test_the_reference_equals_the_formula_on_a_gpu(mix, window):
    compare(SdpaKernel(), mix, window, 0.0, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("mix", sorted(MIXES))
def test_sixteen_bits_are_rounded_and_no_more(mix):
    params = AttentionParams(scale=0.3)
    cache, layout, _, new = case(MIXES[mix], dtype=torch.bfloat16, device="cuda")
    expected = reference(cache, layout, new, params)
    out = make_kernel("triton").prepare(layout).attend(*new, cache, params)
    assert out.dtype == torch.bfloat16
    assert float((out.double() - expected).norm() / expected.norm()) < 5e-3


def test_one_batch_serves_layers_with_and_without_window():
    cache, layout, _, new = case(MIXES["mixed"])
    batch = SdpaKernel().prepare(layout)
    for window in (0, 5, 0, 5):
        params = AttentionParams(scale=0.3, window=window)
        expected = reference(cache, layout, new, params)
        assert torch.allclose(batch.attend(*new, cache, params).double(), expected, atol=2e-5)


def test_buckets_bound_the_padding():
    blocks = np.random.default_rng(1).integers(1, 500, size=200)
    buckets = _buckets(np.arange(200), blocks)
    assert sorted(np.concatenate(buckets).tolist()) == list(range(200))
    padded = sum(len(bucket) * blocks[bucket].max() for bucket in buckets)
    assert padded <= 2 * np.maximum(blocks, 8).sum()
    assert len(buckets) <= 7


@pytest.mark.parametrize("processors", [1, 4, 16, 132])
@pytest.mark.parametrize("mix", sorted(MIXES))
def test_tiles_cover_every_row_once(mix, processors):
    starts, lengths = (np.array(column) for column in zip(*MIXES[mix], strict=True))
    positions = SpanArrays(starts, lengths, np.zeros((len(starts), 1), np.int32)).positions()
    owner, first = np.repeat(np.arange(len(starts)), lengths), np.cumsum(lengths) - lengths
    covered = []
    decodes, prompts = cut(starts, lengths, processors)
    assert len(decodes) <= decode_tiles(int((lengths == 1).sum()), processors)
    assert len(prompts) <= prompt_tiles(int(lengths.sum()), int((lengths > 1).sum()))
    for row, count, position, span, part, of in [*decodes.tolist(), *prompts.tolist()]:
        assert 0 < count <= PROMPT_ROWS and row + count <= first[span] + lengths[span]
        assert owner[row] == span and positions[row] == position
        assert 0 <= part < of and (of == 1 or lengths[span] == 1)
        covered += range(row, row + count) if part == 0 else ()
    assert sorted(covered) == list(range(int(lengths.sum())))


def test_long_decodes_are_divided_where_the_batch_does_not_fill_the_device(monkeypatch):
    def parts(*contexts):
        starts = np.array(contexts) - 1
        decodes, _ = cut(starts, np.ones_like(starts), 132)
        # Parts of a span follow each other.
        assert [tile[4] for tile in decodes] == [
            part for tile in decodes if tile[4] == 0 for part in range(tile[5])
        ]
        return [int((decodes[:, 3] == span).sum()) for span in range(len(contexts))]

    monkeypatch.setattr(tiles, "LEAST_SHARE", 256)
    assert parts(8000) == [31] and parts(300) == [1]
    monkeypatch.setattr(tiles, "LEAST_SHARE", 64)
    assert parts(8000) == [65] and parts(300) == [5]
    assert parts(*[1000] * 32) == [1] * 32
    assert parts(8000, *[500] * 40) == [9, *[1] * 40]


def test_positions_and_slots_follow_the_tables():
    spans = SpanArrays(np.array([3, 0]), np.array([3, 2]), np.array([[7, 2], [5, 5]], np.int32))
    layout, positions = BatchLayout.build(spans, 4, torch.device("cpu"), torch.float32)
    assert positions.tolist() == [3, 4, 5, 0, 1]
    assert layout.slots.tolist() == [31, 8, 9, 20, 21]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"s_aux": torch.zeros(2)}, "s_aux"),
        ({"position_bias": torch.zeros(2)}, "position_bias"),
        ({"is_causal": False}, "is_causal"),
        ({"dropout": 0.1}, "dropout"),
    ],
)
def test_arguments_that_no_kernel_knows_are_refused(arguments, message):
    module, rows = torch.nn.Identity(), torch.zeros(1, 2, 3, 4)
    with pytest.raises(UnsupportedModel, match=message):
        tandem_attention(module, rows, rows, rows, None, attention_context=object(), **arguments)
    with pytest.raises(UnsupportedModel, match="attention mask"):
        tandem_attention(module, rows, rows, rows, rows, attention_context=object())
