"""Public preference pairs, read from a folder: what users of a learning benchmark say.

Five sets (see `SOURCES`), each a file or some files of its own format. Knows nothing of models and
tokens. Invariant: a pair's two answers differ and continue the same messages, and reading a folder
twice gives the same pairs in the same order.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from tandem.core.errors import InvalidRequest
from tandem.core.learning import Messages


@dataclass(frozen=True, slots=True)
class PreferencePair:
    """An answer to `messages` that people (or a check) preferred, and one that they did not.

    `conversation` is the same for pairs that share a beginning; `source` names the set.
    """

    source: str
    conversation: str
    messages: Messages
    chosen: str
    rejected: str


def read_preferences(folder: Path, sources: tuple[str, ...] = ()) -> list[PreferencePair]:
    """All pairs of the `sources` (none: all) in `folder`, in the files' order.

    Raises `InvalidRequest` for an unknown source, and if the folder or a file is not there.
    """
    unknown = [name for name in sources if name not in SOURCES]
    if unknown:
        raise InvalidRequest(
            f"there is no set of preferences {unknown[0]!r}; known: {', '.join(SOURCES)}",
            param="sources",
        )
    if not folder.is_dir():
        raise InvalidRequest(f"{folder} is not a folder of preference data", param="data")
    return [
        pair
        for name in sources or tuple(SOURCES)
        for pair in SOURCES[name](folder)
        if pair.messages and pair.chosen and pair.rejected and pair.chosen != pair.rejected
    ]


def stream_order(pairs: list[PreferencePair], seed: int) -> list[PreferencePair]:
    """The pairs in an order that depends on `seed` alone; conversations stay together.

    Pairs of one conversation arrive one after the other, as one user would send them: scattered,
    the first would be trained on before the others are measured as unseen.
    """
    conversations: dict[str, list[PreferencePair]] = {}
    for pair in pairs:
        conversations.setdefault(f"{pair.source}/{pair.conversation}", []).append(pair)
    keys = sorted(conversations)
    Random(f"{seed}/stream").shuffle(keys)
    return [pair for key in keys for pair in conversations[key]]


def held_back(pair: PreferencePair) -> bool:
    """Whether `pair` is of the quarter of conversations that options are chosen on.

    By a hash of the conversation, so that no run of the experiment meets any of them.
    """
    name = f"{pair.source}/{pair.conversation}".encode()
    return hashlib.sha256(name).digest()[0] % 4 == 0


def _harmless(folder: Path) -> Iterator[PreferencePair]:
    """hh-rlhf: two whole dialogues that differ in the last answer (those that differ earlier are
    left out)."""
    for row in _json_lines(folder / "hh_rlhf_harmless_base_test.jsonl.gz"):
        chosen, rejected = _turns(row["chosen"]), _turns(row["rejected"])
        if chosen[:-1] != rejected[:-1] or not (_answered(chosen) and _answered(rejected)):
            continue
        first = chosen[0]["content"]
        yield PreferencePair(
            "hh_harmless", first, tuple(chosen[:-1]), chosen[-1]["content"], rejected[-1]["content"]
        )


_SPEAKER = re.compile(r"\n\n(Human|Assistant):")


def _turns(text: str) -> list[dict[str, str]]:
    parts = _SPEAKER.split(text)
    roles = {"Human": "user", "Assistant": "assistant"}
    return [
        {"role": roles[speaker], "content": content.strip()}
        for speaker, content in zip(parts[1::2], parts[2::2], strict=True)
    ]


def _answered(turns: list[dict[str, str]]) -> bool:
    return len(turns) > 1 and turns[-1]["role"] == "assistant"


def _helpful(folder: Path) -> Iterator[PreferencePair]:
    """LLaMA-Factory's demonstration pairs over instructions and chats."""
    for row in _json(folder / "dpo_en_demo.json.gz"):
        messages = tuple(
            {"role": _SHAREGPT[turn["from"]], "content": turn["value"].strip()}
            for turn in row["conversations"]
        )
        chosen, rejected = row["chosen"]["value"], row["rejected"]["value"]
        first = messages[0]["content"] if messages else ""
        yield PreferencePair("dpo_en_demo", first, messages, chosen.strip(), rejected.strip())


