"""What requests hold until they end: adapter versions, compiled grammars, states of draws.

Knows no plan. Invariant: every version that was handed in is unpinned once, when its request has
ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tandem.adapters.registry import AdapterRegistry
from tandem.core.ports import EndDraws
from tandem.core.version import AdapterVersion


@dataclass(slots=True)
class _Held:
    """`grammar` is the compiled one, which is told when the sequences `seq_ids` have ended."""

    versions: list[AdapterVersion]
    grammar: EndDraws | None
    seq_ids: Sequence[int]


class Holds:
    """Of all requests and scores of one loop. `is_active` says whether one of this id runs on."""

    def __init__(self, registry: AdapterRegistry, is_active: Callable[[str], bool]) -> None:
        self._registry = registry
        self._is_active = is_active
        self._held: dict[str, _Held] = {}

    def add(
        self,
        request_id: str,
        version: AdapterVersion | None,
        grammar: EndDraws | None = None,
        seq_ids: Sequence[int] = (),
    ) -> None:
        """A request has come, whose version is pinned."""
        self._held[request_id] = _Held([version] if version is not None else [], grammar, seq_ids)

    def switch(self, version: AdapterVersion, move: Callable[[str, AdapterVersion], bool]) -> None:
        """`move` all requests to a new version of the adapter that they use.

        All versions that a request had stay pinned until it ends, because the prefix tree has
        blocks of them.
        """
        for request_id, held in self._held.items():
            named = bool(held.versions) and held.versions[-1].name == version.name
            if named and move(request_id, version):
                self._registry.pin_again(version)
                held.versions.append(version)

    def let_go(self, request_ids: Iterable[str]) -> None:
        """Of what these requests hold, as far as they have ended."""
        for request_id in request_ids:
            if request_id in self._held and not self._is_active(request_id):
                held = self._held.pop(request_id)
                for version in held.versions:
                    self._registry.unpin(version)
                if held.grammar is not None:
                    held.grammar(held.seq_ids)
