"""Prompts of the shared data: instructions, and turns of dialogues.

A prompt is a list of chat messages that ends with a user's. Its source and index name it, so that
what was measured can be kept without its text. Invariant: the same data give the same prompts in
the same order, and that order is shuffled, so that its first prompts are a sample of all.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

Message = dict[str, str]
_BEFORE = 4  # messages of a dialogue before the one that is answered
_MOST_CHARACTERS = 6000


@dataclass(frozen=True, slots=True)
class Prompt:
    """Messages for a chat model; `source` and `index` name it."""

    source: str
    index: int
    messages: tuple[Message, ...]

    @property
    def key(self) -> str:
        """As a line's `custom_id`."""
        return f"{self.source}/{self.index}"

    @property
    def text(self) -> str:
        """What the user said last."""
        return self.messages[-1]["content"]


def data_folder() -> Path:
    """Where the shared data lie; `TANDEM_SHARED_DATA` names it."""
    return Path(os.environ.get("TANDEM_SHARED_DATA", Path(__file__).parents[3] / "shared" / "data"))


def prompts(folder: Path) -> list[Prompt]:
    """All of them, in an order of their own; those with the same messages once."""
    found, seen = list[Prompt](), set[str]()
    for source, reader in SOURCES.items():
        for index, messages in enumerate(reader(folder)):
            said = json.dumps(messages)
            if messages and said not in seen and len(said) <= _MOST_CHARACTERS:
                seen.add(said)
                found.append(Prompt(source, index, tuple(messages)))
    Random(0).shuffle(found)
    return found


def lines(path: Path) -> Iterator[Any]:
    """The JSON values of a file, one a line, compressed or not."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as stream:
        yield from map(json.loads, stream)


def whole(path: Path) -> Any:
    """The JSON value of a file, compressed or not."""
    read = path.read_bytes()
    return json.loads(gzip.decompress(read) if path.suffix == ".gz" else read)


def _asked(text: str) -> list[Message]:
    return [{"role": "user", "content": text.strip()}]


def _mt_bench(folder: Path) -> Iterator[list[Message]]:
    for row in lines(folder / "lengths/mt_bench_question.jsonl"):
        yield _asked(row["turns"][0])


def _vicuna(folder: Path) -> Iterator[list[Message]]:
    for row in lines(folder / "lengths/vicuna_bench/question.jsonl"):
        yield _asked(row["text"])


def _arena_1(folder: Path) -> Iterator[list[Message]]:
    for row in lines(folder / "lengths/arena_hard_v0.1/question.jsonl"):
        yield _asked(row["prompt"])


def _arena_2(folder: Path) -> Iterator[list[Message]]:
    for row in lines(folder / "lengths/arena_hard_v2.0/question.jsonl.gz"):
        yield _asked(row["prompt"])


def _assistant(folder: Path) -> Iterator[list[Message]]:
    for path in sorted((folder / "lengths/oasst_1k_prompts").glob("*.json.gz")):
        for row in whole(path)["prompts"]:
            yield _asked(row["prompt"])


def _lottery(folder: Path) -> Iterator[list[Message]]:
    [path] = (folder / "lengths/oasst_lottery").glob("*deepseek*")
    for row in whole(path)["prompts"]:
        yield _asked(row["prompt"])


def _instructions(folder: Path) -> Iterator[list[Message]]:
    for name in ("seed_tasks", "user_oriented_instructions"):
        for row in lines(folder / f"lengths/self_instruct/{name}.jsonl"):
            given = row["instances"][0]["input"].strip()
            yield _asked(f"{row['instruction']}\n\n{given}" if given else row["instruction"])


def _personas(folder: Path) -> Iterator[list[Message]]:
    path = folder / "dialogue/synthetic_persona_chat_valid.csv.gz"
    with gzip.open(path, "rb") as stream:
        for number, row in enumerate(csv.DictReader(io.TextIOWrapper(stream, "utf-8"))):
            said = row["Best Generated Conversation"].splitlines()
            turns = [turn.partition(": ")[2].strip() for turn in said]
            yield _turn([turn for turn in turns if turn], number)


def _topics(folder: Path) -> Iterator[list[Message]]:
    read = whole(folder / "dialogue/topical_chat_valid_freq.json.gz")
    for number, conversation in enumerate(read.values()):
        yield _turn([turn["message"] for turn in conversation["content"]], number)


def _coffee(folder: Path) -> Iterator[list[Message]]:
    read = whole(folder / "dialogue/taskmaster_4_data_07.json.gz")
    for number, conversation in enumerate(read):
        turns = [turn["text"].strip() for turn in conversation["utterances"]]
        yield _turn([turn for turn in turns if turn], number)


def _short_chats(folder: Path) -> Iterator[list[Message]]:
    for conversation in whole(folder / "dialogue/fastchat_dummy_conversation.json"):
        for turn in conversation["conversations"]:
            if turn["from"] == "human":
                yield _asked(turn["value"])


def _turn(turns: list[str], number: int) -> list[Message]:
    """One turn of a dialogue, and for two of three dialogues what was said before it; nothing of an
    empty one."""
    if not turns:
        return []
    rng = Random(number)
    at = rng.randrange(len(turns))
    first = max(0, at - _BEFORE) if number % 3 else at
    first += (at - first) % 2  # a user begins
    return [
        {"role": "assistant" if (at - each) % 2 else "user", "content": turns[each]}
        for each in range(first, at + 1)
    ]


SOURCES: dict[str, Callable[[Path], Iterator[list[Message]]]] = {
    "mt_bench": _mt_bench,
    "vicuna_bench": _vicuna,
    "arena_hard_1": _arena_1,
    "arena_hard_2": _arena_2,
    "oasst_1k": _assistant,
    "oasst_lottery": _lottery,
    "self_instruct": _instructions,
    "persona_chat": _personas,
    "topical_chat": _topics,
    "taskmaster": _coffee,
    "fastchat": _short_chats,
}