_SHAREGPT = {"system": "system", "human": "user", "gpt": "assistant"}


def _ranked(folder: Path) -> Iterator[PreferencePair]:
    """Open-Assistant trees: the best ranked answer to a message against each worse one."""
    for row in _json_lines(folder / "oasst_en_100_tree.jsonl.gz"):
        yield from _ranked_replies(row["prompt"], (), row["message_tree_id"])


def _ranked_replies(
    message: Mapping[str, Any], before: Messages, tree: str
) -> Iterator[PreferencePair]:
    role = "user" if message["role"] == "prompter" else "assistant"
    messages = (*before, {"role": role, "content": message["text"].strip()})
    replies = message.get("replies") or []
    if role == "user":
        ranked = sorted(
            (reply for reply in replies if reply.get("rank") is not None),
            key=lambda reply: reply["rank"],
        )
        for worse in ranked[1:]:
            best = ranked[0]["text"].strip()
            yield PreferencePair("oasst", tree, messages, best, worse["text"].strip())
    for reply in replies:
        yield from _ranked_replies(reply, messages, tree)


def _solutions(folder: Path) -> Iterator[PreferencePair]:
    """GSM8K: of each problem, the first right solution against the first wrong one."""
    for row in _json_lines(folder / "gsm8k_example_model_solutions.jsonl.gz"):
        tried = [value for value in row.values() if isinstance(value, dict)]
        right = [each["solution"].strip() for each in tried if each["is_correct"]]
        wrong = [each["solution"].strip() for each in tried if not each["is_correct"]]
        question = row["question"].strip()
        messages = ({"role": "user", "content": question},)
        if right and wrong:
            yield PreferencePair("gsm8k", question, messages, right[0], wrong[0])


def _rewarded(folder: Path) -> Iterator[PreferencePair]:
    """Taskmaster: of each context with both labels, its first good and first bad next turn."""
    answers: dict[str, dict[bool, str]] = {}
    for path in sorted(folder.glob("taskmaster_*_reward_*.json.gz")):
        for row in _json(path):
            label = row["reward"] > 0.5
            answers.setdefault(row["context"], {}).setdefault(label, row["generation"])
    for context, labelled in answers.items():
        if len(labelled) == 2:
            messages = tuple(_task_turn(turn) for turn in json.loads(context))
            chosen, rejected = (
                _task_turn(json.loads(labelled[label]))["content"] for label in (True, False)
            )
            first = next((m["content"] for m in messages if m["role"] == "user"), "")
            yield PreferencePair("taskmaster", first, messages, chosen, rejected)


def _task_turn(turn: Mapping[str, Any]) -> dict[str, str]:
    """Calls of a tool are the agent's words, and its answers the user's, as JSON."""
    role = "assistant" if turn["role"] == "agent" else "user"
    if "text" in turn:
        return {"role": role, "content": turn["text"].strip()}
    rest = {name: value for name, value in turn.items() if name != "role"}
    return {"role": role, "content": json.dumps(rest)}


SOURCES: dict[str, Callable[[Path], Iterator[PreferencePair]]] = {
    "hh_harmless": _harmless,
    "dpo_en_demo": _helpful,
    "oasst": _ranked,
    "gsm8k": _solutions,
    "taskmaster": _rewarded,
}


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    for line in _text(path).splitlines():
        if line.strip():
            yield json.loads(line)


def _json(path: Path) -> Any:
    return json.loads(_text(path))


def _text(path: Path) -> str:
    try:
        return gzip.decompress(path.read_bytes()).decode()
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error}", param="data") from error
