"""What every system has to do: a closed loop of requests, and training steps of fixed size.

Runs inside any engine's own environment: standard library only. All times are readings of
`time.perf_counter`, the system's monotonic clock on Linux, hence comparable between processes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import Any


@dataclass(frozen=True)
class Serving:
    """`sequences` greedy requests at a time; a finished one is replaced at once.

    Ends after `seconds`; 0 means by signal. The first requests are of staggered lengths, so that
    later ones do not begin and end together; they count as tokens but have no TPOT.
    """

    vocabulary: int
    seed: int
    seconds: float = 0.0
    sequences: int = 8
    prompt_tokens: int = 128
    output_tokens: int = 64


@dataclass(frozen=True)
class Training:
    """Steps of `sequences` x `tokens`, all of a step counted; no step begins after `seconds`.

    The loss reads `tokens[prompt_tokens:]`: all but the first token for SFT, as plain causal
    language modelling does, the second half for DPO, whose step is one pair. `cores` to run on.
    """

    loss: str
    vocabulary: int
    seed: int
    seconds: float
    cores: tuple[int, ...]
    sequences: int = 2
    tokens: int = 512

    @property
    def prompt_tokens(self) -> int:
        """Tokens that only condition."""
        return 1 if self.loss == "sft" else self.tokens // 2

    @property
    def limit_s(self) -> float:
        """After how long a system that starves training has shown that it does."""
        return self.seconds + 45.0

    @property
    def step_tokens(self) -> int:
        """Training tokens of one step."""
        return self.sequences * self.tokens

    def batches(self) -> Iterator[list[list[int]]]:
        """The sequences of one step after the other; those of a DPO pair share their prompt."""
        rng = Random(self.seed)
        shared = 0 if self.loss == "sft" else self.prompt_tokens
        while True:
            prompt = rng.choices(range(self.vocabulary), k=shared)
            yield [
                prompt + rng.choices(range(self.vocabulary), k=self.tokens - shared)
                for _ in range(self.sequences)
            ]


@dataclass(frozen=True)
class Ask:
    """One request of the closed loop."""

    name: str
    prompt: list[int]
    output_tokens: int


class ClosedLoop:
    """Makes the requests of one job and notes when each of their tokens came out."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._rng = Random(serving.seed)
        self._names = count()
        self._asks: dict[str, Ask] = {}
        self._times: dict[str, list[float]] = {}
        self._asked_s: dict[str, float] = {}
        self._began_s = time.perf_counter()

    def first(self) -> list[Ask]:
        """The requests to begin with."""
        sequences, tokens = self._serving.sequences, self._serving.output_tokens
        return [self.next(tokens * (place + 1) // sequences) for place in range(sequences)]

    def next(self, output_tokens: int = 0) -> Ask:
        """Another request, of the usual length unless another is said."""
        serving = self._serving
        prompt = self._rng.choices(range(serving.vocabulary), k=serving.prompt_tokens)
        name = f"{serving.seed}-{next(self._names)}"
        self._asks[name] = ask = Ask(name, prompt, output_tokens or serving.output_tokens)
        self._times[name] = []
        self._asked_s[name] = time.perf_counter()
        return ask

    def note(self, name: str, tokens: int, now_s: float) -> bool:
        """So many tokens of `name` came out; True if that was all of it."""
        times = self._times[name]
        times += [now_s] * tokens
        return len(times) == self._asks[name].output_tokens

    def open(self) -> list[str]:
        """Requests that have not ended."""
        return [
            name for name, ask in self._asks.items() if len(self._times[name]) < ask.output_tokens
        ]

    def answer(self) -> dict[str, Any]:
        """When it began, by request when it was asked and the times of all tokens, and which
        requests have a TPOT."""
        counted = self._serving.output_tokens
        return {
            "began_s": self._began_s,
            "requests": [
                {
                    "asked_s": self._asked_s[name],
                    "token_s": times,
                    "tpot": len(times) == counted and self._asks[name].output_tokens == counted,
                }
                for name, times in self._times.items()
            ],
        }


class Steps:
    """Notes the steps of one training job; its clock begins with the first one."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._began_s = time.perf_counter()
        self._ends_s: list[float] = []
        self._tokens = 0
        self._gave_up_s: float | None = None

    @property
    def due(self) -> bool:
        """True if another step may begin."""
        return time.perf_counter() - self._began_s < self._training.seconds

    def note(self, tokens: int = 0) -> None:
        """A step has ended; 0 `tokens`: as many as the training says."""
        self._ends_s.append(time.perf_counter())
        self._tokens += tokens or self._training.step_tokens

    def give_up(self) -> None:
        """Steps that have begun will not end; their tokens do not count, their time does."""
        self._gave_up_s = time.perf_counter()

    def answer(self) -> dict[str, Any]:
        """When the first step began and when each one ended, the window's end, and the training
        tokens of a step on average.

        Without a step given up, that is when the last one ended.
        """
        return {
            "began_s": self._began_s,
            "ends_s": self._ends_s,
            "window_ends_s": self._gave_up_s or self._ends_s[-1],
            "step_tokens": self._tokens / max(1, len(self._ends_s)),
        }
