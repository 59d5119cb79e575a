"""What the study reads: lengths of answers with what was known before, without any text.

The own model's are a file of results; those of other models are read from the shared data, and
counted with the own model's tokenizer. Invariant: a row's features come from its prompt alone.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.lengths.prompts import Prompt, lines, whole
from tandem.services.answering.tokenizer import Tokenizer
from tandem.services.lengths.scores import Scorer

FEWEST = 150
"""Answers of a model that are worth a table."""

Said = Iterator[tuple[str, str, str]]
"""Model, prompt, answer."""


@dataclass(frozen=True, slots=True)
class Row:
    """One answer. `prompt` names what was asked: rows with the same one stay in one fold."""

    source: str
    prompt: int
    input_tokens: int
    scores: tuple[float, ...]
    output_tokens: int
    max_tokens: int
    finish: str = "stop"

    @property
    def key(self) -> str:
        """Of the prompt."""
        return f"{self.source}/{self.prompt}"


def made(
    prompts: Sequence[Prompt], answers: Mapping[str, Mapping[str, Any]], most: int, scorer: Scorer
) -> list[Row]:
    """The own model's rows."""
    return [
        Row(
            prompt.source,
            prompt.index,
            answer["input_tokens"],
            tuple(round(score, 3) for score in scorer.score(prompt.text).features),
            answer["output_tokens"],
            most,
            answer["finish"],
        )
        for prompt in prompts
        if (answer := answers.get(prompt.key))
    ]


def keep(path: Path, rows: Iterable[Row]) -> None:
    """Write rows, one a line; the same rows are the same bytes."""
    text = "".join(f"{json.dumps(asdict(row))}\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


def kept(path: Path) -> list[Row]:
    """Rows of a file."""
    return [Row(**{**row, "scores": tuple(row["scores"])}) for row in lines(path)]


def recorded(folder: Path, tokenizer: Tokenizer, scorer: Scorer) -> dict[str, list[Row]]:
    """By model: the recorded answers of other models of which there are enough."""
    found, places = defaultdict[str, list[Row]](list), dict[str, int]()
    for reader in (_arena, _vicuna, _sampled, _instructed):
        for model, prompt, answer in reader(folder / "lengths"):
            tokens = len(tokenizer.encode(answer))
            if tokens:
                place = places.setdefault(prompt, len(places))
                length = len(tokenizer.encode(prompt))
                scores = scorer.score(prompt).features
                found[model].append(Row(model, place, length, scores, tokens, 4096))
    return {model: rows for model, rows in sorted(found.items()) if len(rows) >= FEWEST}


def _arena(folder: Path) -> Said:
    for name in ("arena_hard_v0.1", "arena_hard_v2.0"):
        for path in sorted((folder / name).glob("answer_*.jsonl.gz")):
            for row in lines(path):
                asked, answered = row["messages"][0], row["messages"][-1]
                said = answered["content"]
                yield (
                    f"{row['model']} (arena)",
                    asked["content"],
                    said["answer"] if isinstance(said, dict) else said,
                )


def _vicuna(folder: Path) -> Said:
    bench = folder / "vicuna_bench"
    asked = {row["question_id"]: row["text"] for row in lines(bench / "question.jsonl")}
    for path in sorted(bench.glob("answer_*.jsonl")):
        for row in lines(path):
            yield f"{row['model_id']} (vicuna)", asked[row["question_id"]], row["text"]


def _sampled(folder: Path) -> Said:
    """Of the 1k prompts and of the lottery, the first sample under the first setting."""
    for name in ("oasst_1k_prompts", "oasst_lottery"):
        for path in sorted((folder / name).glob("*.json*")):
            read = whole(path)
            model = Path(read["model_name"]).name
            for row in read["prompts"]:
                [answer, *_] = row["results"][0]["outputs"]
                yield f"{model} (oasst)", row["prompt"], answer.replace("<|endoftext|>", "")


def _instructed(folder: Path) -> Said:
    for path in sorted((folder / "self_instruct").glob("predictions_*.jsonl")):
        model = path.stem.removeprefix("predictions_")
        for row in lines(path):
            yield f"{model} (self-instruct)", row["prompt"], row["response"].strip()
