"""One engine under one policy, through its asynchronous client: the worker of `peers.worker`.

The same path as behind the server but for HTTP and text. Requests leave at their intended times
however slow the engine is, and latencies count from these. A window ends when every request has
ended or can no longer meet its objectives; training is on offer until then.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import version
from itertools import count
from typing import Any

from benchmarks.attainment.workload import Job
from benchmarks.coexecution.engine_tandem import AHEAD, LORA, OPTIMIZER, TRAINER
from benchmarks.coexecution.workload import Training
from tandem.bench.measure import Outcome
from tandem.bench.workload import PlannedRequest
from tandem.build import build_engine_client, build_executor
from tandem.config import Settings, resolve
from tandem.core.request import Request
from tandem.core.sampling import SamplingParams
from tandem.core.training import (
    LossKind,
    LossSpec,
    Role,
    TrainerSpec,
    TrainingSequence,
    TrainingStep,
)
from tandem.engine.client import AsyncEngineClient
from tandem.estimators.profile import Profile
from tandem.profiler import measure

# All engines are in memory at once.
KV_BYTES = 1 << 29
UNFINISHED = "unfinished"
COUNTED = ("iterations", "preemptions", "training_tokens", "schedule_s", "execute_s")


class Window:
    """The requests and steps of one job, as they happen."""

    def __init__(self, client: AsyncEngineClient, job: Job, names: Iterator[int]) -> None:
        self._client = client
        self._job = job
        self._names = names
        self._planned = job.requests()
        self._outcomes = {
            each.index: Outcome(each.index, each.at_s, each.at_s, error=UNFINISHED)
            for each in self._planned
        }
        self._sent: set[int] = set()
        self._steps_s: list[float] = []
        self._output_tokens = 0
        self._began_s = time.perf_counter()

    async def run(self) -> dict[str, Any]:
        """Serve, and train if the job says so; see `figures.Measurement`."""
        before = await self._client.stats()
        self._began_s = time.perf_counter()
        training = [asyncio.create_task(self._train()) for _ in range(AHEAD * self._job.train)]
        try:
            await (self._closed_loop() if self._job.at_once else self._open_loop())
            for task in training:
                if task.done():
                    task.result()  # it ends by an error only
        finally:
            for task in training:
                task.cancel()
            await asyncio.gather(*training, return_exceptions=True)
        after = await self._client.stats()
        if training:
            await self._client.cancel_steps(TRAINER)
        sent = [self._outcomes[index] for index in sorted(self._sent)]
        return {
            "seconds": self._job.seconds,
            "outcomes": [asdict(each) for each in sent],
            "output_tokens": self._output_tokens,
            "step_ends_s": self._steps_s,
            "step_tokens": self._training().step_tokens,
            "stats": {name: getattr(after, name) - getattr(before, name) for name in COUNTED},
            "prediction_errors": {
                name: asdict(error)
                for name, error in after.prediction_errors.items()
                if error.samples
            },
        }

    async def _open_loop(self) -> None:
        tasks = [asyncio.create_task(self._at_its_time(each)) for each in self._planned]
        try:
            await asyncio.sleep(self._job.seconds)
            for request, task in zip(self._planned, tasks, strict=True):
                left_s = self._job.due_s(request) - self._now_s()
                if left_s > 0.0:
                    await asyncio.wait((task,), timeout=left_s)
        finally:
            await _end(tasks)

    async def _closed_loop(self) -> None:
        waiting = iter(self._planned)

        async def one_after_the_other() -> None:
            for request in waiting:
                await self._request(request, self._now_s())

        tasks = [asyncio.create_task(one_after_the_other()) for _ in range(self._job.at_once)]
        try:
            await asyncio.wait(tasks, timeout=self._job.seconds)
        finally:
            await _end(tasks)

    async def _at_its_time(self, planned: PlannedRequest) -> None:
        await asyncio.sleep(planned.at_s - self._now_s())
        await self._request(planned, planned.at_s)

    async def _request(self, planned: PlannedRequest, intended_s: float) -> None:
        outcome = self._outcomes[planned.index]
        outcome.intended_s, outcome.sent_s = intended_s, self._now_s()
        outcome.prompt_tokens = len(planned.prompt)
        self._sent.add(planned.index)
        sampling = SamplingParams(
            max_tokens=planned.output_tokens, temperature=0.0, ignore_eos=True
        )
        name = f"request-{next(self._names)}"
        request = Request(name, planned.prompt, sampling, slo=self._job.slo)
        async for event in self._client.generate(request):
            if event.error is not None:
                raise RuntimeError(event.error)
            now_s, tokens = self._now_s(), len(event.tokens)
            if tokens:
                # First and last are all that the figures need.
                outcome.output_s = [*outcome.output_s[:1], now_s]
                outcome.output_tokens += tokens
                self._output_tokens += tokens if now_s <= self._job.seconds else 0
        outcome.ended_s, outcome.error = self._now_s(), None

    def _training(self) -> Training:
        job = self._job
        tokens = job.sequence_tokens
        return Training("sft", job.vocabulary, job.seed, job.seconds, (), tokens=tokens)

    async def _train(self) -> None:
        """One step after the other, until cancelled."""
        training = self._training()
        for batch in training.batches():
            sequences = tuple(
                TrainingSequence(tuple(tokens), training.prompt_tokens, Role.TARGET)
                for tokens in batch
            )
            name = f"step-{next(self._names)}"
            step = TrainingStep(name, TRAINER, LossSpec(LossKind.SFT), (sequences,))
            outcome = await self._client.train(step)
            if not outcome.applied:
                raise RuntimeError(f"{name} was left out: {outcome.problem}")
            self._steps_s.append(self._now_s())

    def _now_s(self) -> float:
        return time.perf_counter() - self._began_s


class PolicyEngine:
    """An engine with one open trainer."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        self._runner = asyncio.Runner()
        self._names = count()
        self._client = self._runner.run(_start(model, options))

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        """Run one window."""
        return self._runner.run(self._run(Job(**job)))

    async def _run(self, job: Job) -> dict[str, Any]:
        return await Window(self._client, job, self._names).run()


def profiled(settings: Settings, seconds: float) -> Profile:
    """What `tandem profile` finds of a model that is loaded for it."""
    return measure(build_executor(settings), settings, seconds, lambda done: None)


def settings_of(model: str, options: dict[str, Any], **scheduling: Any) -> Settings:
    """Those of all engines, with `scheduling`; of `options`, what all have in common."""
    named = {name: options[name] for name in ("device", "dtype", "threads")}
    return resolve(
        {
            "model": {"model": model, **named},
            "cache": {"memory_bytes": KV_BYTES},
            "scheduling": scheduling,
        }
    )


async def _start(model: str, options: dict[str, Any]) -> AsyncEngineClient:
    settings = settings_of(
        model,
        options,
        policy=options["policy"],
        policy_options=options["options"],
        profile=options["profile"],
    )
    client = build_engine_client(settings)
    await client.start()
    await client.open_trainer(TrainerSpec(TRAINER, LORA, OPTIMIZER))
    return client


async def _end(tasks: list[asyncio.Task[None]]) -> None:
    """Cancel what has not ended; raises what ended by an error."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for task in tasks:
        with suppress(asyncio.CancelledError):
            task.result()


def start(model: str, options: dict[str, Any]) -> PolicyEngine:
    """Start the engine process under `options["policy"]` and open the trainer."""
    return PolicyEngine(model, options)


def versions() -> dict[str, str]:
    """Versions of what decides the speed."""
    return {name: version(name) for name in ("tandem", "torch", "transformers")}
