"""Plans go down to compute, results come back; both are plain, serialisable data.

A plan is complete: replaying the same plans on the same weights gives the same KV and tokens.
No phases: a span is a range of tokens of one sequence, whether prompt, decode or score.
Positions and block numbers are absolute.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from msgspec import Struct

from tandem.core.sampling import SamplingParams

DEVICE_LANE = "device"
NO_MEMORY = "the engine is short of memory now; send the request again"
"""Why something of a plan failed that may succeed another time, or in another process."""


def working_key(trainer: str) -> str:
    """What `Span.adapter` says for the working parameters of a trainer; never a content hash."""
    return f"working/{trainer}"


@dataclass(frozen=True, slots=True)
class RecordTarget:
    """Where a recorded span belongs: sequence `sequence` of an open micro-batch."""

    micro_batch: int
    sequence: int


# Draw, Span and DrawResult are structs: each is made for every sequence in every iteration, and a
# dataclass takes two to three times as long to construct (docs/adr/0017). Nobody changes one.
class Draw(Struct, gc=False):
    """One token to sample from the last row of a span, for sequence `seq_id`.

    `position` counts the output tokens before it (0 for the first); with `seed` it fixes the
    random number. `history` is the sequence's tokens so far, needed only with penalties.
    """

    seq_id: int
    index: int
    position: int
    sampling: SamplingParams
    prompt_tokens: int = 0
    history: tuple[int, ...] = ()
    banned: tuple[int, ...] = ()


class Span(Struct, gc=False):
    """Tokens `[start, start + len(tokens))` of one sequence, forwarded in this iteration.

    `block_tables[g]` lists the blocks of KV group `g` that cover positions `0 .. start+n-1`.
    `adapter` is the content hash of the LoRA weights to apply (`None`: base). `draws` are sampled
    from the last row; more than one when `n > 1` choices start from one prompt. `score_targets`,
    when not empty, has one entry a row, except that the last row of the last chunk may lack it:
    the log-probability of `score_targets[i]` under row `i` is returned, with `score_top`
    alternatives (None: their sum alone). Targets of -1 are not scored. With `record`, what a later
    backward needs of these rows is kept; `adapter` is then a trainer's working parameters
    (`working_key`).
    """

    seq_id: int
    start: int
    tokens: tuple[int, ...]
    block_tables: tuple[tuple[int, ...], ...]
    adapter: str | None = None
    draws: tuple[Draw, ...] = ()
    score_targets: tuple[int, ...] = ()
    score_top: int | None = 0
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
    """Give up recordings of `trainer` and the gradients it has accumulated since its update.

    Numbers that are not open (any more) are ignored.
    """

    trainer: str
    micro_batches: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OpenMicroBatch:
    """Room for a recording: `lengths[s]` rows of sequence s, at this revision of `trainer`.

    `micro_batch` is a number that the engine never uses twice. To an executor a part of a
    micro-batch that is recorded and differentiated by itself is a micro-batch.
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
    one micro-batch. After `lo` = 0 the recording is let go and its gradients are accumulated.
    """

    micro_batch: int
    hi: int
    lo: int
    coefficients: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Update:
    """Optimiser step of `trainer`, whose revision it raises by one, with what was accumulated.

    It comes in a later plan than the last slice, whose success must be known. `scale` multiplies
    the learning rate.
    """

    trainer: str
    revision: int
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class LanePlan:
    """Work of one lane (a place where work runs) in one iteration.

    Done in this order: `discards` (recordings and accumulated gradients that are given up),
    `opens`, `copies`, `spans` in one forward pass, `slices`, `updates`. `share` is the part of the
    device (cores, multiprocessors) that they may use, above 0 and at most 1.

    With `gives_way` (then nothing is drawn) it ends between two layers once something urgent has
    come. Layers of slices that are done stay done; a pass that was not ended counts for nothing.
    """

    step: int
    lane: str
    spans: tuple[Span, ...]
    copies: tuple[BlockCopy, ...] = ()
    discards: tuple[Discard, ...] = ()
    opens: tuple[OpenMicroBatch, ...] = ()
    slices: tuple[BackwardSlice, ...] = ()
    updates: tuple[Update, ...] = ()
    share: float = 1.0
    gives_way: bool = False

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
    """The token drawn for one `Draw`; `logprob` only when it was asked for."""

    seq_id: int
    token: int
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class ScoreResult:
    """Scores of a span's `score_targets`, in order; the first belongs to position `start + 1`.

    `total` is their sum. With `score_top` of None only the sum is given.
    """

    seq_id: int
    start: int
    logprobs: tuple[TokenLogprob, ...]
    total: float = 0.0


@dataclass(frozen=True, slots=True)
class SliceResult:
    """A backward slice was computed, in `elapsed_s`; `problem` says why not, if so."""

    micro_batch: int
    hi: int
    lo: int
    elapsed_s: float
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """An update was made, or left out (`applied` False, `problem` says why): nothing changed then.

    `revision` is the trainer's afterwards, `grad_norm` the global norm before clipping.
    """

    trainer: str
    revision: int
    applied: bool
    grad_norm: float
    learning_rate: float
    elapsed_s: float
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class KeptLayers:
    """What is kept of a micro-batch's forward for its backward, as shares of its layers.

    Of `whole` ones nothing has to be computed again, of `inner` ones the lesser part, of the others
    all. An estimate, not a promise: it may be dropped for memory.
    """

    micro_batch: int
    whole: float
    inner: float


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one `LanePlan` produced.

    `elapsed_s` is the whole iteration's, `forward_s` the forward pass's share of it. `kept` is of
    the micro-batches that the pass recorded.

    A plan that gave way has a result for what it did: fewer layers, no update; `stopped` says that
    its pass did not end, so that its spans are as if they had not been planned.

    `draws` follow the order of the plan's spans and their draws. `failed` maps a sequence to the
    reason why it alone could not be computed (e.g. non-finite logits); the others are valid.
    """

    step: int
    lane: str
    elapsed_s: float
    draws: tuple[DrawResult, ...] = ()
    scores: tuple[ScoreResult, ...] = ()
    failed: tuple[tuple[int, str], ...] = ()
    forward_s: float = 0.0
    slices: tuple[SliceResult, ...] = ()
    updates: tuple[UpdateResult, ...] = ()
    kept: tuple[KeptLayers, ...] = ()
    stopped: bool = False

    @property
    def lacks_memory(self) -> bool:
        """Whether something of the plan failed with `NO_MEMORY`."""
        if not (self.failed or self.slices or self.updates):
            return False
        reasons: list[str | None] = [reason for _, reason in self.failed]
        reasons += [piece.problem for piece in self.slices]
        reasons += [update.problem for update in self.updates]
        return NO_MEMORY in reasons


def lost(lane: LanePlan, reason: str) -> StepResult:
    """What is reported of a lane that could not be computed: all of it has failed."""
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
