"""How far log-probabilities of requests move because of what shares their passes; bf16 by default.

Sequences are decoded token by token along fixed texts, and the log-probability of each next token
is noted: alone, beside other prompts, and beside training (recorded forwards of as many rows as
those prompts have, backward slices, updates that do change the adapter). In exact arithmetic
nothing of it matters; in half precision a pass of another shape may round differently. So the
yardsticks are what other prompts do, and the rounding itself (against float32). `leak` is the
control: the same texts with the working adapter applied to them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import count
from typing import Annotated, Any

import torch
import typer

from tandem.config import (
    AdapterConfig,
    CacheConfig,
    LearningConfig,
    ModelConfig,
    SchedulingConfig,
)
from tandem.core.plan import (
    DEVICE_LANE,
    BackwardSlice,
    Draw,
    LanePlan,
    OpenMicroBatch,
    RecordTarget,
    Span,
    StepResult,
    Update,
    working_key,
)
from tandem.core.sampling import SamplingParams
from tandem.core.training import LoraSpec, OptimizerSpec, TrainerSpec
from tandem.executor.executor import DeviceExecutor
from tandem.model.load import LoadedModel, load_model
from tandem.model.names import DEMO_PATH

TRAINER = "t"
SEQUENCES = 8
PROMPT_TOKENS = 12
OUTPUT_TOKENS = 48
OTHERS = (40, 24)  # rows of what runs beside them in every second pass
BLOCK = 16
_TABLE = -(-(PROMPT_TOKENS + OUTPUT_TOKENS) // BLOCK)


class Beside(StrEnum):
    """What the sequences share their passes with."""

    NOTHING = "nothing"
    PROMPTS = "prompts"
    TRAINING = "training"
    LEAK = "leak"


@dataclass(frozen=True, slots=True)
class Drift:
    """Absolute differences of log-probabilities, in nats, over `positions` tokens."""

    mean: float
    largest: float
    positions: int

    @classmethod
    def between(cls, one: torch.Tensor, other: torch.Tensor) -> Drift:
        """Of two runs over the same tokens."""
        gaps = (one - other).abs()
        return cls(float(gaps.mean()), float(gaps.max()), gaps.numel())


def make_executor(model: LoadedModel) -> DeviceExecutor:
    """With room for the sequences and for what runs beside them."""
    rows = sum(OTHERS)
    blocks = 2 * SEQUENCES * _TABLE + 2 * len(OTHERS) * -(-max(OTHERS) // BLOCK)
    each = sum(2 * s.kv_heads * s.head_dim for s in model.layers) * BLOCK * model.dtype.itemsize
    return DeviceExecutor(
        model,
        CacheConfig(block_size=BLOCK, memory_bytes=blocks * each),
        SchedulingConfig(max_sequences=64),
        AdapterConfig(),
        LearningConfig(recording_tokens=2 * rows),
    )


def run(executor: DeviceExecutor, *spans: Span, **parts: Any) -> StepResult:
    """One plan; nothing of it may fail."""
    executor.submit(LanePlan(0, DEVICE_LANE, spans, **parts))
    (result,) = executor.poll()
    problems = [*result.failed, *(s.problem for s in result.slices if s.problem)]
    if problems:
        raise RuntimeError(str(problems))
    return result


def table_of(place: int) -> tuple[tuple[int, ...], ...]:
    """The blocks of the sequence at `place`."""
    return (tuple(range(place * _TABLE, (place + 1) * _TABLE)),)


def own_texts(executor: DeviceExecutor, vocabulary: int, seed: int = 0) -> list[tuple[int, ...]]:
    """Random beginnings and how the model itself goes on, greedily."""
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(3, vocabulary, (SEQUENCES, PROMPT_TOKENS), generator=generator)
    texts = [tuple(prompt) for prompt in prompts.tolist()]
    done = [0] * SEQUENCES
    greedy = SamplingParams(temperature=0.0)
    while len(texts[0]) < PROMPT_TOKENS + OUTPUT_TOKENS:
        spans = [
            Span(place, done[place], text[done[place] :], table_of(place),
                 draws=(Draw(place, 0, 0, greedy),))
            for place, text in enumerate(texts)
        ]  # fmt: skip
        done = [len(text) for text in texts]
        for draw in run(executor, *spans).draws:
            texts[draw.seq_id] += (draw.token,)
    return texts


def log_probs(
    executor: DeviceExecutor, texts: Sequence[tuple[int, ...]], beside: Beside
) -> torch.Tensor:
    """Log-probability of each output token, decoded one by one; float64 [texts, outputs].

    With `TRAINING`, a fresh trainer makes an update in every second pass; `LEAK` reads it.
    """
    if beside is Beside.TRAINING:
        optimizer = OptimizerSpec(learning_rate=1e-3)
        executor.open_trainer(TrainerSpec(TRAINER, LoraSpec(), optimizer))
    others = _others(executor, beside)
    for place, text in enumerate(texts):
        run(executor, Span(place, 0, text[: PROMPT_TOKENS - 1], table_of(place)))
    found = torch.zeros(len(texts), OUTPUT_TOKENS, dtype=torch.float64)
    adapter = working_key(TRAINER) if beside is Beside.LEAK else None
    for output in range(OUTPUT_TOKENS):
        at = PROMPT_TOKENS - 1 + output
        spans = [
            Span(place, at, (text[at],), table_of(place), adapter,
                 score_targets=(text[at + 1],), score_top=None)
            for place, text in enumerate(texts)
        ]  # fmt: skip
        parts = next(others)
        result = run(executor, *spans, *parts.pop("spans", ()), **parts)
        for score in result.scores:
            if score.seq_id < SEQUENCES:
                found[score.seq_id, output] = score.total
    return found


def _others(executor: DeviceExecutor, beside: Beside) -> Iterator[dict[str, Any]]:
    """The rest of each plan, without end."""
    vocabulary = executor.info.vocab_size
    generator = torch.Generator().manual_seed(7)
    first = SEQUENCES * _TABLE
    tables = [((*range(first + 4 * n, first + 4 * n + 4),),) for n in range(len(OTHERS))]
    for number in count(1):
        texts = [torch.randint(3, vocabulary, (n + 1,), generator=generator) for n in OTHERS]
        tokens = [tuple(text.tolist()) for text in texts]
        if beside in (Beside.NOTHING, Beside.LEAK):
            yield {}
        elif beside is Beside.PROMPTS:
            yield {
                "spans": [
                    Span(SEQUENCES + n, 0, text[:-1], table)
                    for n, (text, table) in enumerate(zip(tokens, tables, strict=True))
                ]
            }
            yield {}
        else:
            yield {
                "spans": [
                    Span(SEQUENCES + n, 0, text[:-1], table, working_key(TRAINER),
                         score_targets=text[1:], score_top=None, record=RecordTarget(number, n))
                    for n, (text, table) in enumerate(zip(tokens, tables, strict=True))
                ],
                "opens": (OpenMicroBatch(number, TRAINER, number - 1, OTHERS),),
            }  # fmt: skip
            slopes = (-1.0 / sum(OTHERS),) * len(OTHERS)
            yield {
                "slices": (BackwardSlice(number, executor.info.num_layers, 0, slopes),),
                "updates": (Update(TRAINER, number - 1),),
            }


def measure(model: LoadedModel, exact: LoadedModel, together: int) -> dict[str, Drift]:
    """Drifts by cause, of sequences of which `together` are decoded in one pass.

    `exact` is the same model in float32.
    """
    executor, reference = make_executor(model), make_executor(exact)
    texts = own_texts(executor, executor.info.vocab_size)

    def decoded(by: DeviceExecutor, beside: Beside) -> torch.Tensor:
        groups = [texts[at : at + together] for at in range(0, SEQUENCES, together)]
        return torch.cat([log_probs(by, group, beside) for group in groups])

    alone = decoded(executor, Beside.NOTHING)
    found = {"rounding": Drift.between(alone, decoded(reference, Beside.NOTHING))}
    for beside in (Beside.PROMPTS, Beside.TRAINING, Beside.LEAK):
        found[beside.value] = Drift.between(alone, decoded(executor, beside))
    return found


def main(
    model: Annotated[str, typer.Option(help="Model directory; empty: the demo model")] = "",
    dtype: Annotated[str, typer.Option(help="Of the model that drifts")] = "bfloat16",
    kernels: Annotated[str, typer.Option(help="auto, native or off")] = "auto",
) -> None:
    """Print mean and largest drift by cause, for sequences alone and eight together."""
    path = model or str(DEMO_PATH)
    inexact = load_model(ModelConfig(model=path, dtype=dtype, kernels=kernels))
    exact = load_model(ModelConfig(model=path, dtype="float32", kernels=kernels))
    print(f"{inexact.name}, {dtype}, kernels: {inexact.kernels}; nats over the tokens\n")
    print("| together | cause | mean | largest | tokens |\n|---|---|---|---|---|")
    for together in (1, SEQUENCES):
        for cause, drift in measure(inexact, exact, together).items():
            print(
                f"| {together} | {cause} | {drift.mean:.5f} | {drift.largest:.5f} | "
                f"{drift.positions} |"
            )


if __name__ == "__main__":
    typer.run(main)
