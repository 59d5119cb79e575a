"""Pools of offline requests: questions about documents that many of them share.

Knows the shared data's files and a tokenizer, no engine. Invariant: requests about one document
have its tokens in common, and no others have more than a few.
"""

from __future__ import annotations

import gzip
import json
from ast import literal_eval
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from tandem.bench.lengths import Lognormal
from tandem.core.request import Request
from tandem.core.sampling import SamplingParams
from tandem.core.slo import WorkClass

Encode = Callable[[str], list[int]]
# ShareGPT's mean lengths in tokens (Kwon et al., 2023, figure 11). The deviations are ours.
CHAT_PROMPTS = Lognormal(161.0, 1.1)
CHAT_OUTPUTS = Lognormal(338.0, 0.9)
CHAT_MOST = 2048
# Online before offline, for policies that heed a request's priority.
OFFLINE_PRIORITY = 1


@dataclass(frozen=True, slots=True)
class Source:
    """A file of documents with questions, and the number of both in the whole data set: the file
    has some of the documents only. Without a file: chats, which share nothing."""

    title: str
    file: str
    documents: int
    questions: int


SOURCES = {
    "loogle-short": Source("LooGLE short QA", "loogle_shortdep_qa.jsonl.gz", 105, 1951),
    "loogle-long": Source("LooGLE long QA", "loogle_longdep_qa.jsonl.gz", 140, 1101),
    "qmsum": Source("QMSum", "qmsum_val.jsonl.gz", 232, 1808),
    "sharegpt": Source("ShareGPT-like chats", "", 0, 4000),
}


@dataclass(frozen=True, slots=True)
class Limits:
    """Of a pool, in tokens: the longest document, the longest answer. `scale` is of chats'
    lengths. With `documents`, so many, and questions in proportion."""

    document_tokens: int
    output_tokens: int
    scale: float = 1.0
    documents: int = 0


@dataclass(frozen=True, slots=True)
class _Article:
    text: str
    questions: tuple[tuple[str, str], ...]  # with the answer


def pool(name: str, data: Path, encode: Encode, limits: Limits, vocabulary: int) -> list[Request]:
    """The offline requests of `SOURCES[name]`, shuffled, so that requests about one document are
    not adjacent. The same for every policy."""
    source = SOURCES[name]
    if not source.file:
        found = chats(source.questions, limits.scale, vocabulary)
    else:
        found = _questions(source, _articles(data / "prefix" / source.file), encode, limits)
    Random(f"{name}/order").shuffle(found)
    return [_offline(number, *each) for number, each in enumerate(found)]


def chats(count: int, scale: float, vocabulary: int, seed: str = "offline") -> list[Any]:
    """Prompts that share nothing, with the length of their answer, both as ShareGPT's."""
    rng = Random(f"{seed}/chats")
    found = []
    for _ in range(count):
        prompt, output = (
            max(1, round(scale * min(lengths.draw(rng), CHAT_MOST)))
            for lengths in (CHAT_PROMPTS, CHAT_OUTPUTS)
        )
        found.append((tuple(rng.choices(range(vocabulary), k=prompt)), output))
    return found


def documents(streams: list[list[int]], count: int, most_tokens: int) -> list[tuple[int, ...]]:
    """`count` documents of at most so many tokens. Number k is a real one, `k % len(streams)`,
    begun at another place each time and continued at its own beginning: none begins as another."""
    found = []
    for number in range(count):
        stream = streams[number % len(streams)]
        rounds = -(-count // len(streams))
        first = number // len(streams) * len(stream) // rounds
        found.append(tuple((stream[first:] + stream[:first])[:most_tokens]))
    return found


def _questions(
    source: Source, articles: list[_Article], encode: Encode, limits: Limits
) -> list[tuple[tuple[int, ...], int]]:
    """Questions in proportion to the data set's; a document's are asked again, with another number,
    where it has too few."""
    count = limits.documents or source.documents
    total = round(source.questions * count / source.documents)
    texts = documents([encode(each.text) for each in articles], count, limits.document_tokens)
    found = []
    for number in range(total):
        place, turn = number % count, number // count
        asked = articles[place % len(articles)].questions
        question, answer = asked[turn % len(asked)]
        asking = encode(f"\n\nQuestion {turn + 1}: {question}\nAnswer:")
        output = min(limits.output_tokens, max(1, len(encode(answer))))
        found.append(((*texts[place], *asking), output))
    return found


def _articles(path: Path) -> list[_Article]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    return [_loogle(row) if "qa_pairs" in row else _qmsum(row) for row in rows]


def _loogle(row: dict[str, Any]) -> _Article:
    pairs = literal_eval(row["qa_pairs"])
    asked = tuple((str(pair["Q"]), str(pair["A"])) for pair in pairs)
    return _Article(f"{row['title']}\n\n{row['input']}", asked)


def _qmsum(row: dict[str, Any]) -> _Article:
    said = "\n".join(f"{turn['speaker']}: {turn['content']}" for turn in row["meeting_transcripts"])
    queries = row["general_query_list"] + row["specific_query_list"]
    return _Article(said, tuple((each["query"], each["answer"]) for each in queries))


def _offline(number: int, prompt: tuple[int, ...], output_tokens: int) -> Request:
    return Request(
        f"offline-{number}",
        prompt,
        SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True),
        work_class=WorkClass.OFFLINE,
        priority=OFFLINE_PRIORITY,
    )


def encoder(data: Path) -> Encode:
    """The shared data's tokenizer of 50,280 entries (GPT-NeoX, OLMo)."""
    from tokenizers import Tokenizer

    path = data / "tokenizers" / "gpt-neox-olmo-dolma-v1_5.tokenizer.json.gz"
    found = Tokenizer.from_str(gzip.decompress(path.read_bytes()).decode())
    return lambda text: list(found.encode(text, add_special_tokens=False).ids)
