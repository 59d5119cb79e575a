"""What the engine tells its clients about requests, adapters and itself."""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec import Struct

from tandem.core.plan import TokenLogprob
from tandem.core.sequence import FinishReason


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Seconds on the engine's clock, known when a choice ends (metrics are made from them)."""

    arrival_s: float
    first_scheduled_s: float | None
    first_token_s: float | None
    finished_s: float


# A struct, since one is made for every sequence in every iteration (docs/adr/0017). Nobody but the
# scheduler that makes one changes it.
class TokenEvent(Struct, gc=False):
    """New tokens of one choice; the last event of a choice has a `finish_reason`.

    `prompt_logprobs`, when asked for, come in order of position before the first token, in as many
    parts as the prompt had chunks; all of them belong to choice 0.
    `cached_tokens` counts prompt tokens whose KV was found in the cache. `stop_token` is the id
    that ended the choice when `finish_reason` is `stop` (it is also the last of `tokens`).
    `error` explains `FinishReason.ERROR`.
    """

    request_id: str
    index: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    adapter: str | None = None
    cached_tokens: int = 0
    times: RequestTimes | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the engine serves; constant during one incarnation.

    `eos_token_ids` end a choice unless `ignore_eos`. `num_blocks` of `block_size` tokens each
    bound the KV cache; `max_model_len` bounds prompt + output of one choice, in tokens. Backward
    slices count `num_layers`; `recording_tokens` rows may be recorded at once (0: no training).
    Adapters have a rank of at most `max_rank` (0: any); `linears` names the linear layers that can
    be trained. `weights_hash` identifies the base model's parameters. `threads` compute, where the
    device is a CPU. Of the parameters, `layer_parameters` are multiplied with every row, which
    embedding and head are not (0: not counted).
    """

    model: str
    architecture: str
    device: str
    dtype: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    block_size: int
    num_blocks: int
    num_parameters: int
    weight_bytes: int
    kernels: str
    num_layers: int = 0
    recording_tokens: int = 0
    max_rank: int = 0
    linears: tuple[str, ...] = ()
    weights_hash: str = ""
    threads: int = 0
    layer_parameters: int = 0


@dataclass(frozen=True, slots=True)
class PredictionError:
    """How far off predictions were lately: mean of (predicted - observed) / observed, mean of
    its absolute value, and what 95% of those were at most; nan before the first of `samples`."""

    bias: float
    mape: float
    p95: float
    samples: int


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since the engine started and gauges of now (names follow vLLM's meanings).

    `prediction_errors` are by kind: the time model's (forward, slice, update), and those of the KV
    blocks that online requests hold (online_blocks).
    """

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    kv_blocks_used: int = 0
    kv_blocks_cached: int = 0
    kv_blocks_total: int = 0
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
    check_failures: int = 0
    training_tokens: int = 0
    training_steps: int = 0
    training_waiting: int = 0
    memory_bytes: dict[str, int] = field(default_factory=dict)
    prediction_errors: dict[str, PredictionError] = field(default_factory=dict)
