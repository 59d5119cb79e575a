"""What is kept of learning from users: receipts, feedback, samples, versions, jobs, files.

Plain records, as the store keeps them and services pass them around. Times are seconds since the
epoch (these outlive processes). Nested values are JSON-like. Knows no database and no tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

Messages = tuple[dict[str, str], ...]
"""A conversation: `role` and `content` of each turn, as the chat API has them."""


class Ending(StrEnum):
    """What ended an answer: the model's own end token, a stop text or another stop token of the
    client's, or the limit of tokens."""

    MODEL = "model"
    STOP_TEXT = "stop_text"
    STOP_TOKEN = "stop_token"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class AnswerTokens:
    """An answer in the token ids that were generated.

    The model's end token is among them; a client's stop token and what a stop text hid are not.
    """

    ids: tuple[int, ...]
    ending: Ending


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """The prompts of a completion in the token ids that were served, in order.

    `tokenizer` identifies the tokenizer whose ids they are.
    """

    tokenizer: str
    ids: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class ServedTokens:
    """What of a sample was served, in token ids; an answer that a person wrote is None."""

    tokenizer: str
    prompt: tuple[int, ...]
    chosen: AnswerTokens | None = None
    rejected: AnswerTokens | None = None


@dataclass(frozen=True, slots=True)
class ReceiptChoice:
    """One answer of a completion; `prompt` is its own where the request had several.

    Receipts that an older Tandem kept have no `tokens`.
    """

    index: int
    text: str
    finish_reason: str
    prompt: str = ""
    tokens: AnswerTokens | None = None


@dataclass(frozen=True, slots=True)
class Receipt:
    """A completion that feedback may refer to by its id.

    A chat has `messages`, a plain completion a `prompt`. `adapter` is the name that was asked for
    (None: the base or a checkpoint, which do not learn), also while the base answers for it;
    `version` is the label of what wrote the answer (`base`, `formal@3`). `tenant` is who asked,
    `user` the client's own word for a person. The choices of each of `prompt_tokens` have indexes
    that follow one another; receipts that an older Tandem kept have none.
    """

    completion_id: str
    created_s: float
    tenant: str
    adapter: str | None
    version: str
    messages: Messages
    prompt: str
    choices: tuple[ReceiptChoice, ...]
    sampling: dict[str, Any] = field(default_factory=dict)
    user: str = ""
    prompt_tokens: PromptTokens | None = None

    def prompt_of(self, choice: ReceiptChoice) -> tuple[int, ...]:
        """Token ids in front of a choice; there are `prompt_tokens`."""
        assert self.prompt_tokens is not None
        prompts = self.prompt_tokens.ids
        return prompts[choice.index * len(prompts) // len(self.choices)]


class FeedbackKind(StrEnum):
    """What a user said."""

    RATING = "rating"
    PREFERENCE = "preference"
    DEMONSTRATION = "demonstration"
    COMMENT = "comment"


@dataclass(frozen=True, slots=True)
class Feedback:
    """One signal, as it was acknowledged.

    `adapter` learns from it. `rating` is in [0, 1]. `chosen` and `rejected` are answers to
    `messages` (or `prompt`); a demonstration has `chosen`, and `rejected` where the original answer
    is known. `signal` is `explicit` or the implicit one that it was mapped from. `conversation`
    groups what must not be split between training and held-out samples. `user` is the client's own
    word for a person, `key_id` the API key's tenant. `superseded_by` is the id of later feedback
    that took its place.
    """

    feedback_id: str
    created_s: float
    adapter: str
    kind: FeedbackKind
    messages: Messages = ()
    prompt: str = ""
    chosen: str = ""
    rejected: str = ""
    rating: float | None = None
    comment: str = ""
    weight: float = 1.0
    signal: str = "explicit"
    conversation: str = ""
    user: str = ""
    key_id: str = ""
    completion_id: str = ""
    version: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)
    superseded_by: str | None = None


class SampleKind(StrEnum):
    """Which loss a sample is for."""

    SFT = "sft"
    DPO = "dpo"
    KTO = "kto"


class SampleState(StrEnum):
    """`ACCEPTED -> ASSIGNED -> CONSUMED | REFUSED`; unusable ones go to `INVALID` at once.

    `CONSUMED` names the version that used it first; `REFUSED` the candidate that the gate refused
    or the version that was rolled back by itself (`CONSUMED` after all if that is published by
    request).
    An assignment that was interrupted goes back to `ACCEPTED`.
    """

    ACCEPTED = "accepted"
    ASSIGNED = "assigned"
    CONSUMED = "consumed"
    REFUSED = "refused"
    INVALID = "invalid"


