"""Our engine through its asynchronous client: requests and training steps, one process of its own.

The same path as behind the server but for HTTP and text: tokens are timed where the client gets
them. Two steps are submitted at a time, so that one always waits when another ends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import version
from itertools import count, cycle, islice
from typing import Any

from benchmarks.coexecution.pairs import MICRO_PAIRS, STEP_PAIRS, Pair, read
from benchmarks.coexecution.workload import Ask, ClosedLoop, Serving, Steps, Training
from tandem.build import build_engine_client
from tandem.config import resolve
from tandem.core.request import Request
from tandem.core.sampling import SamplingParams
from tandem.core.training import (
    LoraSpec,
    LossKind,
    LossSpec,
    OptimizerSpec,
    Role,
    ScoreRequest,
    TrainerSpec,
    TrainingSequence,
    TrainingStep,
)
from tandem.engine.client import AsyncEngineClient

KV_BYTES = 1 << 30
AHEAD = 2
PAIRS = 2
TRAINER = "bench"
LORA = LoraSpec(rank=16, alpha=32.0)
OPTIMIZER = OptimizerSpec(learning_rate=1e-4)
# After a change of scheduling: requests, and one step beside them.
WARM_UP = {
    "serve": asdict(Serving(vocabulary=1000, seed=0)),
    "train": asdict(Training("sft", vocabulary=1000, seed=0, seconds=0.1, cores=())),
    "settle_s": 1.0,
}
# Roles of a step's sequences, repeated.
ROLES = {"sft": (Role.TARGET,), "dpo": (Role.CHOSEN, Role.REJECTED)}


class TandemEngine:
    """An engine with one open trainer, started anew when a job wants other scheduling."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        self._model = model
        self._options = options
        self._runner = asyncio.Runner()
        self._scheduling: dict[str, Any] = {}
        self._steps = count()
        self._pairs: list[tuple[TrainingSequence, ...]] = []
        self._real = read(options["pairs"]) if options["pairs"] else []
        self._client = self._runner.run(self._start())

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        """Serve, train, or both; serving then begins `settle_s` earlier and ends with training."""
        return self._runner.run(self._run(job))

    async def _start(self) -> AsyncEngineClient:
        settings = resolve(
            {
                "model": {
                    "model": self._model,
                    "dtype": self._options["dtype"],
                    "threads": self._options["threads"],
                },
                "cache": {"memory_bytes": KV_BYTES, "prefix_caching": False},
                "scheduling": {"policy": "unified", **self._scheduling},
            }
        )
        client = build_engine_client(settings)
        await client.start()
        await client.open_trainer(TrainerSpec(TRAINER, LORA, OPTIMIZER))
        return client

    async def _run(self, job: dict[str, Any]) -> dict[str, Any]:
        if job["scheduling"] != self._scheduling:
            self._scheduling = job["scheduling"]
            await self._client.close()
            self._client = await self._start()
            await self._run({**WARM_UP, "scheduling": self._scheduling})
        train = Training(**job["train"]) if job["train"] else None
        batches = await self._batches(train) if train else None
        if job["serve"] is None:
            assert train is not None and batches is not None
            return {"train": await self._train(train, batches)}
        serving = Serving(**job["serve"])
        loop = ClosedLoop(serving)
        sequences = [asyncio.create_task(self._sequence(loop, ask)) for ask in loop.first()]
        answer = {}
        if train is not None and batches is not None:
            await asyncio.sleep(job["settle_s"])
            answer["train"] = await self._train(train, batches)
        else:
            await asyncio.sleep(serving.seconds)
        for task in sequences:
            task.cancel()
        for ended in await asyncio.gather(*sequences, return_exceptions=True):
            if not isinstance(ended, asyncio.CancelledError):
                raise RuntimeError(
                    "a request ended otherwise than by the end of the job"
                ) from ended
        return {**answer, "serve": loop.answer()}

    async def _sequence(self, loop: ClosedLoop, ask: Ask) -> None:
        """One request after the other, until cancelled."""
        while True:
            sampling = SamplingParams(
                max_tokens=ask.output_tokens, temperature=0.0, ignore_eos=True
            )
            request = Request(ask.name, tuple(ask.prompt), sampling)
            async for event in self._client.generate(request):
                if event.error is not None:
                    raise RuntimeError(event.error)
                loop.note(ask.name, len(event.tokens), time.perf_counter())
            ask = loop.next()

    async def _train(
        self, training: Training, batches: Iterator[tuple[tuple[TrainingSequence, ...], ...]]
    ) -> dict[str, Any]:
        steps = Steps(training)
        loss = LossSpec(LossKind(training.loss))

        async def one_after_the_other() -> None:
            while steps.due:
                name = f"step-{next(self._steps)}"
                micro_batches = next(batches)
                step = TrainingStep(name, TRAINER, loss, micro_batches)
                outcome = await self._client.train(step)
                if not outcome.applied:
                    raise RuntimeError(f"{name} was left out: {outcome.problem}")
                steps.note(sum(len(each.tokens) for part in micro_batches for each in part))

        try:
            async with asyncio.timeout(training.limit_s), asyncio.TaskGroup() as group:
                for _ in range(AHEAD):
                    group.create_task(one_after_the_other())
        except TimeoutError:
            steps.give_up()
            await self._client.cancel_steps(TRAINER)
        return steps.answer()

    async def _batches(
        self, training: Training
    ) -> Iterator[tuple[tuple[TrainingSequence, ...], ...]]:
        """The micro-batches of each step; pairs, whose reference is scored once, come again."""
        roles = ROLES[training.loss]
        micro_batches = (
            tuple(
                TrainingSequence(tuple(tokens), training.prompt_tokens, roles[place % len(roles)])
                for place, tokens in enumerate(batch)
            )
            for batch in training.batches()
        )
        if training.loss == "sft":
            return ((each,) for each in micro_batches)
        if not self._pairs:
            known = map(_sequences, self._real) if self._real else islice(micro_batches, PAIRS)
            self._pairs = [await self._scored(pair) for pair in known]
        if not self._real:
            return cycle([(pair,) for pair in self._pairs])
        parts = [
            tuple(each for pair in self._pairs[at : at + MICRO_PAIRS] for each in pair)
            for at in range(0, len(self._pairs), MICRO_PAIRS)
        ]
        per_step = STEP_PAIRS // MICRO_PAIRS
        return cycle([tuple(parts[at : at + per_step]) for at in range(0, len(parts), per_step)])

    async def _scored(self, pair: tuple[TrainingSequence, ...]) -> tuple[TrainingSequence, ...]:
        scored = []
        for each in pair:
            name = f"score-{next(self._steps)}"
            score = await self._client.score(ScoreRequest(name, each.tokens, each.prompt_tokens))
            scored.append(
                TrainingSequence(each.tokens, each.prompt_tokens, each.role, score.logprob)
            )
        return tuple(scored)


def _sequences(pair: Pair) -> tuple[TrainingSequence, ...]:
    prompt, length = tuple(pair.prompt_ids), len(pair.prompt_ids)
    return (
        TrainingSequence(prompt + tuple(pair.chosen_ids), length, Role.CHOSEN),
        TrainingSequence(prompt + tuple(pair.rejected_ids), length, Role.REJECTED),
    )


def start(model: str, options: dict[str, Any]) -> TandemEngine:
    """Start the engine process and open the trainer."""
    return TandemEngine(model, options)


def versions() -> dict[str, str]:
    """Versions of what decides the speed."""
    return {name: version(name) for name in ("tandem", "torch", "transformers")}
