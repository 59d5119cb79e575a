"""Choose the options of the learning benchmark on pairs that it never meets.

    python -m benchmarks learning.search --try "once 1e-2 0.05" --try "repeat 1e-2 0.05 0.5 4 2"

A candidate is `once RATE BETA` (each pair is trained on once) or `repeat RATE BETA THRESHOLD USES
PASSES` (MACE's rule, `PASSES` pairs trained on for each that arrives); with ` free` behind it, DPO
has no reference: the log-probabilities alone make the margin. The held-back quarter of the
conversations arrives in order, 16 pairs at a time: they are scored, then trained on, without any
other load. Prints one row of a Markdown table for each candidate; see docs/benchmarks.md.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.learning.lessons import ByPriority, InOrder, PriorityOptions, Rule
from benchmarks.learning.preferences import held_back, read_preferences
from benchmarks.learning.stream import EncodedPair, encode_pairs, stream_of
from benchmarks.learning.teaching import TeachingOptions, score_requests
from tandem.build import build_engine_client
from tandem.config import ModelConfig, SchedulingConfig, Settings
from tandem.core.ports import EngineClient
from tandem.core.training import (
    LoraSpec,
    LossKind,
    LossSpec,
    OptimizerSpec,
    Role,
    TrainerSpec,
    TrainingSequence,
    TrainingStep,
)
from tandem.services.answering.tokenizer import Tokenizer
from tandem.training.losses import micro_batch_loss

ARRIVE_TOGETHER = 16
END_OF_TURN = (2,)

Scores = dict[int, tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One set of options; `passes` pairs are trained on for each that arrives, `reference` says
    whether DPO has one."""

    text: str
    learning_rate: float
    beta: float
    reference: bool
    repeats: PriorityOptions | None
    passes: float

    @staticmethod
    def parse(text: str) -> Candidate:
        """See the module."""
        kind, *given = text.removesuffix(" free").split()
        rate, beta, *rest = map(float, given)
        reference = not text.endswith(" free")
        if kind == "once":
            return Candidate(text, rate, beta, reference, None, 1.0)
        threshold, uses, passes = rest
        repeats = PriorityOptions(8, threshold, int(uses))
        return Candidate(text, rate, beta, reference, repeats, passes)

    def rule(self, batch: int) -> Rule:
        """Which pairs are trained on next."""
        return InOrder(batch) if self.repeats is None else ByPriority(self.repeats)


class Search:
    """Pairs with their reference scores, and the engine they are scored and learnt on."""

    def __init__(self, client: EngineClient, pairs: Sequence[EncodedPair]) -> None:
        self._client = client
        self._pairs = pairs
        self._shape = TeachingOptions()
        self._reference: Scores = {}

    async def prepare(self) -> Scores:
        """Score every pair under the base model."""
        for at in range(0, len(self._pairs), ARRIVE_TOGETHER):
            await self._score(range(at, self._until(at)), None, self._reference)
        return self._reference

    async def learn(self, candidate: Candidate) -> tuple[Scores, int]:
        """What every pair scored when it arrived, and how many updates there were."""
        shape, met, owed, updates = self._shape, Scores(), 0.0, 0
        optimizer = OptimizerSpec(learning_rate=candidate.learning_rate)
        spec = TrainerSpec("search", LoraSpec(shape.rank, shape.alpha), optimizer)
        await self._client.open_trainer(spec)
        rule = candidate.rule(shape.batch)
        for at in range(0, len(self._pairs), ARRIVE_TOGETHER):
            arrived = range(at, self._until(at))
            await self._score(arrived, "search", met)
            for number in arrived:
                rule.add(number, float(at))
            owed += candidate.passes * len(arrived)
            while owed >= shape.batch and (chosen := rule.take(float(at), 0)):
                owed, updates = owed - shape.batch, updates + 1
                rule.learnt(await self._step(candidate, chosen, updates))
        await self._client.close_trainer("search")
        return met, updates

    def _until(self, at: int) -> int:
        return min(at + ARRIVE_TOGETHER, len(self._pairs))

    async def _score(self, numbers: range, trainer: str | None, into: Scores) -> None:
        requests = [
            request
            for number in numbers
            for request in score_requests(self._pairs[number], None, f"{trainer} {number}")
        ]
        if trainer is not None:
            requests = [replace(request, trainer=trainer) for request in requests]
        scores = await asyncio.gather(*map(self._client.score, requests))
        for place, number in enumerate(numbers):
            into[number] = (scores[2 * place].logprob, scores[2 * place + 1].logprob)

    async def _step(
        self, candidate: Candidate, chosen: tuple[int, ...], number: int
    ) -> dict[int, float]:
        loss = LossSpec(LossKind.DPO, beta=candidate.beta)
        batch = tuple(
            sequence for pair in chosen for sequence in self._sequences(pair, candidate.reference)
        )
        outcome = await self._client.train(
            TrainingStep(f"{candidate.text} {number}", "search", loss, (batch,))
        )
        if not outcome.applied:
            return dict.fromkeys(chosen, 0.0)
        found = micro_batch_loss(loss, batch, outcome.logprobs[0], len(chosen))
        return dict(zip(chosen, found.item_losses, strict=True))

    def _sequences(self, number: int, reference: bool) -> tuple[TrainingSequence, TrainingSequence]:
        pair = self._pairs[number]
        chosen, rejected = self._reference[number] if reference else (0.0, 0.0)
        prompt = len(pair.prompt)
        return (
            TrainingSequence(pair.prompt + pair.chosen, prompt, Role.CHOSEN, chosen),
            TrainingSequence(pair.prompt + pair.rejected, prompt, Role.REJECTED, rejected),
        )


