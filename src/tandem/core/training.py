"""Learning as the engine knows it: trainers, steps of token sequences, and their outcomes.

A trainer has the working LoRA parameters of one adapter. A step is forward, backward and update
over some micro-batches. Knows token ids and numbers only; samples, feedback and text are in
`services`. Invariant: a step is bound to the revision (number of updates) of its trainer at which
it began.
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

    DPO takes pairs: a `CHOSEN` directly followed by its `REJECTED`. A `MISMATCHED` sequence has the
    prompt of one sample and the completion of another. It is scored for KTO's KL term and gets no
    gradient.
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
    """Shape of an adapter. Dropout is 0. `targets` are names or suffixes of linear layers, as in
    PEFT's `target_modules`; empty means all but the output head. `seed` initialises A."""

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = ()
    seed: int = 0


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """AdamW with clipping and a schedule. Meanings and defaults as in torch and transformers."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0  # global norm; 0: no clipping
    schedule: Schedule = Schedule.CONSTANT
    warmup_steps: int = 0
    total_steps: int = 0  # needed by the decaying schedules only


@dataclass(frozen=True, slots=True)
class LossSpec:
    """A loss and its parameters, with TRL's meanings."""

    kind: LossKind
    beta: float = 0.1  # DPO and KTO
    label_smoothing: float = 0.0  # DPO
    desirable_weight: float = 1.0  # KTO
    undesirable_weight: float = 1.0  # KTO
    # Weight of a likelihood term beside DPO and KTO: the negative log-likelihood of the chosen (or
    # desirable) answer, in nats per token (RPO: Pang et al., 2024, eq. 2; 0: none).
    rpo_alpha: float = 0.0


@dataclass(frozen=True, slots=True)
class TrainerSpec:
    """A trainer to open."""

    name: str
    lora: LoraSpec = field(default_factory=LoraSpec)
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    # PEFT directory to start from, with its optimiser state if it has one. Empty: A random, B zero.
    source: str = ""
    resume: bool = False  # `source` must have optimiser state
    # Warm-up and schedule count the updates since this trainer was first opened (resuming continues
    # the count), instead of all updates of the adapter.
    own_schedule: bool = False


@dataclass(frozen=True, slots=True)
class TrainerState:
    """An open trainer. `revision` counts its updates, from 0 for fresh parameters."""

    name: str
    revision: int
    num_parameters: int


@dataclass(frozen=True, slots=True)
class TrainingSequence:
    """One sequence of a micro-batch: `tokens[prompt_tokens:]` is the completion.

    The loss reads the summed log-probability of the completion. `reference` is the same sum under
    the reference model; SFT's loss has none. `weight` scales the share of this sequence (or pair)
    in the loss.
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
    completions (KTO). KTO's KL term is estimated within each micro-batch, as in TRL. Steps of one
    trainer run in the order of their arrival.
    """

    step_id: str
    trainer: str
    loss: LossSpec
    micro_batches: tuple[tuple[TrainingSequence, ...], ...]
    # Term of MACE's priority: last known loss of its samples; log 2 for DPO samples without one.
    urgency: float = 0.6931471805599453
    # Multiplies the learning rate. An optimiser that normalises gradients ignores a factor that all
    # samples of a step share, so a weight has to act here.
    scale: float = 1.0

    @property
    def num_tokens(self) -> int:
        """Rows that are forwarded: the last token of a sequence predicts nothing."""
        return sum(sequence.rows for batch in self.micro_batches for sequence in batch)


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """How a step ended. Times are seconds on the engine's clock."""

    step_id: str
    trainer: str
    revision: int  # the trainer's after the step
    applied: bool  # False: loss or gradients were not finite, and nothing changed
    loss: float
    grad_norm: float
    learning_rate: float
    # `[m][s]`: summed log-probability of sequence s of micro-batch m before the update
    logprobs: tuple[tuple[float, ...], ...]
    arrival_s: float
    started_s: float
    finished_s: float
    problem: str | None = None  # why the update was skipped


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """Ask for the summed log-probability of `tokens[prompt_tokens:]`, given the tokens before.

    It is computed under the current version of `adapter`, under the working parameters of
    `trainer`, or, with neither, under the base model.
    """

    request_id: str
    tokens: tuple[int, ...]
    prompt_tokens: int
    adapter: str | None = None
    trainer: str | None = None
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class Score:
    """Answer to a `ScoreRequest`."""

    request_id: str
    logprob: float  # sum in natural logarithms; nan if the model's output is not finite
    tokens: int  # number of tokens in the sum
    adapter: str | None = None  # label of the version that was used
