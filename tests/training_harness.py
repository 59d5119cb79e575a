"""Drives an executor through training steps by hand-made plans, in random pieces.

Also computes what plain autograd gives through PEFT's own model of the same parameters.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

import tiny_models
from tandem.config import AdapterConfig, CacheConfig, LearningConfig, ModelConfig, SchedulingConfig
from tandem.core.plan import (
    DEVICE_LANE,
    BackwardSlice,
    LanePlan,
    OpenMicroBatch,
    RecordTarget,
    Span,
    StepResult,
    Update,
    UpdateResult,
    working_key,
)
from tandem.core.ports import Urgent, never
from tandem.core.training import LoraSpec, LossSpec, OptimizerSpec, TrainerSpec, TrainingSequence
from tandem.executor.executor import DeviceExecutor
from tandem.model.load import prepare_model
from tandem.training.losses import micro_batch_loss, step_items

BLOCK = 4
NUM_BLOCKS = 256
WIDE = {
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 160,
}


def make_executor(
    model, mode: str = "off", recording_tokens: int = 512, graph_bytes: int = 1 << 24, **learning
) -> DeviceExecutor:
    loaded = prepare_model(model, ModelConfig(model="tiny", kernels=mode))
    size = loaded.dtype.itemsize
    each = sum(2 * s.kv_heads * s.head_dim for s in loaded.layers) * BLOCK * size
    return DeviceExecutor(
        loaded,
        CacheConfig(block_size=BLOCK, memory_bytes=NUM_BLOCKS * each),
        SchedulingConfig(max_sequences=64),
        AdapterConfig(),
        LearningConfig(recording_tokens=recording_tokens, graph_bytes=graph_bytes, **learning),
    )


def gentle(name, dtype=torch.float32):
    """`make_model` with smaller matrices (standard deviation 0.16): sharper ones amplify the
    rounding of float32 alone past the tolerances, in PEFT's own pass as much as in ours."""
    model = tiny_models.make_model(name)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.mul_(0.4)
    return model.to(dtype)


def wide(name, dtype):
    """A llama or qwen3 whose widths the AMX kernels take."""
    torch.manual_seed(0)
    kinds = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}
    config, model = kinds[name]
    made = model(config(**WIDE)).bfloat16()
    with torch.no_grad():
        for weight in made.parameters():
            if weight.ndim > 1:
                weight.mul_(5.0)
    return made.to(dtype).eval()


@dataclass
class Work:
    """One sequence that is being recorded: its span so far and its sum."""

    target: RecordTarget
    sequence: TrainingSequence
    seq_id: int
    table: tuple[int, ...]
    done: int = 0
    total: float = 0.0

    def span(self, trainer: str, count: int) -> Span:
        tokens, prompt = self.sequence.tokens, self.sequence.prompt_tokens
        rows = range(self.done, min(self.done + count, len(tokens) - 1))
        return Span(
            self.seq_id,
            self.done,
            tuple(tokens[row] for row in rows),
            (self.table,),
            adapter=working_key(trainer),
            score_targets=tuple(tokens[row + 1] if row + 1 >= prompt else -1 for row in rows),
            score_top=None,
            record=self.target,
        )


