"""What the engine tells its clients about requests, adapters and itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from msgspec import Struct

from tandem.core.plan import TokenLogprob
from tandem.core.sequence import FinishReason, Sequence


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Times of a choice in seconds on the engine's clock, known when it ends. Metrics use them."""

    arrival_s: float
    first_scheduled_s: float | None
    first_token_s: float | None
    finished_s: float

    @staticmethod
    def of(seq: Sequence, now: float) -> RequestTimes:
        """Those of a sequence that ends now."""
        return RequestTimes(seq.request.arrival_s, seq.first_scheduled_s, seq.first_token_s, now)


# A struct, since one is made for every sequence in every iteration (docs/adr/0017). Only the
# scheduler that makes one changes it.
class TokenEvent(Struct, gc=False, omit_defaults=True):
    """New tokens of one choice. The last event of a choice has a `finish_reason`."""

    request_id: str
    index: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    # In order of position, before the first token, one part per chunk of the prompt; of choice 0.
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    # the id that ended the choice, also the last of `tokens`, if the reason is `stop`
    stop_token: int | None = None
    adapter: str | None = None  # label of the version that wrote the tokens
    cached_tokens: int = 0  # prompt tokens whose KV was in the cache
    times: RequestTimes | None = None
    error: str | None = None  # explains `FinishReason.ERROR`
    state: bytes = b""  # the prompt's last hidden state as float16, with choice 0's first token


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the engine serves. Constant until the engine ends."""

    model: str
    architecture: str
    device: str
    dtype: str
    vocab_size: int
    max_model_len: int  # prompt + output of one choice, in tokens
    eos_token_ids: tuple[int, ...]  # end a choice unless `ignore_eos`
    block_size: int  # tokens per KV block
    num_blocks: int  # of the whole KV cache
    num_parameters: int
    weight_bytes: int
    kernels: str
    num_layers: int = 0  # layers that backward slices count
    recording_tokens: int = 0  # rows that may be recorded at once; 0: no training
    max_rank: int = 0  # of adapters; 0: any
    linears: tuple[str, ...] = ()  # names of the linear layers that can be trained
    weights_hash: str = ""  # identifies the base model's parameters
    threads: int = 0  # that compute, if the device is a CPU
    # multiplied with every row, unlike embedding and head; 0: not counted
    layer_parameters: int = 0


@dataclass(frozen=True, slots=True)
class PredictionError:
    """Recent relative errors, (predicted - observed) / observed, of predictions; nan without
    samples."""

    bias: float  # mean
    mape: float  # mean of the absolute value
    p95: float  # 95th percentile of the absolute value
    samples: int


class Work(StrEnum):
    """Kinds of work of an iteration. `FORWARD` are rows of learning, `HOST` is all beside the
    passes and the backward: deciding, collecting, applying."""

    DECODE = "decode"
    PREFILL = "prefill"
    OFFLINE = "offline"
    FORWARD = "forward"
    BACKWARD = "backward"
    HOST = "host"


class IterationRecord(Struct, gc=False, frozen=True, array_like=True):
    """What one iteration did. `start_s` is on the engine's clock; `decode` to `forward` are rows,
    of which those of offline requests count as `offline` alone."""

    number: int  # 1 for the first since the engine started
    start_s: float
    elapsed_s: float  # from its decision to its results being applied
    # In the forward passes: of it, but that a plan that follows may begin before its iteration.
    forward_s: float
    # In backward slices and updates; on a GPU, slices count with the iteration after theirs.
    backward_s: float
    decode: int
    prefill: int
    offline: int
    forward: int
    layers: int  # of backward slices
    updates: int


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since the engine started, and current gauges. Names follow vLLM's meanings."""

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    kv_blocks_used: int = 0
    kv_blocks_cached: int = 0
    kv_blocks_total: int = 0
    # By work class; a block that several share counts once, for the most urgent of them.
    kv_blocks_held: dict[str, int] = field(default_factory=dict)
    prefix_queries_tokens: int = 0
    prefix_hits_tokens: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    iterations: int = 0
    iteration_tokens_hist: dict[int, int] = field(default_factory=dict)
    iteration_tokens_sum: int = 0
    schedule_s: float = 0.0
    execute_s: float = 0.0
    work_s: dict[str, float] = field(default_factory=dict)  # by `Work`
    check_failures: int = 0
    training_tokens: int = 0
    training_steps: int = 0
    training_waiting: int = 0
    memory_bytes: dict[str, int] = field(default_factory=dict)
    # By kind: times (forward, slice, update) and KV blocks that online requests hold
    # (online_blocks).
    prediction_errors: dict[str, PredictionError] = field(default_factory=dict)
    # As many of the last ones as the caller asked for, oldest first, as far as they are kept.
    recent: tuple[IterationRecord, ...] = ()
