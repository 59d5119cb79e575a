"""A sequence: one choice of one request while it is being generated.

The scheduler owns and changes it; policies and all other code only read it. Invariant: `0 <=
computed <= len(tokens)`. While a sequence decodes, only its last token may lack KV; a preemption
resets `computed`.
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
    """Why a sequence ended. `STOP` and `LENGTH` are OpenAI's; `ERROR` reaches the client as an
    error, and of `ABORT` no client is told."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(slots=True, eq=False)
class Scoring:
    """What a sequence needs that is scored instead of continued (work class learning)."""

    targets: tuple[int, ...]  # per row, the token whose log-probability is wanted (-1: none)
    # Use this trainer's working parameters. Its KV is then private: neither shared nor kept.
    trainer: str | None = None
    step_id: str | None = None  # step that it belongs to; None: a score on its own
    record: RecordTarget | None = None  # where its rows are recorded
    total: float = 0.0  # sum of the log-probabilities so far
    recorded: int = 0  # number of rows that are recorded already

    @property
    def private(self) -> bool:
        """Whether its KV is not shared with other sequences."""
        return self.trainer is not None


@dataclass(slots=True, eq=False)
class Sequence:
    """Mutable state of one choice. Times are seconds on the engine's clock.

    With `scoring`, `tokens` are the tokens to forward: all but the last of what is scored.
    """

    seq_id: int
    request: Request
    index: int  # of the choice in its request
    adapter: AdapterVersion | None
    tokens: list[int]  # prompt + output
    computed: int = 0  # number of first tokens that have KV in the cache
    status: SequenceStatus = SequenceStatus.WAITING
    # Leading tokens that are scored already. It begins at 1: the first has no log-probability. With
    # `scoring` it begins at the completion.
    scored: int = 1
    cached_tokens: int = 0  # found in the cache when it first ran
    preemptions: int = 0
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    stop_ids: frozenset[int] = field(default_factory=frozenset)
    scoring: Scoring | None = None
    # Whether its KV is of several adapter versions. What it adds is then not shared.
    mixed: bool = False
    redrawn: bool = False  # whether its last token was (`DrawResult`)
    # online before offline before learning, each by arrival; never changes
    order: tuple[int, float, int] = field(init=False)
    prompt_tokens: int = field(init=False)  # length of the prompt; never changes
    # whether draws depend on the tokens so far (penalties, a grammar); never changes
    needs_history: bool = field(init=False)

    def __post_init__(self) -> None:
        request = self.request
        offline = request.work_class is WorkClass.OFFLINE
        rank = 2 if self.scoring is not None else int(offline)
        self.order = (rank, request.arrival_s, self.seq_id)
        self.prompt_tokens = len(request.prompt)
        sampling = request.sampling
        self.needs_history = sampling.has_penalties or sampling.grammar is not None

    @property
    def output_tokens(self) -> int:
        """Number of tokens generated so far."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def remaining(self) -> int:
        """Tokens without KV: 1 while decoding, more while (re)computing a prefix."""
        return len(self.tokens) - self.computed

    @property
    def decoding(self) -> bool:
        """True if one forwarded token yields the next one."""
        computed = self.computed
        return len(self.tokens) - computed == 1 and computed > 0 and self.scoring is None
