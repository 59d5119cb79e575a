"""How the next token of a sequence is chosen.

Knows token ids only: stop strings and other text conditions live in `services`. Values are
validated where they enter (`services`), so an instance is always usable as it is.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of one request, with vLLM's meanings and defaults.

    `temperature == 0` is greedy. `top_k <= 0` and `top_p == 1` switch the filter off. `logprobs`
    asks for the chosen token's log-probability plus that many alternatives (`None`: none at all);
    `prompt_logprobs` asks the same for every prompt token but the first. Random numbers depend
    on `(seed, choice index, output position)` alone, never on what else was in the batch.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    @property
    def greedy(self) -> bool:
        """True if the most likely token is taken, without randomness.

        Below 1e-5 the division would overflow float32, and the result is the same.
        """
        return self.temperature < 1e-5

    @property
    def has_penalties(self) -> bool:
        """True if the choice depends on which tokens already occurred."""
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )
