"""Measures a candidate on the canary set, on its own answers and on held-out feedback, and asks
the gate.

Knows the engine and the store; the decision itself is `gate.py`'s. Invariant: held-out samples are
used for generation and scoring only, never for training.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from random import Random
from statistics import median, median_low
from typing import Any, TypeVar

from tandem.core.errors import InvalidRequest
from tandem.core.learning import FEEDBACK, IMPORTED, GateMode, Sample, SampleKind, VersionRecord
from tandem.core.ports import EngineClient
from tandem.core.version import AdapterVersion
from tandem.services.learning.answer_faults import (
    AnswerText,
    fault,
    few_words,
    foreign,
    overlap,
    scripts,
    words,
)
from tandem.services.learning.answers import Answers, Speechless, beginnings
from tandem.services.learning.canary import Canary, Examined
from tandem.services.learning.encode import Encoded, Encoder
from tandem.services.learning.gate import (
    Asked,
    Bounds,
    Fault,
    Measurements,
    PairMargins,
    Reading,
    Thumb,
    Verdict,
    decide,
    summary,
)
from tandem.services.learning.references import Model, References, Scored
from tandem.services.learning.selection import most_shared, shared
from tandem.services.learning.settings import LearningSettings
from tandem.store import Connection, Store, adapters, samples

_Item = TypeVar("_Item")

_MOST_HELD_OUT = 200
_PROBES = 8  # prompts of feedback that a candidate answers
_TRIED = 64  # samples among which these are looked for
_EXCERPT = 40  # characters of a broken answer that a refusal shows


@dataclass(frozen=True, slots=True)
class Candidate:
    """A version to examine: loaded as `staged`, a candidate for `adapter`, trained on `taught`.
    `keys`: the API key of each sample. If empty, the key share is not checked."""

    adapter: str
    staged: AdapterVersion
    taught: Sequence[Sample]
    keys: Sequence[str] = ()

    def model(self, references: References) -> Model:
        """The handle under which the candidate scores and generates."""
        return references.version(self.staged.name, self.staged)


@dataclass(frozen=True, slots=True)
class _Read:
    """Answers of the candidate to some prompts beside the base's own."""

    said: Sequence[AnswerText]
    own: Sequence[AnswerText]


@dataclass(frozen=True, slots=True)
class _Three:
    """Scores of the same completions under reference, current version and candidate."""

    reference: Sequence[float]
    current: Sequence[float]
    candidate: Sequence[float]