class Split(StrEnum):
    """Held-out samples are never trained on; the split follows the conversation."""

    TRAIN = "train"
    HELD_OUT = "held_out"


@dataclass(frozen=True, slots=True)
class Sample:
    """What a step can train on, derived from one feedback.

    DPO: `chosen` and `rejected`. KTO: `chosen` is the completion and `desirable` its label. SFT:
    `chosen`. `loss` is the last one seen, `uses` how often it was trained on (replay included),
    `version` the number of the version that consumed or the candidate that refused it. What was
    `served` is trained on in those token ids, everything else is tokenised from its text.
    """

    sample_id: str
    feedback_id: str
    adapter: str
    kind: SampleKind
    created_s: float
    messages: Messages
    prompt: str
    chosen: str
    rejected: str = ""
    desirable: bool = True
    weight: float = 1.0
    split: Split = Split.TRAIN
    conversation: str = ""
    user: str = ""
    key_id: str = ""
    state: SampleState = SampleState.ACCEPTED
    version: int | None = None
    uses: int = 0
    loss: float | None = None
    problem: str = ""
    served: ServedTokens | None = None


class GateMode(StrEnum):
    """Who decides whether a candidate is published."""

    AUTO = "auto"
    MANUAL = "manual"
    ALWAYS = "always"


@dataclass(frozen=True, slots=True)
class AdapterRecord:
    """An adapter that learns or was imported; `current` is its serving version (0: none yet).

    `settings` are its own learning settings (LoRA shape, learning rate, reference, gate ...).
    `next_number` is never given twice, not even after a refusal or a roll back.
    """

    name: str
    created_s: float
    current: int = 0
    next_number: int = 1
    settings: dict[str, Any] = field(default_factory=dict)


class VersionState(StrEnum):
    """`CANDIDATE -> PUBLISHED | REFUSED`; manual mode leaves it `CANDIDATE` until somebody says."""

    CANDIDATE = "candidate"
    PUBLISHED = "published"
    REFUSED = "refused"


IMPORTED = "import"
"""The origin of a version that was trained elsewhere: it has learned nothing from its parent."""


@dataclass(frozen=True, slots=True)
class VersionRecord:
    """One version of an adapter. `parent` is the version that it was trained from or, of an import,
    that it took the place of (0: base).

    `origin` says what made it: `feedback`, a job id, or `IMPORTED`. `path` is the PEFT directory,
    which exists for as long as the row does. `tainted` marks training on feedback that was erased.
    `watched` says that the gate alone has published it, so that it may be rolled back by itself.
    """

    adapter: str
    number: int
    content_hash: str
    path: str
    created_s: float
    state: VersionState
    parent: int = 0
    origin: str = "feedback"
    metrics: dict[str, Any] = field(default_factory=dict)
    reason: str = ""
    tainted: bool = False
    watched: bool = False


@dataclass(frozen=True, slots=True)
class EventRecord:
    """A line in the history of a `subject` (an adapter name or a job id), in order of `number`."""

    subject: str
    created_s: float
    level: str
    message: str
    data: dict[str, Any] = field(default_factory=dict)
    number: int = 0


@dataclass(frozen=True, slots=True)
class FileRecord:
    """An uploaded or produced file; its bytes lie at `path`, until `expires_s` if that is set."""

    file_id: str
    created_s: float
    filename: str
    purpose: str
    num_bytes: int
    path: str
    tenant: str = ""
    status: str = "processed"
    expires_s: float | None = None


class JobStatus(StrEnum):
    """OpenAI's statuses of a fine-tuning job."""

    VALIDATING = "validating_files"
    QUEUED = "queued"
    RUNNING = "running"
    PAUSED = "paused"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class JobRecord:
    """A fine-tuning job. `step` of `total_steps` updates are committed, at `checkpoint_path` (empty
    once it has ended and its adapter was deleted).

    `start_version` is the version of its adapter that it began from (0: none yet, None: it has not
    begun). `method` is OpenAI's object (`{"type": "dpo", "dpo": {"hyperparameters": ...}}`).
    """

    job_id: str
    created_s: float
    tenant: str
    model: str
    adapter: str
    status: JobStatus
    method: dict[str, Any]
    training_file: str
    validation_file: str = ""
    result_files: tuple[str, ...] = ()
    suffix: str = ""
    seed: int = 0
    step: int = 0
    total_steps: int = 0
    trained_tokens: int = 0
    checkpoint_path: str = ""
    start_version: int | None = None
    finished_s: float | None = None
    error: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CheckpointRecord:
    """A saved state of a job, usable as an adapter."""

    checkpoint_id: str
    job_id: str
    created_s: float
    step: int
    path: str
    content_hash: str
    metrics: dict[str, Any] = field(default_factory=dict)
