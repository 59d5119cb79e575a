"""Measures a candidate on the canary set and on held-out feedback, and asks the gate.

Knows the engine and the store; the decision itself is `gate.py`'s. Invariant: held-out samples are
only ever scored, never trained on.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.core.errors import InvalidRequest
from tandem.core.learning import Sample, SampleKind
from tandem.core.ports import EngineClient
from tandem.core.version import AdapterVersion
from tandem.services.learning.canary import Canary
from tandem.services.learning.encode import Encoded, Encoder
from tandem.services.learning.gate import (
    Bounds,
    Measurements,
    PairMargins,
    Thumb,
    Verdict,
    decide,
)
from tandem.services.learning.references import Model, References, Scored
from tandem.services.learning.settings import LearningSettings
from tandem.store import Store, samples

_MOST_HELD_OUT = 200


@dataclass(frozen=True, slots=True)
class _Three:
    """Scores of the same completions under reference, current version and candidate."""

    reference: Sequence[float]
    current: Sequence[float]
    candidate: Sequence[float]


class Examiner:
    """Measures candidates; one for the server."""

    def __init__(
        self,
        client: EngineClient,
        store: Store,
        references: References,
        canary: Canary,
        bounds: Bounds,
    ) -> None:
        self._client = client
        self._store = store
        self._references = references
        self._canary = canary
        self._bounds = bounds

    async def examine(
        self,
        adapter: str,
        staged: AdapterVersion,
        settings: LearningSettings,
        keys: Sequence[str],
        encoder: Encoder,
    ) -> Verdict:
        """Measure the loaded candidate `staged` and decide. `keys` are the API keys of its new
        samples, one each. Raises as `EngineClient.score` and `generate` do."""
        candidate = References.version(staged.name, staged)
        canary = await self._canary.measure(candidate, encoder)
        pairs, thumbs = await self._held_out(adapter, candidate, encoder)
        share = max(Counter(keys).values(), default=0) / max(1, len(keys))
        measured = Measurements(
            canary=canary,
            pairs=pairs,
            thumbs=thumbs,
            key_share=share,
            key_cap=settings.key_share,
        )
        return decide(measured, settings.gate, self._bounds)

    async def _held_out(
        self, adapter: str, candidate: Model, encoder: Encoder
    ) -> tuple[tuple[PairMargins, ...], tuple[Thumb, ...]]:
        kept = await self._store.read(samples.held_out, adapter, limit=_MOST_HELD_OUT)
        encoded = [item for item in (_encode(encoder, sample) for sample in kept) if item]
        pairs = [item for item in encoded if item.kind is SampleKind.DPO]
        thumbs = [item for item in encoded if item.kind is SampleKind.KTO]
        good = await self._three(adapter, candidate, [_chosen(item) for item in pairs])
        bad = await self._three(adapter, candidate, [_rejected(item) for item in pairs])
        labelled = await self._three(adapter, candidate, [_chosen(item) for item in thumbs])
        margins = tuple(
            PairMargins(
                reference=good.reference[at] - bad.reference[at],
                current=good.current[at] - bad.current[at],
                candidate=good.candidate[at] - bad.candidate[at],
            )
            for at in range(len(pairs))
        )
        rewards = tuple(
            Thumb(
                item.desirable,
                current=labelled.current[at] - labelled.reference[at],
                candidate=labelled.candidate[at] - labelled.reference[at],
            )
            for at, item in enumerate(thumbs)
        )
        # What the base cannot score says nothing about the candidate; the candidate's own failure
        # to do so is not forgiven.
        return (
            tuple(m for m in margins if math.isfinite(m.reference) and math.isfinite(m.current)),
            tuple(r for r in rewards if math.isfinite(r.current)),
        )

    async def _three(self, adapter: str, candidate: Model, wanted: Sequence[Scored]) -> _Three:
        base = self._references.base
        serving = self._client.adapters.get(adapter)
        current = base if serving is None else References.version(adapter, serving)
        return _Three(
            await self._references.scores(base, wanted),
            await self._references.scores(current, wanted),
            await self._references.scores(candidate, wanted),
        )


def _encode(encoder: Encoder, sample: Sample) -> Encoded | None:
    try:
        return encoder.encode(sample)
    except InvalidRequest:
        return None


def _chosen(item: Encoded) -> Scored:
    return Scored(item.prompt + item.chosen, len(item.prompt))


def _rejected(item: Encoded) -> Scored:
    return Scored(item.prompt + item.rejected, len(item.prompt))
