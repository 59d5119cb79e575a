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
    registry.publish(AdapterVersion("a", 0, "a1", "/a"))
    registry.publish(AdapterVersion("b", 0, "b1", "/b"))
    registry.publish(AdapterVersion("~reference/a/1", 0, "a1", "/a"))
    registry.publish(AdapterVersion("~candidate/a", 0, "a2", "/a2"))
    with pytest.raises(AdapterError, match="2 adapters are loaded already"):
        registry.publish(AdapterVersion("c", 0, "c1", "/c"))
    with pytest.raises(AdapterError, match="2 adapters"):  # though its content is there
        registry.publish(AdapterVersion("c", 0, "a2", "/a2"))
    registry.publish(AdapterVersion("a", 0, "a2", "/a2"))
    assert set(loaded) == {"a1", "a2", "b1"} and set(registry.current) >= {"a", "b"}


def test_a_new_version_is_adopted_while_the_old_one_answers() -> None:
    loaded: dict[str, AdapterVersion] = {}
    registry = _registry(loaded)
    registry.publish(AdapterVersion("a", 0, "a1", "/a"))
    registry.publish(AdapterVersion("b", 0, "b1", "/b"))
    pinned = registry.pin("a")
    registry.publish(AdapterVersion("a", 0, "a2", "/a2"))
    assert set(loaded) == {"a1", "a2", "b1"}
    registry.unpin(pinned)
    assert set(loaded) == {"a2", "b1"}
    registry.unload("b")
    registry.publish(AdapterVersion("c", 0, "c1", "/c"))
    # The same content under two names is one.
    registry.publish(AdapterVersion("same", 0, "c1", "/c"))
