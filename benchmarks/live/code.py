"""Names the code that decides what a study finds: how the product learns, and the study's judges.

Invariant: rows with the same name were made by the same rules.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import tandem

_LEARNING = ("services/feedback", "services/learning", "training")
_SETTINGS = "config.py"
_JUDGES = tuple(f"live/{name}.py" for name in ("api", "degeneration", "questions", "watch"))


def learning_code(study: str) -> str:
    """Of the study in the folder `study`: eight hexadecimal digits."""
    product, studies = Path(tandem.__file__).parent, Path(__file__).parents[1]
    folders = [*(product / name for name in _LEARNING), studies / study]
    files = [
        path
        for folder in folders
        for path in sorted(folder.glob("*.*"))
        if path.suffix in (".py", ".jsonl")
    ]
    digest = hashlib.sha256()
    for path in [*files, product / _SETTINGS, *(studies / name for name in _JUDGES)]:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:8]
