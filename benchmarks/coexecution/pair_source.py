"""Makes the file of preference pairs for one model, from the shared data.

Knows the model's tokenizer. Invariant: a pair whose text another tokenisation would read
differently is left out, so that both trainers see the same tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from benchmarks.coexecution.pairs import write
from benchmarks.learning.preferences import PreferencePair, read_preferences, stream_order

COUNT = 48


def make(model: Path, data: Path, max_tokens: int, path: Path) -> None:
    """Up to `COUNT` pairs of at most `max_tokens` a sequence. Raises `InvalidRequest` without
    data."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    found: list[dict[str, Any]] = []
    for pair in stream_order(read_preferences(data / "preferences"), seed=0):
        encoded = encode(tokenizer, pair)
        longest = max(len(encoded["chosen_ids"]), len(encoded["rejected_ids"]))
        fits = len(encoded["prompt_ids"]) + longest <= max_tokens
        if fits and _reads_alike(tokenizer, encoded):
            found.append(encoded)
        if len(found) == COUNT:
            break
    write(path, found)


def encode(tokenizer: Any, pair: PreferencePair) -> dict[str, Any]:
    """The fields of `Pair`: prompt and answers apart, as in training."""

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    prompt = tokenizer.apply_chat_template(
        list(pair.messages), tokenize=False, add_generation_prompt=True
    )
    return {
        "prompt": prompt,
        "chosen": pair.chosen,
        "rejected": pair.rejected,
        "prompt_ids": ids(prompt),
        "chosen_ids": [*ids(pair.chosen), tokenizer.eos_token_id],
        "rejected_ids": [*ids(pair.rejected), tokenizer.eos_token_id],
    }


def _reads_alike(tokenizer: Any, encoded: dict[str, Any]) -> bool:
    """Whether prompt and answer, read in one piece as TRL does, give the same ids."""
    return all(
        tokenizer(encoded["prompt"] + encoded[name] + tokenizer.eos_token)["input_ids"]
        == encoded["prompt_ids"] + encoded[f"{name}_ids"]
        for name in ("chosen", "rejected")
    )