def row(label: str, updates: int, seconds: float, pairs: Sequence[EncodedPair], met: Scores) -> str:
    """Win rate and CLPD over all pairs, the win rate of the later half, and by source."""
    everything = range(len(pairs))
    sources = sorted({pair.source for pair in pairs})
    cells = [
        label,
        f"{updates}",
        f"{win_rate(met, everything):.3f}",
        f"{win_rate(met, everything[len(pairs) // 2 :]):.3f}",
        f"{sum(met[n][0] - met[n][1] for n in everything) / len(pairs):.2f}",
        *(
            f"{win_rate(met, [n for n in everything if pairs[n].source == source]):.2f}"
            for source in sources
        ),
        f"{seconds:.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def win_rate(met: Scores, numbers: Sequence[int]) -> float:
    """The share of `numbers` whose preferred answer is the more probable one."""
    return sum(met[n][0] > met[n][1] for n in numbers) / len(numbers)


async def search(model: Path, pairs: Sequence[EncodedPair], candidates: list[Candidate]) -> None:
    """Print the base model's row, then one for each candidate."""
    settings = Settings(
        ModelConfig(str(model), threads=1), scheduling=SchedulingConfig(policy="adainf")
    )
    client = build_engine_client(settings)
    await client.start()
    try:
        one = Search(client, pairs)
        began = time.monotonic()
        base = await one.prepare()
        print(row("base", 0, time.monotonic() - began, pairs, base), flush=True)
        for candidate in candidates:
            began = time.monotonic()
            met, updates = await one.learn(candidate)
            took = time.monotonic() - began
            print(row(candidate.text, updates, took, pairs, met), flush=True)
    finally:
        await client.close()


def main(
    tries: Annotated[list[str], typer.Option("--try", help="A candidate (repeatable).")],
    data: Annotated[Path, typer.Option(help="The shared data's folder.")] = Path("../shared/data"),
    model: Annotated[Path, typer.Option(help="Model directory.")] = Path(
        ".bench-cache/dialogue-model"
    ),
    max_tokens: Annotated[int, typer.Option(help="Longer pairs are left out.")] = 320,
    most: Annotated[int, typer.Option(help="Pairs at most.")] = 1000,
    seed: Annotated[int, typer.Option(help="Of the order of arrival.")] = 0,
) -> None:
    """Score, learn, print."""
    coder = Tokenizer.load(model)

    def encode(text: str) -> tuple[int, ...]:
        return coder.encode(text, add_special_tokens=False)

    kept = [pair for pair in read_preferences(data / "preferences") if held_back(pair)]
    pairs = stream_of(
        kept,
        lambda some: encode_pairs(some, coder.encode_chat, encode, END_OF_TURN),
        seed,
        max_tokens,
    )[:most]
    sources = " | ".join(sorted({pair.source for pair in pairs}))
    print(f"| candidate | updates | win rate | later half | CLPD | {sources} | s |")
    asyncio.run(search(model, pairs, [Candidate.parse(text) for text in tries]))


if __name__ == "__main__":
    typer.run(main)
