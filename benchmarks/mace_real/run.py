"""One run: a load on a server of one policy over HTTP, and which version answered when.

Knows HTTP and the store's directory, from which versions are read afterwards. Invariant: nothing
is scored while the server runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.learning.preferences import PreferencePair
from benchmarks.learning.report import RunKey
from benchmarks.learning.runs import PairScore, RunRecord, score_under
from benchmarks.learning.stream import Feedback, Load
from benchmarks.learning.teaching import Lessons, Published
from benchmarks.live.api import Api
from benchmarks.live.server import ServerSpec, serving
from benchmarks.mace_real.load import Options
from tandem.bench.client import Target, run_load
from tandem.bench.http1 import Origin
from tandem.bench.measure import Outcome
from tandem.bench.workload import PlannedRequest
from tandem.build import build_engine_client
from tandem.config import CacheConfig, ModelConfig, SchedulingConfig, Settings

ADAPTER = "learner"
LOOK_S = 0.25
KV_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Moment:
    """From `at_s` on this version answered; 0: the base."""

    at_s: float
    number: int
    content_hash: str


@dataclass(slots=True)
class Kept:
    """A run with what the report of runs does not have: which version answered when, what the gate
    refused, with its reasons, and the samples by state at the end."""

    record: RunRecord
    moments: list[Moment] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    samples: dict[str, int] = field(default_factory=dict)


def as_row(kept: Kept) -> dict[str, Any]:
    """What is kept of a run, as a row of JSON. Of a request's tokens the first and the last."""
    record = kept.record
    return {
        "seconds": record.seconds,
        "pairs": [astuple(pair) for pair in record.pairs],
        "requests": [
            [each.intended_s, each.output_s[:1] + each.output_s[-1:], each.output_tokens]
            for each in record.outcomes
        ],
        "errors": {each.index: each.error for each in record.outcomes if each.error is not None},
        "losses": record.lessons.losses,
        "uses": record.lessons.uses,
        "moments": [astuple(moment) for moment in kept.moments],
        "refused": kept.refused,
        "samples": kept.samples,
    }


def of_row(row: Mapping[str, Any]) -> Kept:
    """The run of a row."""
    outcomes = [
        Outcome(
            place,
            intended_s,
            intended_s,
            list(output_s),
            output_tokens=tokens,
            error=row["errors"].get(str(place)),
        )
        for place, (intended_s, output_s, tokens) in enumerate(row["requests"])
    ]
    moments = [Moment(*each) for each in row["moments"]]
    lessons = Lessons(_versions(moments), list(row["losses"]), row["uses"])
    pairs = [PairScore(*each) for each in row["pairs"]]
    record = RunRecord(row["seconds"], outcomes, lessons, pairs)
    return Kept(record, moments, list(row["refused"]), dict(row["samples"]))


def server_of(key: RunKey, options: Options, port: int, folder: Path) -> ServerSpec:
    """Default settings but for the objective, the policy, and the interval of Ekya's windows."""
    flags = ["--tpot-slo", f"{options.tpot_slo_s:g}", "--policy", key.policy]
    if key.policy == "ekya":
        flags += ["--policy-option", f"interval_s={options.ekya_interval_s:g}"]
    return ServerSpec(options.model, port, folder / "store", folder / "server.log", flags)


def run(
    spec: ServerSpec,
    load: Load,
    texts: Mapping[str, PreferencePair],
    settings: Mapping[str, Any],
) -> Kept:
    """Serve, teach, end the server, score. `settings` are the adapter's."""
    with serving(spec):
        kept = asyncio.run(_serve(spec.url, load, texts, settings))
    folder = spec.store / "adapters" / ADAPTER
    served = [_published(kept.moments, each, folder) for each in load.feedback]
    kept.record.pairs = asyncio.run(_score(spec.model, load.feedback, served))
    return kept


def base_run(model: str, load: Load) -> Kept:
    """A run in which nothing is learned: the base's scores, whoever is served meanwhile."""
    pairs = asyncio.run(_score(model, load.feedback, [None] * len(load.feedback)))
    return Kept(RunRecord(load.seconds, [], Lessons(), pairs))


