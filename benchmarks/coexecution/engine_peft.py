"""The plain PEFT loop: LoRA on all linear layers, causal language modelling, AdamW, clipping.

What a user writes with transformers and PEFT as they come: adapters in float32 over a bfloat16
base, `sdpa` attention, no checkpointing.
"""

from __future__ import annotations

import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from benchmarks.coexecution.workload import Steps, Training

RANK = 16
ALPHA = 32
LEARNING_RATE = 1e-4


def lora_config() -> LoraConfig:
    """The adapter of all systems."""
    return LoraConfig(
        r=RANK,
        lora_alpha=ALPHA,
        lora_dropout=0.0,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )


def run_on(cores: list[int]) -> None:
    """Restrict all threads of this process to `cores`, with as many compute threads."""
    for thread in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(thread.name), cores)
    torch.set_num_threads(len(cores))


class PeftLoop:
    """A model with an adapter and its optimiser."""

    def __init__(self, model: str, dtype: str) -> None:
        base = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, attn_implementation="sdpa")
        self._model = get_peft_model(base, lora_config()).train()
        self._parameters = [each for each in self._model.parameters() if each.requires_grad]
        self._optimizer = torch.optim.AdamW(self._parameters, lr=LEARNING_RATE, weight_decay=0.0)

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        """Train as long as the job says."""
        training = Training(**job["train"])
        run_on(list(training.cores))
        batches = training.batches()
        steps = Steps(training)
        while steps.due:
            tokens = torch.tensor(next(batches))
            self._model(input_ids=tokens, labels=tokens).loss.backward()
            torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
            self._optimizer.step()
            self._optimizer.zero_grad()
            steps.note()
        return {"train": steps.answer()}


def start(model: str, options: dict[str, Any]) -> PeftLoop:
    """Load `model`; the job says on which cores it runs."""
    return PeftLoop(model, options["dtype"])


def versions() -> dict[str, str]:
    """Versions of what decides the speed."""
    return {name: version(name) for name in ("torch", "transformers", "peft")}
