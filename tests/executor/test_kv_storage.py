"""Copies and clean-up of KV blocks, and how many blocks there are."""

from __future__ import annotations

import pytest
import torch

from tandem.core.plan import BlockCopy
from tandem.executor import kv_storage
from tandem.executor.kv_storage import KVStorage
from tandem.model.attention.base import LayerShape


def make_storage() -> KVStorage:
    shapes = [LayerShape(2, 3), LayerShape(1, 5)]
    storage = KVStorage(shapes, 6, 4, device=torch.device("cpu"), dtype=torch.float32)
    for layer in storage.layers:
        layer.keys.normal_()
        layer.values.normal_()
    return storage


def test_each_layer_has_its_own_shape():
    storage = make_storage()
    assert [tuple(layer.keys.shape) for layer in storage.layers] == [(6, 4, 2, 3), (6, 4, 1, 5)]
    assert storage.layers[0].values.shape == storage.layers[0].keys.shape


def test_copies_read_before_they_write():
    storage = make_storage()
    before = [(layer.keys.clone(), layer.values.clone()) for layer in storage.layers]
    storage.copy([BlockCopy(0, 1, 2), BlockCopy(0, 2, 5), BlockCopy(0, 1, 3)])
    for layer, stores in zip(storage.layers, before, strict=True):
        for store, old in zip((layer.keys, layer.values), stores, strict=True):
            for target, source in enumerate([0, 1, 1, 1, 4, 2]):
                assert torch.equal(store[target], old[source])


def test_scrub_touches_only_what_is_not_finite():
    storage = make_storage()
    expected = storage.layers[0].keys.clone()
    storage.layers[0].keys[2, 1, 0, 0] = torch.nan
    storage.layers[0].keys[2, 3, 1, 2] = torch.inf
    storage.layers[0].keys[4, 0, 0, 0] = torch.nan
    storage.scrub([2, 2, 3])
    expected[2, 1, 0, 0] = expected[2, 3, 1, 2] = 0.0
    assert torch.equal(storage.layers[0].keys[:4], expected[:4])
    assert storage.layers[0].keys[4, 0, 0, 0].isnan()


@pytest.mark.parametrize(
    ("weights", "free", "expected"),
    [(18 << 20, 24 << 30, 512 << 20), (1 << 30, 24 << 30, 6 << 30), (18 << 20, 1 << 30, 256 << 20)],
)
def test_the_cache_of_a_small_model_is_no_share_of_a_large_machine(
    monkeypatch: pytest.MonkeyPatch, weights: int, free: int, expected: int
) -> None:
    monkeypatch.setattr(kv_storage, "free_memory_bytes", lambda device: free)
    assert kv_storage._default_bytes(torch.device("cpu"), weights) == expected
