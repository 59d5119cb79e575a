"""How many adapters are served at once: what work needs for a while takes nobody's place."""

from __future__ import annotations

import pytest

from tandem.adapters.registry import AdapterRegistry
from tandem.core.errors import AdapterError
from tandem.core.version import AdapterVersion


def _registry(loaded: dict[str, AdapterVersion]) -> AdapterRegistry:
    return AdapterRegistry(
        lambda version: loaded.update({version.content_hash: version}),
        lambda content: loaded.pop(content) and None,
        retire=lambda content: None,
        revive=lambda content: None,
        forget=lambda content: None,
        max_loaded=2,
    )


def test_candidates_and_references_take_nobodys_place() -> None:
    loaded: dict[str, AdapterVersion] = {}
    registry = _registry(loaded)
    registry.publish("a", "/a", "a1")
    registry.publish("b", "/b", "b1")
    registry.publish("~reference/a/1", "/a", "a1")
    registry.publish("~candidate/a", "/a2", "a2")
    with pytest.raises(AdapterError, match="2 adapters are loaded already"):
        registry.publish("c", "/c", "c1")
    with pytest.raises(AdapterError, match="2 adapters"):  # though its content is there
        registry.publish("c", "/a2", "a2")
    registry.publish("a", "/a2", "a2")
    assert set(loaded) == {"a1", "a2", "b1"} and set(registry.current) >= {"a", "b"}


def test_a_new_version_is_adopted_while_the_old_one_answers() -> None:
    loaded: dict[str, AdapterVersion] = {}
    registry = _registry(loaded)
    registry.publish("a", "/a", "a1")
    registry.publish("b", "/b", "b1")
    pinned = registry.pin("a")
    registry.publish("a", "/a2", "a2")
    assert set(loaded) == {"a1", "a2", "b1"}
    registry.unpin(pinned)
    assert set(loaded) == {"a2", "b1"}
    registry.unload("b")
    registry.publish("c", "/c", "c1")
    registry.publish("same", "/c", "c1")  # the same content under two names is one
