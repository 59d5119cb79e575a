"""How the next token of a sequence is chosen.

Knows token ids only; stop strings and other text conditions are in `services`. Values are validated
where they enter (by the HTTP schemas, or by `check` from Python). Invariant: an instance inside the
engine is valid.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

from tandem.core.errors import InvalidRequest

TOO_COMPLEX = "the grammar became too complex while the answer was written; simplify it"
"""Reason of a failure that is the request's own."""
ENDLESS = "'ignore_eos' does not go with a grammar, whose end is the answer's end: leave it out"


class GrammarKind(StrEnum):
    """What the text of a `Grammar` is."""

    JSON = "json"  # a JSON schema
    REGEX = "regex"
    LARK = "lark"
    GBNF = "gbnf"  # llama.cpp's notation


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the whole text of an answer must match. The model's end token ends the answer once the
    text is complete, and at once if nothing can follow.

    `param` is the field of the request that asked for it; errors name it.
    """

    kind: GrammarKind
    text: str
    param: str = field(default="structured_outputs", compare=False)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of one request, with vLLM's meanings and defaults.

    Random numbers depend on `(seed, choice index, output position)` only, never on the other
    requests in the batch.
    """

    max_tokens: int = 16
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0  # 1: no filter
    top_k: int = 0  # 0 or less: no filter
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    # Only tokens that this allows are drawn; nothing else changes. Goes with `min_tokens` as far as
    # the text can go on, and not with `ignore_eos`.
    grammar: Grammar | None = None
    # Log-probability of the chosen token plus this many alternatives (None: nothing).
    logprobs: int | None = None
    prompt_logprobs: int | None = None  # the same for every prompt token but the first

    @property
    def greedy(self) -> bool:
        """True if the most likely token is taken, without randomness.

        Below 1e-5 the division would overflow float32, and the result is the same anyway.
        """
        return self.temperature < 1e-5

    @property
    def has_penalties(self) -> bool:
        """True if the choice depends on the tokens so far."""
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )

    def check(self, vocab_size: int) -> None:
        """Raise `InvalidRequest` that names the first value that is out of its range."""
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if not (low <= value <= high) or not math.isfinite(value):
                raise InvalidRequest(
                    f"{name} is {value}; it must be in [{low}, {high}]", param=name
                )
        if self.top_p == 0.0:
            raise InvalidRequest("top_p is 0; it must be above 0 and at most 1", param="top_p")
        if self.grammar is not None and self.ignore_eos:
            raise InvalidRequest(ENDLESS, param="ignore_eos")
        if self.repetition_penalty == 0.0:
            raise InvalidRequest("repetition_penalty is 0; it must be above 0")
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is not None and not 0 <= count <= vocab_size:
                raise InvalidRequest(f"{name} is {count}; it must be 0 to {vocab_size}", param=name)
        self._check_tokens(vocab_size)

    def _check_tokens(self, vocab_size: int) -> None:
        named = {"logit_bias": self.logit_bias, "stop_token_ids": self.stop_token_ids}
        for name, tokens in named.items():
            if any(not 0 <= token < vocab_size for token in tokens):
                raise InvalidRequest(f"{name} names a token outside of the vocabulary", param=name)
        if not all(math.isfinite(bias) for bias in self.logit_bias.values()):
            raise InvalidRequest("logit_bias holds a value that is not finite", param="logit_bias")


_RANGES = (
    ("max_tokens", 1, 1 << 31),
    ("temperature", 0.0, 100.0),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("repetition_penalty", 0.0, 1e6),
    ("min_tokens", 0, 1 << 31),
)
