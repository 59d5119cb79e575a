"""Plans go down to compute, results come back. Both are plain, serialisable data.

A plan is complete: replaying the same plans on the same weights gives the same KV and tokens. There
are no phases: a span is a range of tokens of one sequence, whether prompt, decode or score.
Positions and block numbers are absolute.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from msgspec import Struct

from tandem.core.sampling import SamplingParams

DEVICE_LANE = "device"
UNDRAWN = -1
"""In place of a token: the one that the plan before draws for the sequence (`LanePlan.follows`)."""
NO_MEMORY = "the engine is short of memory now; send the request again"
"""Reason of a failure that may not recur later, or in another process."""


def working_key(trainer: str) -> str:
    """The value of `Span.adapter` for the working parameters of a trainer. Never a content hash."""
    return f"working/{trainer}"


@dataclass(frozen=True, slots=True)
class RecordTarget:
    """Where a recorded span belongs: sequence `sequence` of an open micro-batch."""

    micro_batch: int
    sequence: int


# Draw, Span and DrawResult are structs: each is made for every sequence in every iteration, and a
# dataclass takes two to three times as long to construct (docs/adr/0017). They are never changed.
class Draw(Struct, gc=False):
    """One token to sample from the last row of a span, for sequence `seq_id`."""

    seq_id: int
    index: int  # of the choice in its request
    position: int  # number of output tokens before it; with the seed it fixes the random number
    sampling: SamplingParams
    prompt_tokens: int = 0
    history: tuple[int, ...] = ()  # the sequence's tokens so far, if the draw depends on them
    banned: tuple[int, ...] = ()  # tokens that must not be drawn
    state: bool = False  # the result brings the row that is drawn from; of a span's first draw


class Span(Struct, gc=False):
    """Tokens `[start, start + len(tokens))` of one sequence, forwarded in this iteration."""

    seq_id: int
    start: int
    tokens: tuple[int, ...]
    block_tables: tuple[tuple[int, ...], ...]  # per KV group, the blocks of positions `[0, end)`
    adapter: str | None = None  # content hash of the LoRA weights, or `working_key`; None: base
    # Sampled from the last row; several when `n > 1` choices start from one prompt.
    draws: tuple[Draw, ...] = ()
    # Tokens whose log-probability under the row of the same index is returned (-1: none), or empty.
    # The last row of the last chunk may lack its entry.
    score_targets: tuple[int, ...] = ()
    score_top: int | None = 0  # number of alternatives to return; None: the sum alone
    # Keep what the backward pass of these rows needs. `adapter` is then a `working_key`.
    record: RecordTarget | None = None

    @property
    def end(self) -> int:
        """Position after the last token: the context length its last row attends over."""
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy-on-write: before the forward, block `source` of `group` is copied to `target`."""

    group: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Discard:
    """Drop recordings of `trainer` and the gradients it has accumulated since its update.

    Numbers that are not open are ignored.
    """

    trainer: str
    micro_batches: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OpenMicroBatch:
    """Reserve a recording: `lengths[s]` rows of sequence s, at this revision of `trainer`.

    `micro_batch` is a number that the engine never uses twice. A micro-batch that is recorded and
    differentiated in parts is several micro-batches for the executor.
    """

    micro_batch: int
    trainer: str
    revision: int
    lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BackwardSlice:
    """Layers `[hi, lo)` of a recorded micro-batch, from the top: `hi > lo`.

    The first slice of a micro-batch has `hi` = number of layers and begins with the final norm.
    `coefficients[s]` is d(loss)/d(summed log-probability of sequence s), the same in all slices of
    one micro-batch. After `lo` = 0 the recording is dropped and its gradients are accumulated.
    """

    micro_batch: int
    hi: int
    lo: int
    coefficients: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Update:
    """Optimiser step of `trainer` with the accumulated gradients. Raises its revision by one.

    It comes in a later plan than the last slice, since that slice must have succeeded. `scale`
    multiplies the learning rate.
    """

    trainer: str
    revision: int
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class LanePlan:
    """Work of one lane (a place where work runs) in one iteration.

    The order is: `discards`, `opens`, `copies`, `spans` in one forward pass, `slices`, `updates`.

    A plan that `follows` may be submitted before the results of the plan before it are polled. Its
    tokens are all `UNDRAWN`, and the plan before draws each of them.

    A `preemptible` plan draws nothing. It ends between two layers once something urgent
    has come. Layers of slices that are done stay done; a pass that did not end counts for nothing.
    """

    step: int
    lane: str
    spans: tuple[Span, ...]
    copies: tuple[BlockCopy, ...] = ()
    discards: tuple[Discard, ...] = ()
    opens: tuple[OpenMicroBatch, ...] = ()
    slices: tuple[BackwardSlice, ...] = ()
    updates: tuple[Update, ...] = ()
    share: float = 1.0  # part of the device (cores, multiprocessors), above 0 and at most 1
    preemptible: bool = False
    follows: bool = False

    @property
    def num_tokens(self) -> int:
        """Rows of the flattened forward pass."""
        return sum([len(span.tokens) for span in self.spans])


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Everything one iteration does, per lane."""

    step: int
    lanes: tuple[LanePlan, ...]

    @property
    def num_tokens(self) -> int:
        """Rows over all lanes."""
        return sum([lane.num_tokens for lane in self.lanes])


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of `token` and of the most likely alternatives, best first.

    Natural logarithms of the model's distribution before temperature, filters and penalties, as
    OpenAI and vLLM report them. `rank` is 1 for the most likely token.
    """

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class DrawResult(Struct, gc=False):
    """The token drawn for one `Draw`. `logprob` is set only if it was requested, and so is `state`,
    the hidden state before the head as float16. A token that is `redrawn` was chosen after the
    pass: a plan that follows has read another one."""

    seq_id: int
    token: int
    logprob: TokenLogprob | None = None
    state: bytes = b""
    redrawn: bool = False