@dataclass
class Driver:
    """Runs plans; `rng` of None runs everything in one piece. Blocks are never shared.

    With `haste`, plans give way, to something urgent that comes before a layer with that
    probability; `stops` counts the passes that were lost.
    """

    executor: DeviceExecutor
    rng: random.Random | None = None
    pool: list[int] = field(default_factory=lambda: list(range(NUM_BLOCKS)))
    numbers: int = 0
    haste: float = 0.0
    stops: int = 0

    def run(self, *spans: Span, **parts) -> StepResult:
        urgent = self._urgent() if self.haste else never
        plan = LanePlan(0, DEVICE_LANE, spans, preemptible=bool(self.haste), **parts)
        self.executor.submit(plan, urgent)
        (result,) = self.executor.poll()
        if result.stopped:
            assert not (result.scores or result.draws or result.slices or result.kept)
            self.stops += 1
            return self.run(*spans, **(parts | {"opens": (), "discards": ()}))
        assert result.failed == (), result.failed
        assert [s.problem for s in result.slices if s.problem] == []
        return result

    def record(self, trainer: str, revision: int, sequences: Sequence[TrainingSequence]):
        """Open a micro-batch and forward it; returns its number and the summed log-probs."""
        self.numbers += 1
        number = self.numbers
        lengths = tuple(len(s.tokens) - 1 for s in sequences)
        work = [
            Work(RecordTarget(number, place), sequence, 1000 + place, self._take(length))
            for place, (sequence, length) in enumerate(zip(sequences, lengths, strict=True))
        ]
        opens = (OpenMicroBatch(number, trainer, revision, lengths),)
        while pending := [w for w in work if w.done < lengths[w.target.sequence]]:
            chosen, counts = pending, [10**6] * len(pending)
            if self.rng is not None:
                chosen = self.rng.sample(pending, self.rng.randint(1, len(pending)))
                counts = [self.rng.choice([1, 3, 7, 10**6]) for _ in chosen]
            spans = [w.span(trainer, n) for w, n in zip(chosen, counts, strict=True)]
            result = self.run(*spans, *self.neighbours(), opens=opens)
            opens = ()
            scores = {score.seq_id: score for score in result.scores}
            for w, span in zip(chosen, spans, strict=True):
                w.done = span.end
                if w.seq_id in scores:
                    w.total += scores[w.seq_id].total
        for w in work:
            self.pool.extend(w.table)
        return number, [w.total for w in work]

    def backward(self, number: int, coefficients: Sequence[float]) -> None:
        at = self.executor.info.num_layers
        while at:
            lo = 0 if self.rng is None else self.rng.randrange(at)
            part = BackwardSlice(number, at, lo, tuple(coefficients))
            for done in self.run(*self.neighbours(), slices=(part,)).slices:
                assert done.hi == at and lo <= done.lo < at
                at = done.lo
            self.between()

    def step(self, trainer: str, revision: int, loss: LossSpec, micro_batches) -> float:
        """Everything but the update; returns the loss."""
        items, total = step_items(loss, micro_batches), 0.0
        for sequences in micro_batches:
            number, logprobs = self.record(trainer, revision, sequences)
            found = micro_batch_loss(loss, sequences, logprobs, items)
            total += found.loss
            self.backward(number, found.coefficients)
        return total

    def update(self, trainer: str, revision: int) -> UpdateResult:
        (result,) = self.run(updates=(Update(trainer, revision),)).updates
        return result

    def _urgent(self) -> Urgent:
        """Something comes once, and stays until it is served."""
        assert self.rng is not None
        rng, come = self.rng, False

        def urgent() -> bool:
            nonlocal come
            come = come or rng.random() < self.haste
            return come

        return urgent

    def neighbours(self) -> list[Span]:
        """Spans of others in the same pass; none here."""
        return []

    def between(self) -> None:
        """Called between two slices."""

    def _take(self, length: int) -> tuple[int, ...]:
        count = -(-length // BLOCK)
        taken, self.pool = self.pool[:count], self.pool[count:]
        return tuple(taken)


def random_sequences(rng: random.Random, count: int, roles) -> list[TrainingSequence]:
    found = []
    for place in range(count):
        length = rng.randint(4, 26)
        tokens = tuple(rng.randrange(3, tiny_models.VOCAB) for _ in range(length))
        prompt = rng.randint(1, length - 2)
        found.append(TrainingSequence(tokens, prompt, roles[place % len(roles)], -20.0))
    return found


def open_trainer(executor, name="t", *, rank=4, seed=0, spread=0.05, targets=(), **optimizer):
    """A trainer both of whose halves are random, so that every gradient is non-zero."""
    spec = TrainerSpec(
        name,
        LoraSpec(rank=rank, alpha=2.0 * rank, targets=tuple(targets), seed=seed),
        OptimizerSpec(**optimizer),
    )
    state = executor.open_trainer(spec)
    trainer = executor.training._trainers[name]
    generator = torch.Generator().manual_seed(seed + 1)
    for _, b in trainer.layout.pairs(trainer._parameters).values():
        b.copy_(spread * torch.randn(b.shape, generator=generator))
    executor.training._refresh(trainer)
    return state


def peft_model(base, executor, name="t"):
    """PEFT's model of `base` with the working parameters of a trainer, in `base`'s dtype."""
    from peft import LoraConfig, get_peft_model

    snapshot = executor.snapshot_trainer(name)
    lora = snapshot.spec.lora
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=list(snapshot.targets),
        task_type="CAUSAL_LM",
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = get_peft_model(base, config, autocast_adapter_dtype=False)
    named = snapshot.layout.named(snapshot.parameters)
    with torch.no_grad():
        for key, parameter in adapted.named_parameters():
            if "lora_" in key:
                parameter.copy_(named[key.replace(".default", "")])
    return adapted.eval()


def peft_gradients(adapted) -> dict[str, torch.Tensor]:
    return {
        key.replace(".default", ""): parameter.grad.double()
        for key, parameter in adapted.named_parameters()
        if parameter.grad is not None
    }


def sequence_logprob(adapted, sequence: TrainingSequence) -> torch.Tensor:
    tokens = torch.tensor([sequence.tokens])
    logits = adapted(input_ids=tokens[:, :-1], use_cache=False).logits[0]
    rows = logits.double().log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
    return rows[sequence.prompt_tokens - 1 :].sum()


def peft_step(adapted, loss: LossSpec, micro_batches) -> float:
    """Plain autograd through PEFT's model; gradients are left in its parameters."""
    items, total = step_items(loss, micro_batches), 0.0
    for sequences in micro_batches:
        logprobs = [sequence_logprob(adapted, s) for s in sequences]
        found = micro_batch_loss(loss, sequences, [float(x.detach()) for x in logprobs], items)
        total += found.loss
        sum(c * x for c, x in zip(found.coefficients, logprobs, strict=True)).backward()
    return total


def our_gradients(executor, name="t") -> dict[str, torch.Tensor]:
    trainer = executor.training._trainers[name]
    return {k: v.double().cpu() for k, v in trainer.layout.named(trainer._gradient).items()}


def worst_error(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Largest relative error over the tensors, by norms."""
    assert found.keys() == expected.keys()
    return max(
        float((found[key] - want).norm() / want.norm().clamp(min=1e-30))
        for key, want in expected.items()
    )
