"""The model's own greedy answers to what is taught: made once, kept in a file of the study.

Invariant: a file belongs to one model, named as the server calls it; what is kept is not asked
again, so that every run teaches the same pairs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.live.api import Answer, Api

FOLDER = Path(__file__).parent / "own"
OWN_TOKENS = 64
_BATCH = 32


def path_of(model: str, folder: Path = FOLDER) -> Path:
    """The file of a model."""
    return folder / f"{model.replace('/', '--')}.json"


def read(path: Path) -> dict[str, Answer]:
    """Kept answers by question; none where there is no file."""
    if not path.exists():
        return {}
    kept = json.loads(path.read_text())
    return {question: Answer(text, ended) for question, (text, ended) in kept.items()}


async def own_answers(api: Api, questions: Sequence[str], path: Path) -> dict[str, Answer]:
    """Answers to all `questions`; those that are missing are asked and kept, a batch at a time."""
    kept = read(path)
    missing = [question for question in dict.fromkeys(questions) if question not in kept]
    for at in range(0, len(missing), _BATCH):
        batch = missing[at : at + _BATCH]
        kept |= dict(zip(batch, await api.ask_all(batch, None, OWN_TOKENS), strict=True))
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = {question: [each.text, each.ended] for question, each in sorted(kept.items())}
        path.write_text(json.dumps(rows, ensure_ascii=False, indent=1) + "\n")
    return kept