@dataclass(frozen=True, slots=True)
class ScoreResult:
    """Scores of a span's `score_targets`, in order. The first belongs to position `start + 1`.

    `total` is their sum. With `score_top` of None only the sum is set.
    """

    seq_id: int
    start: int
    logprobs: tuple[TokenLogprob, ...]
    total: float = 0.0


@dataclass(frozen=True, slots=True)
class SliceResult:
    """A backward slice was computed in `elapsed_s` seconds, or failed with `problem`.

    nan seconds: the device still computes it, before all later plans. `StepResult.timed` of one of
    them has its time.
    """

    micro_batch: int
    hi: int
    lo: int
    elapsed_s: float
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """An update was made, or was skipped (`applied` is False, and nothing changed)."""

    trainer: str
    revision: int  # the trainer's afterwards
    applied: bool
    grad_norm: float  # global norm before clipping
    learning_rate: float
    elapsed_s: float
    problem: str | None = None  # why it was skipped


@dataclass(frozen=True, slots=True)
class KeptLayers:
    """Which recorded activations of a micro-batch's forward are kept for its backward.

    An estimate, not a promise: they may be dropped for memory.
    """

    micro_batch: int
    whole: float  # share of the layers that need no recomputation
    inner: float  # share that needs the smaller part of it; other layers need all


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one `LanePlan` produced.

    A preempted plan has a result for what it did: fewer layers, no update.
    """

    step: int
    lane: str
    elapsed_s: float  # of the whole iteration, but for slices that are still computed
    draws: tuple[DrawResult, ...] = ()  # in the order of the plan's spans and their draws
    scores: tuple[ScoreResult, ...] = ()
    # Sequences that could not be computed, each with the reason, for example logits that are not
    # finite. The other sequences are valid.
    failed: tuple[tuple[int, str], ...] = ()
    forward_s: float = 0.0  # the part of `elapsed_s` that the forward pass took
    slices: tuple[SliceResult, ...] = ()
    updates: tuple[UpdateResult, ...] = ()
    kept: tuple[KeptLayers, ...] = ()  # of the micro-batches that the pass recorded
    stopped: bool = False  # the pass was preempted: its spans are as if they had not been planned
    timed: tuple[SliceResult, ...] = ()  # slices of earlier plans whose times are known only now

    @property
    def backward_s(self) -> float:
        """Seconds of slices and updates, as far as they are known."""
        pieces: tuple[SliceResult | UpdateResult, ...] = (*self.slices, *self.timed, *self.updates)
        return sum([each.elapsed_s for each in pieces if not math.isnan(each.elapsed_s)])


def lost(lane: LanePlan, reason: str) -> StepResult:
    """The result of a lane that could not be computed: everything in it has failed."""
    everyone = {
        seq_id: reason
        for span in lane.spans
        for seq_id in (span.seq_id, *(draw.seq_id for draw in span.draws))
    }
    slices = tuple(
        SliceResult(piece.micro_batch, piece.hi, piece.lo, 0.0, reason) for piece in lane.slices
    )
    updates = tuple(
        UpdateResult(update.trainer, update.revision, False, math.nan, math.nan, 0.0, reason)
        for update in lane.updates
    )
    return StepResult(
        lane.step, lane.lane, 0.0, failed=tuple(everyone.items()), slices=slices, updates=updates
    )