async def _score(
    model: str, feedback: Sequence[Feedback], served: Sequence[Published | None]
) -> list[PairScore]:
    scorer = build_engine_client(scoring_settings(model))
    await scorer.start()
    try:
        return await score_under(scorer, feedback, served)
    finally:
        await scorer.close()


def scoring_settings(model: str) -> Settings:
    """An engine that only scores."""
    scheduling = SchedulingConfig(policy="no_retrain", accustom_s=0.0)
    return Settings(ModelConfig(model), CacheConfig(memory_bytes=KV_BYTES), scheduling=scheduling)


async def _serve(
    url: str, load: Load, texts: Mapping[str, PreferencePair], settings: Mapping[str, Any]
) -> Kept:
    async with Api(url) as api:
        await api.create(ADAPTER, dict(settings))
        target = Target(Origin.parse(url), f"{api.model}:{ADAPTER}")
        asks = [
            PlannedRequest(place, ask.at_s, ask.prompt, ask.output_tokens)
            for place, ask in enumerate(load.asks)
        ]
        warm = [PlannedRequest(-1 - ask.index, 0.0, ask.prompt, 4) for ask in asks[:4]]
        for warmed in await run_load(warm, target, lambda _: None):
            if warmed.error is not None:
                raise RuntimeError(f"the server does not answer: {warmed.error}")
        loop = asyncio.get_running_loop()
        began_s, moments = loop.time(), list[Moment]()
        watching = asyncio.create_task(_watch(api, began_s, moments))
        teaching = asyncio.create_task(_teach(api, load.feedback, texts, began_s))
        try:
            outcomes = await run_load(asks, target, lambda _: None)
            await teaching
            if watching.done():
                watching.result()  # it ends by an error only
        finally:
            watching.cancel()
            teaching.cancel()
        return await _kept(api, RunRecord(load.seconds, outcomes, Lessons()), moments)


async def _teach(
    api: Api, feedback: Sequence[Feedback], texts: Mapping[str, PreferencePair], began_s: float
) -> None:
    loop = asyncio.get_running_loop()
    for each in feedback:
        await asyncio.sleep(max(0.0, began_s + each.at_s - loop.time()))
        pair = texts[each.pair.key]
        body = {
            "messages": list(pair.messages),
            "preference": {"chosen": pair.chosen, "rejected": pair.rejected},
        }
        await api.teach(ADAPTER, body)


async def _watch(api: Api, began_s: float, moments: list[Moment]) -> None:
    """Write down each change of the version that answers, until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        found = await api.call("GET", f"/v1/adapters/{ADAPTER}")
        number = found["version"]
        if number != (moments[-1].number if moments else 0):
            at_s = loop.time() - began_s
            moments.append(Moment(at_s, number, found["content_hash"] or ""))
        await asyncio.sleep(LOOK_S)


async def _kept(api: Api, record: RunRecord, moments: list[Moment]) -> Kept:
    """What was learned; the steps of a version have its mean loss."""
    versions = await api.versions(ADAPTER)
    samples = (await api.learner(ADAPTER)).samples
    losses = []
    for version in versions:
        steps, loss = version.metrics.get("steps", 0), version.metrics.get("loss", 0.0)
        losses += [float(loss)] * int(steps)
    record.lessons = Lessons(_versions(moments), losses, samples.get("consumed", 0))
    refused = [version.reason for version in versions if version.state == "refused"]
    return Kept(record, moments, refused, samples)


def _versions(moments: Sequence[Moment]) -> list[Published]:
    """Each version once, from when it first answered."""
    first = {each.number: each for each in reversed(moments) if each.number}
    return [
        Published(each.at_s, number, each.content_hash, "", 0)
        for number, each in sorted(first.items())
    ]


def _published(moments: Sequence[Moment], feedback: Feedback, folder: Path) -> Published | None:
    """The version that answered when `feedback` came; None for the base."""
    before = [each for each in moments if each.at_s <= feedback.at_s]
    if not before or not before[-1].number:
        return None
    last = before[-1]
    path = str(folder / str(last.number))
    return Published(last.at_s, last.number, last.content_hash, path, 0)
