"""What a run measures, and how much of it; a test makes all of it small."""

from __future__ import annotations

from dataclasses import dataclass

# In their order: what may upset the device comes last.
PARTS = ("decode", "iterations", "prefill", "coserving", "adapters", "replays", "peers")
# For a look inside; not run unless named.
FURTHER = ("kernels",)
MODELS = ("llama-8b", "qwen2.5-0.5b")


@dataclass(frozen=True)
class Options:
    """Ceilings are always measured. `seconds` of each window of `coserving`; lengths in tokens."""

    parts: tuple[str, ...] = PARTS
    models: tuple[str, ...] = MODELS
    device: str = "cuda"
    dtype: str = "bfloat16"
    budget_s: float = 200.0
    seconds: float = 20.0
    seed: int = 0
    # Ceilings.
    stream_bytes: int = 4 << 30
    matrix: int = 8192
    # Single passes: each is repeated `rounds` times after `warm_up` others.
    batches: tuple[int, ...] = (1, 8, 32, 64)
    context_tokens: int = 512
    prefill_tokens: tuple[int, ...] = (1024, 4096)
    adapter_rows: int = 32
    rounds: int = 30
    warm_up: int = 6
    # Through the loop, ours and the peer's.
    output_tokens: int = 64
    peer_batches: tuple[int, ...] = (1, 32)
    # Serving and training.
    rate: float = 5.0  # requests a second
    prompt_tokens: int = 512
    answer_tokens: int = 128
    sequence_tokens: int = 512  # of each of a training step's sequences
    ttft_slo: float = 1.0
    # Objectives, over serving alone. The policy aims below them: at about 1.3 with the second.
    tpot_factors: tuple[float, ...] = (1.3, 1.44, 2.3)
    # Of the engines.
    kv_tokens: int = 65536
    max_batch_tokens: int = 4096
    graph_bytes: int = 8 << 30  # one training step of the 8B shape
