"""The loss of a job's trainer on its validation file, between two steps.

Scores under the working parameters; no gradient, no update. Invariant: the numbers are the same
loss that the training steps minimise, as a mean over all validation examples, or there are none.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from tandem.core.learning import Sample, SampleKind
from tandem.core.ports import TeachingEngine
from tandem.core.training import LossSpec, Role, ScoreRequest, TrainingSequence
from tandem.services.jobs.data import line_of
from tandem.services.learning.families import FAMILIES
from tandem.services.learning.references import NotFinite
from tandem.services.learning.steps import PreparedStep, StepMaker
from tandem.services.tasks import together
from tandem.training.losses import micro_batch_loss, step_items

_MOST = 256
OF_VALIDATION = "valid-"
"""Begins the ids of validation samples: those of the training file have the same lines."""


class Validation:
    """Validation examples of one job, at most 256 of them."""

    def __init__(
        self, client: TeachingEngine, maker: StepMaker, samples: Sequence[Sample], loss: LossSpec
    ) -> None:
        self.samples = [sample.sample_id for sample in samples[:_MOST]]
        self._client = client
        self._maker = maker
        self._loss = loss
        self._numbers = itertools.count(1)

    async def measure(self) -> dict[str, float]:
        """`valid_loss`, and `valid_accuracy` for pairs.

        Raises `NotFinite`, which names a line, and as `TeachingEngine.score` does.
        """
        prepared = await self._prepared()
        batches = prepared.step.micro_batches
        items = step_items(self._loss, batches)
        total, wins = 0.0, 0
        for ids, batch in zip(prepared.sample_ids, batches, strict=True):
            logprobs = await together(self._score(sequence) for sequence in batch)
            for at, logprob in enumerate(logprobs):
                if not math.isfinite(logprob):
                    raise _not_finite(ids[_sample_of(batch, at)], "the model")
            total += micro_batch_loss(self._loss, batch, logprobs, items).loss
            rewards = [p - s.reference for s, p in zip(batch, logprobs, strict=True)]
            wins += sum(rewards[at] > rewards[at + 1] for at in range(0, len(rewards) - 1, 2))
        if not math.isfinite(total):
            raise NotFinite("the loss on the validation file is not a finite number")
        found = {"valid_loss": total}
        if FAMILIES[SampleKind(self._loss.kind.value)].paired:
            found["valid_accuracy"] = wins / items
        return found

    async def _prepared(self) -> PreparedStep:
        try:
            return await self._maker.prepare("validation", self.samples, self._loss, 0.0)
        except NotFinite:
            for sample_id in self.samples:
                try:
                    await self._maker.prepare("validation", [sample_id], self._loss, 0.0)
                except NotFinite:
                    raise _not_finite(sample_id, "the reference model") from None
            raise

    async def _score(self, sequence: TrainingSequence) -> float:
        trainer = self._maker.shape.trainer
        request = ScoreRequest(
            f"validate-{trainer}-{next(self._numbers)}",
            sequence.tokens,
            sequence.prompt_tokens,
            trainer=trainer,
        )
        return (await self._client.score(request)).logprob


def _sample_of(batch: Sequence[TrainingSequence], at: int) -> int:
    """Which sample a sequence is of: pairs lie side by side, a mismatched one has the prompt."""
    sequence = batch[at]
    if sequence.role in (Role.CHOSEN, Role.REJECTED):
        return at // 2
    if sequence.role is Role.MISMATCHED:
        prompts = [each.tokens[: each.prompt_tokens] for each in batch]
        return prompts.index(prompts[at])
    return at


def _not_finite(sample_id: str, who: str) -> NotFinite:
    line = line_of(sample_id.removeprefix(OF_VALIDATION))
    return NotFinite(
        f"line {line} of the validation file: {who} gives an answer no finite log-probability"
    )
