"""Learning as the engine knows it: trainers, steps of token sequences, and what became of them.

A trainer holds the working LoRA parameters of one adapter; a step is forward, backward and update
over some micro-batches. Token ids and numbers only: samples, feedback and text live in `services`.
Invariant: a step is bound to the trainer's revision (its number of updates) at which it began.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class LossKind(StrEnum):
    """Which loss a step minimises (`training/losses.py`)."""

    SFT = "sft"
    DPO = "dpo"
    KTO = "kto"


class Role(StrEnum):
    """What a sequence is in its loss.

    DPO takes pairs: a `CHOSEN` directly followed by its `REJECTED`. A `MISMATCHED` sequence joins a
    prompt with another's completion; it is scored for KTO's KL term and gets no gradient.
    """

    TARGET = "target"
    CHOSEN = "chosen"
    REJECTED = "rejected"
    DESIRABLE = "desirable"
    UNDESIRABLE = "undesirable"
    MISMATCHED = "mismatched"


class Schedule(StrEnum):
    """How the learning rate changes after the warm-up, as in transformers' schedulers."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"


@dataclass(frozen=True, slots=True)
class LoraSpec:
    """Shape of an adapter; dropout is 0. `targets` are names or suffixes of linear layers as in
    PEFT's `target_modules`; empty means all of them but the output head. `seed` starts A."""

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = ()
    seed: int = 0


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """AdamW with clipping by global norm (0: none) and a schedule.

    `total_steps` is needed by the decaying schedules only. Meanings and defaults as in torch and
    transformers, where not otherwise said.
    """

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    schedule: Schedule = Schedule.CONSTANT
    warmup_steps: int = 0
    total_steps: int = 0


@dataclass(frozen=True, slots=True)
class LossSpec:
    """Loss and its parameters, with TRL's meanings: `beta` and `label_smoothing` (DPO), `beta`,
    `desirable_weight` and `undesirable_weight` (KTO).

    `rpo_alpha` weighs a likelihood term beside DPO and KTO: the negative log-likelihood of the
    chosen (or desirable) answer, in nats a token (RPO: Pang et al., 2024, eq. 2; 0: none).
    """

    kind: LossKind
    beta: float = 0.1
    label_smoothing: float = 0.0
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    rpo_alpha: float = 0.0


@dataclass(frozen=True, slots=True)
class TrainerSpec:
    """A trainer to open under `name`.

    `source` is a PEFT directory to start from ("" for fresh parameters: A random, B zero); if it
    holds optimiser state as well, training goes on where that was saved. `resume` demands it.
    Warm-up and schedule count the updates of the adapter, or with `own_schedule` those since this
    trainer was first opened (a resumed one goes on counting).
    """

    name: str
    lora: LoraSpec = field(default_factory=LoraSpec)
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    source: str = ""
    resume: bool = False
    own_schedule: bool = False


@dataclass(frozen=True, slots=True)
class TrainerState:
    """A trainer that is open; `revision` counts its updates, from 0 for fresh ones."""

    name: str
    revision: int
    num_parameters: int


@dataclass(frozen=True, slots=True)
class TrainingSequence:
    """One sequence of a micro-batch: `tokens[prompt_tokens:]` is the completion.

    The loss reads the summed log-probability of the completion. `reference` is the same under the
    reference model (DPO, KTO); `weight` scales this sequence's (or pair's) share of the loss.
    """

    tokens: tuple[int, ...]
    prompt_tokens: int
    role: Role
    reference: float = 0.0
    weight: float = 1.0

    @property
    def rows(self) -> int:
        """Rows of its forward: the last token is scored only."""
        return len(self.tokens) - 1

    @property
    def completion_tokens(self) -> int:
        """Number of tokens that are scored."""
        return len(self.tokens) - self.prompt_tokens


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """Forward, backward and one update of `trainer`.

    The loss is the mean over all items of the step: completion tokens (SFT), pairs (DPO), labelled
    completions (KTO). KTO's KL term is estimated within each micro-batch, as TRL does.
    `urgency` is what MACE's priority adds for it (the last known loss of its samples; log 2 for DPO
    samples that were never scored). Steps of one trainer run in the order of their arrival.
    `scale` multiplies the learning rate of its update: an optimiser that normalises gradients
    ignores a factor that all samples of a step share, so a weight must act here.
    """

    step_id: str
    trainer: str
    loss: LossSpec
    micro_batches: tuple[tuple[TrainingSequence, ...], ...]
    urgency: float = 0.6931471805599453
    scale: float = 1.0

    @property
    def num_tokens(self) -> int:
        """Rows that are forwarded: the last token of a sequence predicts nothing."""
        return sum(sequence.rows for batch in self.micro_batches for sequence in batch)


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """How a step ended.

    `logprobs[m][s]` is the summed log-probability of sequence s of micro-batch m before the
    update. `revision` is the trainer's after it. `applied` is False when the update was left out
    because the loss or the gradients were not finite (`problem` says so); then nothing changed.
    Times are seconds on the engine's clock.
    """

    step_id: str
    trainer: str
    revision: int
    applied: bool
    loss: float
    grad_norm: float
    learning_rate: float
    logprobs: tuple[tuple[float, ...], ...]
    arrival_s: float
    started_s: float
    finished_s: float
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """Ask for the summed log-probability of `tokens[prompt_tokens:]` given what comes before.

    Under the current version of `adapter`, under the working parameters of `trainer`, or (neither)
    under the base model.
    """

    request_id: str
    tokens: tuple[int, ...]
    prompt_tokens: int
    adapter: str | None = None
    trainer: str | None = None
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class Score:
    """Answer to a `ScoreRequest`: the sum, over `tokens` tokens, in natural logarithms.

    `logprob` is not a number if the model's output is not finite.
    `adapter` is the label of the version that was used.
    """

    request_id: str
    logprob: float
    tokens: int
    adapter: str | None = None
