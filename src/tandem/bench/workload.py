"""The load before it is sent: arrival, prompt and output length of each request.

Joins arrivals, lengths and traces. Knows nothing of HTTP. Invariant: the same seed and options give
the same workload, and two prompts share tokens only if a trace says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice, takewhile
from random import Random

from tandem.bench.lengths import Lengths
from tandem.bench.traces import TraceRecord
from tandem.core.errors import InvalidRequest

# Common short English words: most tokenizers know each of them as one token.
_TEXT = (
    "the of and to in is it you that he was for on are with as his they be at one have this from or"
    " had by hot but some what there we can out other were all your when up use word how said an"
    " each she which do their time if will way about many then them would write like so these her"
    " long make thing see him two has look more day could go come did my sound no most number who"
    " over know water than call first people may down side been now find any new work part take get"
    " place made live where after back little only round man year came show every good me give our"
)
WORDS = tuple(_TEXT.split())


@dataclass(frozen=True, slots=True)
class Shape:
    """Size of one request in tokens. `prefix` is as in `TraceRecord`."""

    prompt_tokens: int
    output_tokens: int
    prefix: tuple[int, ...] = ()
    block_tokens: int = 1


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request of the workload, `at_s` seconds after the load begins.

    `prompt` is token ids, or indices into `WORDS` if the prompt is sent as text.
    """

    index: int
    at_s: float
    prompt: tuple[int, ...]
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a workload; None: unbounded. `duration_s` limits arrivals, not answers."""

    max_requests: int | None = None
    duration_s: float | None = None
    max_prompt_tokens: int | None = None
    max_output_tokens: int | None = None
    length_scale: float = 1.0


def drawn_shapes(prompts: Lengths, outputs: Lengths, rng: Random) -> Iterator[Shape]:
    """Endless independent lengths."""
    while True:
        yield Shape(prompts.draw(rng), outputs.draw(rng))


def traced_shapes(records: Iterable[TraceRecord], limits: Limits) -> Iterator[Shape]:
    """Lengths and prefixes of a trace in its order, scaled and cut to `limits`.

    Blocks of a prefix are scaled with the lengths, so the shared fraction stays the same.
    """
    scale = limits.length_scale
    if scale <= 0.0:
        raise InvalidRequest("the length scale must be positive", param="length_scale")
    for record in records:
        prompt = max(1, round(record.prompt_tokens * scale))
        output = max(1, round(record.output_tokens * scale))
        block = max(1, round(record.block_tokens * scale))
        yield Shape(
            min(prompt, limits.max_prompt_tokens or prompt),
            min(output, limits.max_output_tokens or output),
            record.prefix,
            block,
        )


def plan(
    arrivals_s: Iterable[float], shapes: Iterable[Shape], limits: Limits, vocabulary: int, seed: int
) -> list[PlannedRequest]:
    """The whole workload, prompts included, with ids below `vocabulary`.

    At least one of `limits`, `arrivals_s` and `shapes` must end.
    """
    end_s = limits.duration_s
    timed = takewhile(lambda at_s: end_s is None or at_s <= end_s, arrivals_s)
    pairs = islice(zip(timed, shapes, strict=False), limits.max_requests)
    return [
        PlannedRequest(index, at_s, _prompt(shape, index, vocabulary, seed), shape.output_tokens)
        for index, (at_s, shape) in enumerate(pairs)
    ]


def warmup(count: int, shape: Shape, vocabulary: int, seed: int) -> list[PlannedRequest]:
    """`count` requests of `shape` at once. Their prompts occur in no measured workload."""
    bare = Shape(shape.prompt_tokens, shape.output_tokens)
    return [
        PlannedRequest(index, 0.0, _prompt(bare, index, vocabulary, seed), shape.output_tokens)
        for index in range(-count, 0)
    ]


def as_text(prompt: tuple[int, ...]) -> str:
    """The prompt as words, about one token each."""
    return " ".join(WORDS[token % len(WORDS)] for token in prompt)


def _prompt(shape: Shape, index: int, vocabulary: int, seed: int) -> tuple[int, ...]:
    """Named blocks first, the same for every use of a name; then tokens of its own."""
    tokens: list[int] = []
    for name in shape.prefix:
        if len(tokens) >= shape.prompt_tokens:
            break
        tokens += _tokens(f"{seed}/block/{name}", shape.block_tokens, vocabulary)
    missing = max(0, shape.prompt_tokens - len(tokens))
    tokens += _tokens(f"{seed}/request/{index}", missing, vocabulary)
    return tuple(tokens[: shape.prompt_tokens])


def _tokens(seed: str, count: int, vocabulary: int) -> list[int]:
    return Random(seed).choices(_ids(vocabulary), k=count)


@lru_cache(maxsize=1)
def _ids(vocabulary: int) -> tuple[int, ...]:
    """All token ids. Each is one object, however often it is drawn: a long trace has millions."""
    return tuple(range(vocabulary))
