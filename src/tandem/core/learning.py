"""Records of learning from users: receipts, feedback, samples, versions, jobs, files.

Plain data that the store keeps and services pass around. Times are seconds since the epoch, since
records outlive processes. Nested values are JSON-like. Knows no database and no tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

Messages = tuple[dict[str, Any], ...]
"""A conversation as chat templates take it: `role` and `content` (a text) of each turn, and what it
has of `name`, `tool_calls`, `tool_call_id` and `reasoning_content`."""


class Ending(StrEnum):
    """What ended an answer: the model's own end token, the client's stop text or another of its
    stop tokens, or the token limit."""

    MODEL = "model"
    STOP_TEXT = "stop_text"
    STOP_TOKEN = "stop_token"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class AnswerTokens:
    """An answer in the token ids that were generated.

    It includes the model's end token. It excludes a client's stop token and tokens hidden by a stop
    text.
    """

    ids: tuple[int, ...]
    ending: Ending


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """The prompts of a completion in the token ids that were served, in order.

    `tokenizer` identifies the tokenizer of these ids.
    """

    tokenizer: str
    ids: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class ServedTokens:
    """The part of a sample that was served, in token ids. An answer that a person wrote is None."""

    tokenizer: str
    prompt: tuple[int, ...]
    chosen: AnswerTokens | None = None
    rejected: AnswerTokens | None = None


@dataclass(frozen=True, slots=True)
class ReceiptChoice:
    """One answer of a completion. `prompt` is its own if the request had several prompts.

    `shown` is what came to the client as content, if that is not all of `text`: reasoning and tool
    calls are apart. Receipts kept by an older Tandem have neither `shown` nor `tokens`.
    """

    index: int
    text: str
    finish_reason: str
    prompt: str = ""
    tokens: AnswerTokens | None = None
    shown: str = ""

    @property
    def content(self) -> str:
        """What its reader takes for the answer; all of it, if nothing of it is content."""
        return self.shown if self.shown.strip() else self.text


@dataclass(frozen=True, slots=True)
class Receipt:
    """A completion that feedback may refer to by its id."""

    completion_id: str
    created_s: float
    tenant: str  # who sent the request
    # Name in the request, even if the base answered. None: base or checkpoint, which do not learn.
    adapter: str | None
    version: str  # label of what wrote the answer (`base`, `formal@3`)
    messages: Messages  # of a chat
    prompt: str  # of a plain completion
    choices: tuple[ReceiptChoice, ...]
    sampling: dict[str, Any] = field(default_factory=dict)
    user: str = ""  # the client's identifier of a person
    # None in receipts of an older Tandem. The choices of each prompt have consecutive indexes.
    prompt_tokens: PromptTokens | None = None

    def prompt_of(self, choice: ReceiptChoice) -> tuple[int, ...]:
        """Token ids before a choice. Requires `prompt_tokens`."""
        assert self.prompt_tokens is not None
        prompts = self.prompt_tokens.ids
        return prompts[choice.index * len(prompts) // len(self.choices)]


class FeedbackKind(StrEnum):
    """Form of a user's feedback."""

    RATING = "rating"
    PREFERENCE = "preference"
    DEMONSTRATION = "demonstration"
    COMMENT = "comment"


@dataclass(frozen=True, slots=True)
class Feedback:
    """One feedback, as it was acknowledged.

    `chosen` and `rejected` are answers to `messages` (or `prompt`). A demonstration has `chosen`,
    and `rejected` if the original answer is known.
    """

    feedback_id: str
    created_s: float
    adapter: str  # learns from it
    kind: FeedbackKind
    messages: Messages = ()
    prompt: str = ""
    chosen: str = ""
    rejected: str = ""
    rating: float | None = None  # in [0, 1]
    comment: str = ""
    weight: float = 1.0
    signal: str = "explicit"  # `explicit`, or the implicit signal that it was mapped from
    conversation: str = ""  # a group that training and held-out samples must not share
    user: str = ""  # the client's identifier of a person
    key_id: str = ""  # tenant of the API key
    completion_id: str = ""
    version: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)
    superseded_by: str | None = None  # id of later feedback that replaced it


class SampleKind(StrEnum):
    """Which loss a sample is for."""

    SFT = "sft"
    DPO = "dpo"
    KTO = "kto"


