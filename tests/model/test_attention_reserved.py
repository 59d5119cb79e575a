"""Triton's attention in batches that keep their tables, and over keys divided among programs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from attention_cases import case, reference
from devices import HAS_TRITON, TRITON_DEVICE
from tandem.model.attention.base import AttentionParams, LayerKV

if not HAS_TRITON:
    pytest.skip("no Triton here", allow_module_level=True)

from tandem.model.attention import tiles, triton_kernel
from tandem.model.attention.triton_kernel import TritonKernel

pytestmark = pytest.mark.parametrize("device", [TRITON_DEVICE])
DECODES = [(900, 1), (3, 1), (0, 1)]


def attend(batch, rows, cache, new, params):
    """The batch's rows, after attention of `rows` rows, and the cache after it. Rows after the
    batch's own are not numbers."""
    count = new[0].shape[0]
    padded = []
    for tensor in new:
        whole = torch.full((rows, *tensor.shape[1:]), float("nan"), device=tensor.device)
        whole[:count] = tensor
        padded.append(whole)
    after = LayerKV(cache.keys.clone(), cache.values.clone())
    return batch.attend(*padded, after, params)[:count], after


def check(batch, rows, spans, params, device, **options):
    cache, layout, _, new = case(spans, device=device, **options)
    if batch is None:
        batch, rows = TritonKernel().prepare(layout), new[0].shape[0]
    else:
        batch.fill(layout)
    expected = reference(cache, layout, new, params)
    out, after = attend(batch, rows, cache, new, params)
    assert torch.allclose(out.double(), expected, atol=2e-5)
    for stored, was, rows_now in (
        (after.keys, cache.keys, new[1]),
        (after.values, cache.values, new[2]),
    ):
        was.flatten(0, 1)[layout.slots] = rows_now
        assert torch.equal(stored, was)
    return batch


@pytest.mark.parametrize(
    ("shape", "window", "softcap"),
    [((1, 1, 16), 0, 0.0), ((1, 8, 8), 500, 2.0), ((2, 5, 24), 0, 2.0), ((1, 20, 8), 0, 0.0)],
)
def test_divided_keys_are_merged(device, shape, window, softcap, monkeypatch):
    monkeypatch.setattr(tiles, "LEAST_SHARE", 256)
    params = AttentionParams(0.3, window, softcap)
    batch = check(None, 0, DECODES, params, device, shape=shape)
    ((_, _, arrived),) = batch._parts.values()
    assert (batch._tables.decodes[:, 5] == 4).sum() == 4  # parts of the long one
    assert not arrived.any()  # as the next layer expects


def test_a_reserved_batch_takes_one_layout_after_another(device, monkeypatch):
    launches = []

    def launch(kernel, grid, *args, **meta):
        kinds = tuple(
            (each.dtype, each.data_ptr() % 16) if isinstance(each, torch.Tensor) else type(each)
            for each in args
        )
        if kernel is triton_kernel._attend:
            launches.append((grid, args[4].data_ptr(), kinds, tuple(meta.items())))
        kernel[grid](*args, **meta)

    monkeypatch.setattr(triton_kernel, "launch", launch)
    params = AttentionParams(0.3)
    batch = TritonKernel().reserve(96, 5, 240)
    # Before anything is filled in, all is padding.
    cache, _, _, new = case([(4, 2)], device=device)
    _, after = attend(batch, 96, cache, new, params)
    assert torch.equal(after.keys, cache.keys)
    for seed, spans in enumerate(
        [[(900, 1), (0, 80), (6, 1)], [(5, 3)], [(2, 1), (17, 1), (0, 1), (9, 1), (1, 2)]]
    ):
        check(batch, 96, spans, params, device, seed=seed)
    assert len(launches) == 2 * 4
    assert len(set(launches)) == 2  # of decodes, and of longer spans, whatever is filled in


def test_a_batch_of_decodes_attends_with_one_launch(device, monkeypatch):
    launched = []
    monkeypatch.setattr(
        triton_kernel,
        "launch",
        lambda kernel, grid, *args, **meta: (
            launched.append(grid),
            kernel[grid](*args, **meta),
        ),
    )
    batch = TritonKernel().reserve(4, 4, 240)
    for spans in (DECODES, [(7, 1)], [(1, 1), (30, 1), (900, 1), (200, 1)]):
        check(batch, 4, spans, AttentionParams(0.3, 700), device)
    assert len(launched) == 3 and len(set(launched)) == 1


def test_a_mirror_is_written_only_after_its_copy(device, monkeypatch):
    happened = []

    class Event:
        def __init__(self, number):
            self.number = number

        def synchronize(self):
            happened.append(("wait", self.number))

        def record(self):
            happened.append(("copied", self.number))

    batch = TritonKernel().reserve(4, 4, 240)
    batch._staging._ended = (Event(0), Event(1))
    write = triton_kernel.write

    def watched(host, *arguments):
        addresses = [each.slots.data_ptr() for each in batch._hosts]
        happened.append(("write", addresses.index(host.slots.data_ptr())))
        write(host, *arguments)

    monkeypatch.setattr(triton_kernel, "write", watched)
    for _ in range(3):
        batch.fill(case(DECODES, device=device)[1])
    assert happened == [
        (what, number) for number in (1, 0, 1) for what in ("wait", "write", "copied")
    ]


def test_the_copy_ends_with_the_last_span(device):
    batch = TritonKernel().reserve(64, 64, 512)
    _, layout, _, _ = case(DECODES, device=device)
    batch.fill(layout)
    blocks = batch._tables.blocks.cpu().numpy()
    width = layout.tables.shape[1]
    assert np.array_equal(blocks[:3, :width], layout.tables)
    assert batch._capacity.used(3) < batch._capacity.nbytes / 8
