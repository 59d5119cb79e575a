"""The loss of a job's trainer on its validation file, between two steps.

Scores under the working parameters; no gradient, no update. Invariant: the numbers are the same
loss that the training steps minimise, as a mean over all validation examples.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

from tandem.core.learning import Sample
from tandem.core.ports import EngineClient
from tandem.core.training import LossKind, LossSpec, ScoreRequest, TrainingSequence
from tandem.services.learning.steps import StepMaker
from tandem.training.losses import micro_batch_loss, step_items

_MOST = 256


class Validation:
    """Validation examples of one job, at most 256 of them."""

    def __init__(
        self, client: EngineClient, maker: StepMaker, samples: Sequence[Sample], loss: LossSpec
    ) -> None:
        self.samples = [sample.sample_id for sample in samples[:_MOST]]
        self._client = client
        self._maker = maker
        self._loss = loss
        self._numbers = itertools.count(1)

    async def measure(self) -> dict[str, float]:
        """`valid_loss`, and `valid_accuracy` for pairs. Raises as `EngineClient.score` does."""
        prepared = await self._maker.prepare("validation", self.samples, self._loss, 0.0)
        batches = prepared.step.micro_batches
        items = step_items(self._loss, batches)
        total, wins = 0.0, 0
        for batch in batches:
            logprobs = await asyncio.gather(*(self._score(sequence) for sequence in batch))
            total += micro_batch_loss(self._loss, batch, logprobs, items).loss
            rewards = [p - s.reference for s, p in zip(batch, logprobs, strict=True)]
            wins += sum(rewards[at] > rewards[at + 1] for at in range(0, len(rewards) - 1, 2))
        found = {"valid_loss": total}
        if self._loss.kind is LossKind.DPO:
            found["valid_accuracy"] = wins / items
        return found

    async def _score(self, sequence: TrainingSequence) -> float:
        trainer = self._maker.shape.trainer
        request = ScoreRequest(
            f"validate-{trainer}-{next(self._numbers)}",
            sequence.tokens,
            sequence.prompt_tokens,
            trainer=trainer,
        )
        return (await self._client.score(request)).logprob
