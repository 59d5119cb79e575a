"""What happens to the model in a learning run: requests that are answered, preferences that arrive.

Both are Poisson processes, drawn from the seed alone, so that every policy meets the same load and
the same users. Knows no engine. Invariant: times never decrease and are seconds from the start.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from benchmarks.learning.preferences import PreferencePair, stream_order
from tandem.bench.arrivals import poisson
from tandem.core.errors import InvalidRequest

EncodeChat = Callable[[Sequence[Mapping[str, str]]], tuple[int, ...]]
EncodeText = Callable[[str], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class EncodedPair:
    """A pair in tokens: two completions of `prompt`, each with the end of its turn.

    `key` is the same for the same pair in any order of arrival.
    """

    key: str
    source: str
    prompt: tuple[int, ...]
    chosen: tuple[int, ...]
    rejected: tuple[int, ...]

    @property
    def longest_tokens(self) -> int:
        """Of the two whole sequences."""
        return len(self.prompt) + max(len(self.chosen), len(self.rejected))


@dataclass(frozen=True, slots=True)
class Feedback:
    """A preference that arrives `at_s`."""

    at_s: float
    pair: EncodedPair


@dataclass(frozen=True, slots=True)
class Ask:
    """A request that arrives `at_s` and wants exactly `output_tokens`."""

    at_s: float
    prompt: tuple[int, ...]
    output_tokens: int


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """`pairs` preferences arrive at `retrain_rate` times the requests' `rate` a second (MACE 6.1:
    retraining jobs are a fraction of the inference requests)."""

    rate: float = 9.0
    retrain_rate: float = 0.5
    pairs: int = 720
    output_tokens: int = 16
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Load:
    """Requests and feedback of one run, each in order of arrival, within `seconds`."""

    asks: tuple[Ask, ...]
    feedback: tuple[Feedback, ...]
    seconds: float


def encode_pairs(
    pairs: Sequence[PreferencePair],
    encode_chat: EncodeChat,
    encode_text: EncodeText,
    end: tuple[int, ...],
) -> list[EncodedPair]:
    """Prompt and answers apart, as in training: no token spans the border."""
    return [
        EncodedPair(
            _key(pair),
            pair.source,
            encode_chat(pair.messages),
            encode_text(pair.chosen) + end,
            encode_text(pair.rejected) + end,
        )
        for pair in pairs
    ]


def _key(pair: PreferencePair) -> str:
    content = repr((pair.messages, pair.chosen, pair.rejected)).encode()
    return hashlib.sha256(content).hexdigest()[:16]


def draw_load(pairs: Sequence[EncodedPair], options: LoadOptions) -> Load:
    """The first `options.pairs` of `pairs` as feedback, and requests for as long as they arrive.

    A request asks what a drawn pair was about. Raises `InvalidRequest` if there are too few pairs.
    """
    if options.pairs < 1 or options.output_tokens < 1:
        raise InvalidRequest("a run needs a pair and an output token", param="pairs")
    if len(pairs) < options.pairs:
        raise InvalidRequest(
            f"{options.pairs} pairs are asked for and {len(pairs)} are there", param="pairs"
        )
    if options.retrain_rate <= 0.0:
        raise InvalidRequest("the retrain rate must be positive", param="retrain_rate")
    times = poisson(options.rate * options.retrain_rate, Random(f"{options.seed}/feedback"))
    feedback = tuple(
        Feedback(at_s, pair) for at_s, pair in zip(times, pairs[: options.pairs], strict=False)
    )
    seconds = feedback[-1].at_s
    return Load(tuple(_asks(pairs, options, seconds)), feedback, seconds)


def _asks(pairs: Sequence[EncodedPair], options: LoadOptions, seconds: float) -> Iterator[Ask]:
    rng = Random(f"{options.seed}/prompts")
    for at_s in poisson(options.rate, Random(f"{options.seed}/requests")):
        if at_s > seconds:
            return
        yield Ask(at_s, rng.choice(pairs).prompt, options.output_tokens)


def stream_of(
    pairs: Sequence[PreferencePair],
    encode: Callable[[Sequence[PreferencePair]], list[EncodedPair]],
    seed: int,
    max_tokens: int,
) -> list[EncodedPair]:
    """The order of arrival for `seed`, without pairs that are longer than `max_tokens`."""
    encoded = encode(stream_order(list(pairs), seed))
    return [pair for pair in encoded if pair.longest_tokens <= max_tokens]
