"""The jobs that every engine gets, and the figures which the times of their tokens give.

Knows no engine. Prompts are random and new in every round, so no prefix cache can help.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from statistics import median
from typing import Any

TokenTimes = list[list[float]]
Figures = dict[str, float]


@dataclass(frozen=True)
class Job:
    """So many sequences at once, each with a random prompt; lengths in tokens."""

    name: str
    sequences: int
    prompt_tokens: int
    output_tokens: int

    def request(
        self, rng: Random, vocabulary: int, output_tokens: int | None = None
    ) -> dict[str, Any]:
        """What a worker gets; `output_tokens` overrides the length (warm-up)."""
        prompts = [
            rng.choices(range(vocabulary), k=self.prompt_tokens) for _ in range(self.sequences)
        ]
        return {"prompts": prompts, "output_tokens": output_tokens or self.output_tokens}

    def figures(self, token_s: TokenTimes) -> Figures:
        """Tokens per second.

        `prefill` counts prompt tokens until the first output token of all. `total` counts output
        tokens, prefill included. `decode` counts the tokens that came once every sequence had its
        first one, over that time.
        """
        first_s = max(times[0] for times in token_s)
        if self.output_tokens == 1:
            return {"prefill": self.sequences * self.prompt_tokens / first_s}
        end_s = max(times[-1] for times in token_s)
        decoded = sum(at > first_s for times in token_s for at in times)
        total = sum(map(len, token_s))
        return {"total": total / end_s, "decode": decoded / (end_s - first_s)}


JOBS = (
    Job("prefill 1024", 1, 1024, 1),
    Job("1 sequence", 1, 128, 64),
    Job("8 sequences", 8, 128, 64),
    Job("32 sequences", 32, 128, 64),
)


def medians(samples: list[Figures]) -> Figures:
    """The median of every figure over the rounds."""
    return {name: median(sample[name] for sample in samples) for name in samples[0]}