class Examiner:
    """Measures candidates; the server has one."""

    def __init__(
        self,
        client: EngineClient,
        store: Store,
        references: References,
        canary: Canary,
        answers: Answers,
        bounds: Bounds,
    ) -> None:
        self._client = client
        self._store = store
        self._references = references
        self._canary = canary
        self._answers = answers
        self.bounds = bounds

    async def examine(
        self, candidate: Candidate, settings: LearningSettings, encoder: Encoder
    ) -> Verdict:
        """Measure a loaded candidate and decide. Raises as `EngineClient.score` and `generate`
        do."""
        adapter, model = candidate.adapter, candidate.model(self._references)
        share = settings.key_share
        newest = await self._store.read(samples.held_out, adapter, limit=_MOST_HELD_OUT)
        kept = shared(newest, most_shared(newest, len(newest), share), share)
        held = await asyncio.to_thread(_encoded, encoder, kept)
        pairs, thumbs = await self._held_out(adapter, model, held)
        examined = await self._canary.measure(model, encoder)
        reading, asked = await self._read(candidate, examined, held, encoder)
        given = max(Counter(candidate.keys).values(), default=0) / max(1, len(candidate.keys))
        measured = Measurements(
            canary=examined.measures,
            reading=reading,
            asked=asked,
            pairs=pairs,
            thumbs=thumbs,
            key_share=given,
            key_cap=share,
        )
        # An import is taught nothing here, and follows no version.
        bounds = await self._bounds(adapter, encoder) if candidate.taught else self.bounds
        verdict = decide(measured, settings.gate, bounds)
        verdict.metrics.update(bounds.passed_on(self.bounds))
        if settings.gate is GateMode.ALWAYS:
            verdict.metrics["gate"] = GateMode.ALWAYS.value
        return verdict

    async def noise(self, taught: Sequence[Encoded], encoder: Encoder) -> dict[str, float]:
        """How much less likely than its own answers to canary prompts the base finds the chosen
        ones, in nats a token: of samples beyond `Bounds.noise`, where there are several and most
        are beyond it. The gate would most likely refuse what is learned from them. Raises as the
        engine client does, and `Speechless` and `NotFinite` of the base."""
        asked = {item.sample_id: _chosen(item) for item in taught if item.desirable}
        if len(asked) < _PROBES:
            return {}
        wanted = list(asked.values())
        scores = await self._references.scores(self._references.base, wanted)
        usual = await self._canary.usual(encoder)
        both = zip(asked, _per_token(scores, wanted), strict=True)
        known = {key: usual - each for key, each in both if math.isfinite(each)}
        if not known or median_low(known.values()) <= self.bounds.noise:
            return {}
        return {key: each for key, each in known.items() if each > self.bounds.noise}

    async def drift(self, trainer: str, adapter: str, encoder: Encoder) -> float:
        """How far the working parameters of `trainer` are from the base on trusted prompts, as a
        share of what the gate allows. Where it allows `adapter` more, the rest of it is as large a
        share as usual."""
        most = (await self._bounds(adapter, encoder)).quality_drop
        drop = await self._canary.drop_under(trainer, encoder)
        return 1.0 - (most - drop) / self.bounds.quality_drop

    async def _bounds(self, adapter: str, encoder: Encoder) -> Bounds:
        """What the next version of `adapter` must keep. A current one that was loaded and not
        measured is measured now."""
        version = await self._store.read(adapters.current_version, adapter)
        if version is None:
            return self.bounds
        metrics = version.metrics
        if version.origin == IMPORTED and "canary_quality_drop" not in metrics:
            metrics = await self._measured(version, encoder)
        by_feedback = version.origin == FEEDBACK and metrics.get("gate") == GateMode.ALWAYS.value
        return self.bounds.after(metrics, chosen=not by_feedback)

    async def _measured(self, version: VersionRecord, encoder: Encoder) -> dict[str, Any]:
        """The metrics of the current version, which are kept."""
        serving = self._client.adapters.get(version.adapter)
        if serving is None:
            return version.metrics
        model = self._references.version(version.adapter, serving)
        examined = await self._canary.measure(model, encoder)
        nothing = _Read((), ())
        reading = _reading(examined, nothing, (), None, encoder) if examined.said else None
        metrics = summary(Measurements(examined.measures, reading=reading))
        await self._store.write(_keep_metrics, version.adapter, version.number, metrics)
        return metrics

    # ------------------------------------------------------------------ reading

    async def _read(
        self, candidate: Candidate, examined: Examined, held: Sequence[Encoded], encoder: Encoder
    ) -> tuple[Reading | None, Asked | None]:
        """Read answers to the canary prompts and to some prompts of the feedback."""
        if not examined.said:
            return None, None
        # Nobody who sends samples knows which are looked at: the candidate's content says it.
        rng = Random(candidate.staged.content_hash)
        some = _drawn(candidate.taught, _TRIED, rng)
        taught = await asyncio.to_thread(_encoded, encoder, some)
        probes = _probes(held, taught, rng)
        base, model = self._references.base, candidate.model(self._references)
        prompts = [*(item.prompt for item in probes), *self._canary.read_only(encoder)]
        try:
            own = await self._answers.of(base, prompts)
        except Speechless:  # without the base's answers, the others say nothing of the candidate
            probes, prompts, own = [], [], []
        try:
            said = await self._answers.of(model, prompts)
        except Speechless:
            return None, None
        asked = await self._asked(model, probes, own[: len(probes)], encoder) if probes else None
        chosen = [encoder.text(item.chosen) for item in probes]
        probed = _texts(said, own, encoder)
        return _reading(examined, probed, chosen, asked, encoder), asked

    async def _asked(
        self, model: Model, probes: Sequence[Encoded], own: Sequence[Scored], encoder: Encoder
    ) -> Asked | None:
        chosen, begun, base = list(map(_chosen, probes)), beginnings(own), self._references.base
        before = _per_token(await self._references.scores(base, chosen), chosen)
        after = _per_token(await self._references.scores(model, chosen), chosen)
        usual = _per_token(await self._references.scores(base, begun), begun)
        known = [each for each in zip(before, after, usual, strict=True) if math.isfinite(each[0])]
        if not known:  # the base cannot score them: that says nothing about the candidate
            return None
        texts = [AnswerText(encoder.text(item.chosen), 0, True) for item in probes]
        read = _Read(texts, [_answer(encoder, item) for item in begun])
        return Asked(
            kept=_kept(read),
            length=_length(read),
            divergence=_middle(own - was for was, _, own in known),
            gain=_middle(now - was for was, now, _ in known),
            longer=_longer(chosen, own, encoder),
        )

    # ------------------------------------------------------------------ held-out feedback

    async def _held_out(
        self, adapter: str, candidate: Model, encoded: Sequence[Encoded]
    ) -> tuple[tuple[PairMargins, ...], tuple[Thumb, ...]]:
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
                normalised=good.candidate[at] / len(item.chosen)
                - bad.candidate[at] / len(item.rejected),
            )
            for at, item in enumerate(pairs)
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
        current = base if serving is None else self._references.version(adapter, serving)
        return _Three(
            await self._references.scores(base, wanted),
            await self._references.scores(current, wanted),
            await self._references.scores(candidate, wanted),
        )


def _texts(said: Sequence[Scored], own: Sequence[Scored], encoder: Encoder) -> _Read:
    """Answers of the candidate, and the base's own, as texts."""
    return _Read(*([_answer(encoder, item) for item in items] for items in (said, own)))


def _keep_metrics(
    connection: Connection, adapter: str, number: int, metrics: dict[str, Any]
) -> None:
    version = adapters.version(connection, adapter, number)
    if version is not None:
        adapters.save_version(connection, replace(version, metrics=version.metrics | metrics))


def _encoded(encoder: Encoder, wanted: Sequence[Sample]) -> list[Encoded]:
    """Those that can be encoded. Blocks."""
    found = []
    for sample in wanted:
        with suppress(InvalidRequest):
            found.append(encoder.encode(sample))
    return found


def _chosen(item: Encoded) -> Scored:
    return Scored(item.prompt + item.chosen, len(item.prompt))


def _rejected(item: Encoded) -> Scored:
    return Scored(item.prompt + item.rejected, len(item.prompt))


def _probes(held: Sequence[Encoded], taught: Sequence[Encoded], rng: Random) -> list[Encoded]:
    """Feedback with a desirable answer: up to half held out, the rest of the training samples. So
    neither alone says how much may change."""
    found = _drawn([item for item in held if item.desirable], _PROBES // 2, rng)
    return found + _drawn([item for item in taught if item.desirable], _PROBES - len(found), rng)


def _drawn(items: Sequence[_Item], most: int, rng: Random) -> list[_Item]:
    """At most `most` items, at random."""
    return rng.sample(items, min(most, len(items)))


def _reading(
    examined: Examined,
    probed: _Read,
    chosen: Sequence[str],
    asked: Asked | None,
    encoder: Encoder,
) -> Reading:
    canary = _texts(examined.said, examined.own, encoder)
    begun = _texts(beginnings(examined.said), beginnings(examined.own), encoder)
    usual = scripts(" ".join(each.text for each in (*canary.own, *probed.own)))
    asked_for = scripts(" ".join(chosen))
    brief = asked is not None and asked.length < 0.5
    longer = 0 if asked is None else asked.longer
    both = list(zip([*canary.said, *probed.said], [*canary.own, *probed.own], strict=True))
    few = [few_words(said, own) for said, own in both]
    same = {cut for cut, number in Counter(filter(None, few)).items() if 2 * number > len(few)}
    faults = []
    for (said, own), cut in zip(both, few, strict=True):
        found = fault(said, own, longer)
        if found is None and foreign(said.text, usual, asked_for):
            found = "unexpected script"
        if found is None and cut is not None and not brief:
            found = "almost no words"
        if found is None and cut in same:
            found = "the same few words"
        if found is not None:
            faults.append(Fault(found, said.text[:_EXCERPT]))
    return Reading(len(both), tuple(faults), _kept(begun), _length(begun))


def _longer(chosen: Sequence[Scored], own: Sequence[Scored], encoder: Encoder) -> int:
    """How many tokens chosen answers have more than the base's own, in the median. One that was
    cut asks for no length."""
    more = (
        one.completion_tokens - other.completion_tokens if encoder.ends(one.tokens) else 0
        for one, other in zip(chosen, own, strict=True)
    )
    return max(0, median_low(more))


def _kept(read: _Read) -> float:
    """Mean share of the content words of the base's answers that the candidate's have too."""
    both = zip(read.said, read.own, strict=True)
    return math.fsum(overlap(said.text, own.text) for said, own in both) / max(1, len(read.own))


def _length(read: _Read) -> float:
    """Mean length relative to the base's answer, each at most 1."""
    both = zip(read.said, read.own, strict=True)
    numbers = [(len(words(said.text)), len(words(own.text))) for said, own in both]
    shares = [min(1.0, said / own) if own else 1.0 for said, own in numbers]
    return math.fsum(shares) / max(1, len(shares))


def _per_token(logprobs: Sequence[float], items: Sequence[Scored]) -> list[float]:
    both = zip(logprobs, items, strict=True)
    return [logprob / max(1, item.completion_tokens) for logprob, item in both]


def _middle(values: Iterable[float]) -> float:
    """The median; not a number if one of them is none."""
    known = list(values)
    return median(known) if all(map(math.isfinite, known)) else math.nan


def _answer(encoder: Encoder, item: Scored) -> AnswerText:
    tokens = item.tokens[item.prompt_tokens :]
    ended, text = encoder.ends(tokens), encoder.text(tokens)
    # The limit may cut a character in two.
    return AnswerText(
        text if ended else text.rstrip("\N{REPLACEMENT CHARACTER}"), len(tokens), ended
    )
