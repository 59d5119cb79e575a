"""The prompts' last hidden states: what the model itself knows when prefill is done.

The same checkpoint in transformers, one prompt a pass. Knows no lengths. Invariant: a prompt's
state is computed once, and kept in float16 beside the answers, not in git.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModel

from benchmarks.lengths.collect import Ask
from benchmarks.lengths.prompts import Prompt
from tandem.model.names import locate
from tandem.services.answering.tokenizer import Tokenizer

States = dict[str, NDArray[np.float16]]


def path_of(ask: Ask) -> Path:
    """The file of a model's states."""
    return ask.path.with_name(f"hidden-{Path(ask.model).stem}.npz")


def states(ask: Ask) -> States:
    """By key; empty without a file."""
    if not path_of(ask).exists():
        return {}
    with np.load(path_of(ask)) as kept:
        return dict(zip(kept["keys"].tolist(), kept["states"], strict=True))


def add_states(wanted: Sequence[Prompt], ask: Ask, seconds: float) -> int:
    """Compute those that are missing, until `seconds` have passed; how many there are now."""
    known, begun_s = states(ask), time.monotonic()
    folder = str(locate(ask.model, lambda stage, done: None))
    tokenizer = Tokenizer.load(folder)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32)
    for prompt in wanted:
        if time.monotonic() - begun_s > seconds:
            break
        if prompt.key in known:
            continue
        tokens = tokenizer.encode_chat(list(prompt.messages))
        with torch.inference_mode():
            last = model(torch.tensor([tokens])).last_hidden_state[0, -1]
        known[prompt.key] = last.numpy().astype(np.float16)
    partial = path_of(ask).with_suffix(".partial.npz")
    np.savez(partial, keys=np.array(list(known)), states=np.array(list(known.values())))
    partial.rename(path_of(ask))
    return len(known)
