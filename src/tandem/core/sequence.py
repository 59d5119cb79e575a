"""A sequence: one choice of one request while it is being generated.

The scheduler owns and changes it; policies and everyone else only read. Invariant:
`0 <= computed <= len(tokens)`, and only the last token may still lack KV once decoding began.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from tandem.core.plan import RecordTarget
from tandem.core.request import Request
from tandem.core.slo import WorkClass
from tandem.core.version import AdapterVersion


class SequenceStatus(StrEnum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(StrEnum):
    """Why a sequence ended. `ERROR` reaches the client as an error, the others as OpenAI's."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(slots=True, eq=False)
class Scoring:
    """What a sequence brings along that is scored and not continued (work class learning).

    `targets[row]` is the token whose log-probability is wanted under that row (-1: none); `total`
    is their sum so far. With `trainer`, its working parameters are used and the KV is private:
    never shared, gone at the end. `record` says where the rows are recorded, the first `recorded`
    of them already are. `step_id` names the step that it belongs to (None: a score alone).
    """

    targets: tuple[int, ...]
    trainer: str | None = None
    step_id: str | None = None
    record: RecordTarget | None = None
    total: float = 0.0
    recorded: int = 0

    @property
    def private(self) -> bool:
        """Whether nobody else may read its KV, nor it anybody's."""
        return self.trainer is not None


@dataclass(slots=True, eq=False)
class Sequence:
    """Mutable state of one choice.

    `tokens` is prompt + output; the first `computed` of them have KV in the cache. `scored`
    prompt tokens have their log-probability (the first has none by definition). `cached_tokens`
    were found in the cache when it first ran. Times are seconds on the engine's clock.

    With `scoring`, `tokens` are those to forward: all but the last of what is scored; of the
    whole, the first `scored` need no log-probability any more. `order` sorts online before offline
    before learning and each by arrival; it never changes, nor do `prompt_tokens`, the length of the
    prompt, and `needs_history`: whether draws depend on the tokens so far. `mixed` says that its KV
    is of several adapter versions, so that nobody else may read what it adds.
    """

    seq_id: int
    request: Request
    index: int
    adapter: AdapterVersion | None
    tokens: list[int]
    computed: int = 0
    status: SequenceStatus = SequenceStatus.WAITING
    finish_reason: FinishReason | None = None
    scored: int = 1
    cached_tokens: int = 0
    preemptions: int = 0
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    stop_ids: frozenset[int] = field(default_factory=frozenset)
    scoring: Scoring | None = None
    mixed: bool = False
    order: tuple[int, float, int] = field(init=False)
    prompt_tokens: int = field(init=False)
    needs_history: bool = field(init=False)

    def __post_init__(self) -> None:
        request = self.request
        offline = request.work_class is WorkClass.OFFLINE
        rank = 2 if self.scoring is not None else int(offline)
        self.order = (rank, request.arrival_s, self.seq_id)
        self.prompt_tokens = len(request.prompt)
        self.needs_history = request.sampling.has_penalties

    @property
    def output_tokens(self) -> int:
        """Number of tokens generated so far."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def remaining(self) -> int:
        """Tokens still without KV: 1 while decoding, more while (re)computing a prefix."""
        return len(self.tokens) - self.computed

    @property
    def decoding(self) -> bool:
        """True if one forwarded token yields the next one."""
        computed = self.computed
        return len(self.tokens) - computed == 1 and computed > 0 and self.scoring is None
