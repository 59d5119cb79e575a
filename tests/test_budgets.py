"""Budgets of the code: what may only shrink. ruff's are in pyproject.toml."""

from __future__ import annotations

import ast
from pathlib import Path

import tandem

PACKAGE = Path(tandem.__file__).parent
MOST_LINES = 63_250
MOST_PUBLIC_METHODS = 12
OVER = {
    "engine/client.py:AsyncEngineClient": 20,
    "engine/group.py:EngineGroup": 21,  # the same port, and its other engines
    "estimators/latency.py:LatencyModel": 17,
    "executor/training.py:TrainingState": 16,
    "scheduling/learning.py:Learning": 22,
    "scheduling/training.py:StepWork": 14,
    "services/learning/publish.py:Publisher": 16,
    "sim/executor.py:SimExecutor": 15,
    "training/recordings.py:Recordings": 16,
}
"""Classes with more, and how many at most. A class leaves this list, none joins it."""


def test_the_product_does_not_grow_unseen() -> None:
    """Whoever adds more than is deleted raises the number, and says in the change what it buys."""
    lines = sum(len(path.read_bytes().splitlines()) for path in PACKAGE.rglob("*.py"))
    assert MOST_LINES - 1500 < lines <= MOST_LINES, "lower the budget if the code has shrunk"


def test_classes_have_few_public_methods() -> None:
    found = {
        f"{path.relative_to(PACKAGE)}:{node.name}": public_methods(node)
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    }
    over = {name: count for name, count in found.items() if count > MOST_PUBLIC_METHODS}
    assert over == OVER


def public_methods(node: ast.ClassDef) -> int:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    named = {each.name for each in node.body if isinstance(each, kinds)}
    return sum(not name.startswith("_") for name in named)