class SampleState(StrEnum):
    """`ACCEPTED -> ASSIGNED -> CONSUMED | REFUSED`; what cannot be trained on becomes `INVALID`.

    A `CONSUMED` sample names the version that used it first, or that knew it already. A `REFUSED`
    one names the last candidate that the gate refused, or the version that was rolled back
    automatically; it becomes `CONSUMED` if that is published by request. After an interruption, and
    after a refusal that leaves tries, `ASSIGNED` becomes `ACCEPTED` again.
    """

    ACCEPTED = "accepted"
    ASSIGNED = "assigned"
    CONSUMED = "consumed"
    REFUSED = "refused"
    INVALID = "invalid"


class Split(StrEnum):
    """Held-out samples are never trained on. All samples of a conversation have the same split."""

    TRAIN = "train"
    HELD_OUT = "held_out"


@dataclass(frozen=True, slots=True)
class Sample:
    """What a step can train on, derived from one feedback."""

    sample_id: str
    feedback_id: str
    adapter: str
    kind: SampleKind
    created_s: float
    messages: Messages
    prompt: str
    chosen: str  # DPO, SFT: the preferred answer; KTO: the completion
    rejected: str = ""  # DPO
    desirable: bool = True  # KTO: label of the completion
    weight: float = 1.0
    split: Split = Split.TRAIN
    conversation: str = ""
    user: str = ""
    key_id: str = ""
    state: SampleState = SampleState.ACCEPTED
    # number of the version that consumed it or of the candidate that was refused
    version: int | None = None
    uses: int = 0  # how often it was trained on, replay included
    loss: float | None = None  # last known
    problem: str = ""
    served: ServedTokens | None = None  # trained on in these token ids; other text is tokenised


class GateMode(StrEnum):
    """Who decides whether a candidate is published."""

    AUTO = "auto"
    MANUAL = "manual"
    ALWAYS = "always"


@dataclass(frozen=True, slots=True)
class AdapterRecord:
    """An adapter that learns or was imported."""

    name: str
    created_s: float
    current: int = 0  # number of the serving version; 0: none yet
    next_number: int = 1  # never given twice, not even after a refusal or a roll back
    # of its own: LoRA shape, learning rate, reference, gate ...
    settings: dict[str, Any] = field(default_factory=dict)


class VersionState(StrEnum):
    """`CANDIDATE -> PUBLISHED | REFUSED`. In manual mode it stays `CANDIDATE` until decided."""

    CANDIDATE = "candidate"
    PUBLISHED = "published"
    REFUSED = "refused"


FEEDBACK = "feedback"
"""Origin of a version that was trained on feedback."""

IMPORTED = "import"
"""Origin of a version that was trained elsewhere: it learned nothing from its parent."""


@dataclass(frozen=True, slots=True)
class VersionRecord:
    """One version of an adapter."""

    adapter: str
    number: int
    content_hash: str
    path: str  # PEFT directory; exists as long as this row
    created_s: float
    state: VersionState
    # Version that it was trained from or, for an import, that it replaced; 0: base.
    parent: int = 0
    origin: str = FEEDBACK  # or a job id, or `IMPORTED`
    metrics: dict[str, Any] = field(default_factory=dict)
    reason: str = ""
    tainted: bool = False  # trained on feedback that was erased
    watched: bool = False  # published by the gate alone, so it may be rolled back automatically


@dataclass(frozen=True, slots=True)
class EventRecord:
    """A line in the history of a `subject` (an adapter name or a job id), ordered by `number`."""

    subject: str
    created_s: float
    level: str
    message: str
    data: dict[str, Any] = field(default_factory=dict)
    number: int = 0


@dataclass(frozen=True, slots=True)
class FileRecord:
    """An uploaded or produced file. Its bytes are at `path` until `expires_s`, if that is set."""

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
    """A fine-tuning job."""

    job_id: str
    created_s: float
    tenant: str
    model: str
    adapter: str
    status: JobStatus
    method: dict[str, Any]  # OpenAI's object (`{"type": "dpo", "dpo": {"hyperparameters": ...}}`)
    training_file: str
    validation_file: str = ""
    result_files: tuple[str, ...] = ()
    suffix: str = ""
    seed: int = 0
    step: int = 0  # number of committed updates
    total_steps: int = 0
    trained_tokens: int = 0
    # of these updates; empty once it has ended and its adapter was deleted
    checkpoint_path: str = ""
    # Version of its adapter that it began from; 0: none yet, None: it has not begun.
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
