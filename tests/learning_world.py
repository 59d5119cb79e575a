"""A server's learning over the scripted engine and a real store, without HTTP."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import pytest
from prometheus_client import CollectorRegistry

from fake_engine import FakeEngine
from patience import PATIENCE_S
from serving import demo_tokenizer
from tandem.adapters.files import inspect_adapter
from tandem.core.errors import EngineDead, NoMemory, StoreError
from tandem.core.learning import (
    AdapterRecord,
    Feedback,
    FeedbackKind,
    Sample,
    SampleKind,
    SampleState,
    Split,
)
from tandem.core.ports import EngineState
from tandem.core.training import TrainerSpec, TrainerState
from tandem.services import tasks
from tandem.services.learning.answers import Answers
from tandem.services.learning.canary import Canary, read_canary
from tandem.services.learning.freshness import Freshness
from tandem.services.learning.gate import Bounds
from tandem.services.learning.learner import Learner
from tandem.services.learning.measure import Examiner
from tandem.services.learning.publish import Publisher, nothing
from tandem.services.learning.recovery import recover
from tandem.services.learning.references import References
from tandem.services.learning.settings import LearningSettings
from tandem.services.learning.tools import LearningTools
from tandem.services.versions.retention import Retention
from tandem.store import Connection, Store, adapters, feedback, samples
from tandem.telemetry.learning import LearningMetrics

CANARY = (
    '{"messages": [{"role": "user", "content": "Hello!"}]}\n{"prompt": "Once", "answer": "upon"}\n'
)


class OneTrainer(FakeEngine):
    """Has memory for one."""

    async def open_trainer(self, spec: TrainerSpec) -> TrainerState:
        if self.trainers.keys() - {spec.name}:
            raise NoMemory("the open trainer needs it")
        return await super().open_trainer(spec)


def kill(engine: FakeEngine) -> NoReturn:
    """What a step does that ends the engine; a new one is there soon."""
    engine.die()
    asyncio.get_running_loop().call_later(0.01, setattr, engine, "state", EngineState.READY)
    raise EngineDead("killed by a step")


def note_waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that back-offs would wait from now on, without a bound; they do not wait."""
    waits: list[float] = []

    async def noted(backoff: tasks.Backoff) -> None:
        waits.append(backoff._next_s)
        backoff._next_s *= 2
        await asyncio.sleep(0)

    monkeypatch.setattr(tasks.Backoff, "wait", noted)
    return waits


@dataclass
class World:
    """The parts, joined as `build.py` joins them."""

    engine: FakeEngine
    store: Store
    tools: LearningTools
    learner: Learner
    directory: Path
    registry: CollectorRegistry
    numbers: itertools.count[int] = field(default_factory=itertools.count)

    async def give(
        self, samples: Sequence[Sample], settings: dict[str, object] | None = None
    ) -> None:
        """Store samples as feedback of an adapter, which is created if need be."""
        await self.store.write(_keep, samples, settings or {})

    def sample(self, kind: SampleKind = SampleKind.DPO, **changes: object) -> Sample:
        """A sample with an id of its own."""
        number = next(self.numbers)
        values: dict[str, object] = {
            "sample_id": f"sample-{number}",
            "feedback_id": f"feedback-{number}",
            "adapter": "formal",
            "kind": kind,
            "created_s": time.time() - 60.0 + number / 1000,
            "messages": ({"role": "user", "content": f"What is {number} plus 1?"},),
            "prompt": "",
            "chosen": f"Certainly. It is {number + 1}.",
            "rejected": f"{number + 1}" if kind is SampleKind.DPO else "",
            "conversation": f"conversation-{number}",
        }
        return Sample(**{**values, **changes})  # type: ignore[arg-type]

    def held_out(self, count: int) -> list[Sample]:
        """Pairs that are never trained on."""
        return [self.sample(split=Split.HELD_OUT) for _ in range(count)]


def _keep(connection: Connection, samples: Sequence[Sample], settings: dict[str, object]) -> None:
    for sample in samples:
        adapters.create(connection, AdapterRecord(sample.adapter, 0.0, settings=settings))
        said = Feedback(
            sample.feedback_id, sample.created_s, sample.adapter, FeedbackKind.PREFERENCE
        )
        feedback.add(connection, said, [sample])


def join(
    engine: FakeEngine,
    store: Store,
    directory: Path,
    *,
    settings: LearningSettings | None = None,
    bounds: Bounds | None = None,
    at: Callable[[str], None] = nothing,
    max_adapters: int = 0,
    keep_versions: int = 0,
    trains: bool = True,
    now: Callable[[], float] | None = None,
) -> World:
    """Parts over an engine and an open store."""
    canary_file = directory / "canary.jsonl"
    canary_file.write_text(CANARY)
    registry = CollectorRegistry()
    metrics = LearningMetrics(registry)
    references = References(engine, store)
    answers = Answers(engine)
    canary = Canary(
        read_canary(str(canary_file)), engine, references, answers, directory / "canary"
    )
    tools = LearningTools(
        client=engine,
        store=store,
        tokenizer=demo_tokenizer(),
        references=references,
        examiner=Examiner(engine, store, references, canary, answers, bounds or Bounds()),
        publisher=Publisher(
            engine,
            store,
            directory,
            at,
            max_adapters=max_adapters,
            retention=Retention(keep_versions),
        ),
        metrics=metrics,
        freshness=Freshness(metrics, time.time),
        defaults=settings
        or LearningSettings(
            batch_samples=4, steps_per_version=2, replay=0.25, epochs=1, version_wait_s=0.0
        ),
        now=now or time.time,
        trains=trains,
    )
    return World(engine, store, tools, Learner(tools), directory, registry)


@asynccontextmanager
async def world(directory: Path, **options: object) -> AsyncIterator[World]:
    """A world that learns from the start and is taken apart at the end."""
    store = Store.open(directory)
    made = join(options.pop("engine", FakeEngine()), store, directory, **options)  # type: ignore[arg-type]
    try:
        await recover(made.tools, directory)
        await made.learner.start()
        yield made
    finally:
        await made.learner.stop()
        store.close()


def lose(store: Store, *works: Callable[..., Any], done: bool = True) -> list[Callable[..., Any]]:
    """Let `store` fail once where it shall write each of `works`, after (or, with `done` false,
    before) it was done; those that failed so far."""
    write, left, lost = store.write, list(works), []

    async def lossy(work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        fails = work in left
        if done or not fails:
            result = await write(work, *args, **kwargs)
        if fails:
            left.remove(work)
            lost.append(work)
            raise StoreError("cannot write: the connection is lost")
        return result

    store.write = lossy  # type: ignore[method-assign, assignment]
    return lost


async def state_of(world: World, sample: Sample) -> SampleState:
    """What has become of a sample."""
    return (await world.store.read(samples.get, [sample.sample_id]))[0].state


async def settled(world: World, adapter: str = "formal") -> None:
    """Wait until nothing is accepted or assigned any more, and the engine has what came of it."""

    async def left() -> int:
        states = (await world.store.read(samples.counts)).get(adapter, {}).get(Split.TRAIN, {})
        return states.get(SampleState.ACCEPTED, 0) + states.get(SampleState.ASSIGNED, 0)

    async with asyncio.timeout(PATIENCE_S):
        while await left():
            await asyncio.sleep(0.02)
        async with world.learner.settled(adapter):  # samples are consumed before a turn ends
            pass


def files_at(path: Path, weights: str) -> str:
    """A PEFT directory; the hash of its content."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4}))
    (path / "adapter_model.safetensors").write_text(weights)
    return inspect_adapter(path).content_hash
