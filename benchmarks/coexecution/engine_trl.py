"""TRL's DPO trainer on the same model and adapter, one random pair a step or eight real ones.

With `precompute`, the reference log-probabilities are computed once at load, the faster of its two
ways; else in every step, as it comes. TRL takes text: the models' tokenizer makes one token
of each ASCII character.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import version
from itertools import cycle, repeat
from random import Random
from tempfile import mkdtemp
from typing import Any

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import DPOConfig, DPOTrainer

from benchmarks.coexecution.engine_peft import LEARNING_RATE, lora_config, run_on
from benchmarks.coexecution.pairs import MICRO_PAIRS, STEP_PAIRS, Pair, read, whole_steps
from benchmarks.coexecution.workload import Steps, Training

# Pairs are used again and again: what they say does not change the speed.
PAIRS = 2
FOREVER = 1_000_000
LETTERS = "abcdefghijklmnopqrstuvwxyz"
END = "|"


class _Clock(TrainerCallback):
    """Notes steps and ends the training when the job's time is up."""

    def __init__(self) -> None:
        self.steps: Steps | None = None
        self.training: Training | None = None
        self.tokens: Iterator[int] = repeat(0)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        assert self.training is not None
        self.steps = self.steps or Steps(self.training)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        assert self.steps is not None
        self.steps.note(next(self.tokens))
        control.should_training_stop = not self.steps.due


class TrlDpo:
    """A trainer; each job is a training run of its own."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        base = AutoModelForCausalLM.from_pretrained(
            model, dtype=options["dtype"], attn_implementation="sdpa"
        )
        tokenizer = AutoTokenizer.from_pretrained(model)
        pairs = read(options["pairs"]) if options["pairs"] else []
        if not pairs:
            tokenizer.eos_token = tokenizer.pad_token = END
        config = DPOConfig(
            output_dir=mkdtemp(prefix="trl-"),
            per_device_train_batch_size=MICRO_PAIRS if pairs else 1,
            gradient_accumulation_steps=STEP_PAIRS // MICRO_PAIRS if pairs else 1,
            train_sampling_strategy="sequential",
            max_steps=FOREVER,
            max_length=None,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            max_grad_norm=1.0,
            precompute_ref_log_probs=options["precompute"],
            bf16=False,
            gradient_checkpointing=False,
            use_cpu=True,
            save_strategy="no",
            report_to="none",
            logging_strategy="no",
            disable_tqdm=True,
        )
        self._clock = _Clock()
        self._step_tokens = [sum(pair.tokens for pair in step) for step in whole_steps(pairs)]
        self._trainer = DPOTrainer(
            base,
            args=config,
            train_dataset=_dataset(pairs) if pairs else _pairs(options["tokens"]),
            processing_class=tokenizer,
            peft_config=lora_config(),
            callbacks=[self._clock],
        )

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        """Train as long as the job says."""
        training = Training(**job["train"])
        run_on(list(training.cores))
        self._clock.training, self._clock.steps = training, None
        self._clock.tokens = cycle(self._step_tokens or [0])
        self._trainer.train()
        assert self._clock.steps is not None
        return {"train": self._clock.steps.answer()}


def _dataset(pairs: list[Pair]) -> Dataset:
    """Texts, which TRL tokenises; the order stays."""
    names = ("prompt", "chosen", "rejected")
    return Dataset.from_list([{name: asdict(pair)[name] for name in names} for pair in pairs])


def _pairs(tokens: int) -> Dataset:
    """Random pairs: half of the tokens are the prompt; TRL adds the one that ends a completion."""
    rng = Random(0)
    text = lambda length: "".join(rng.choices(LETTERS, k=length))  # noqa: E731
    names = {"prompt": tokens // 2, "chosen": tokens // 2 - 1, "rejected": tokens // 2 - 1}
    return Dataset.from_list(
        [{name: text(length) for name, length in names.items()} for _ in range(PAIRS)]
    )


def start(model: str, options: dict[str, Any]) -> TrlDpo:
    """Load `model` and prepare the pairs."""
    return TrlDpo(model, options)


def versions() -> dict[str, str]:
    """Versions of what decides the speed."""
    return {name: version(name) for name in ("torch", "transformers", "peft", "trl")}
