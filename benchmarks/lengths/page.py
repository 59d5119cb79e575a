"""The study's page: a table a model, what the claims come to, and the time of the scores.

Knows figures only. Invariant: a difference is called one only where its interval leaves out 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from benchmarks.lengths.figures import Believed, Figures
from benchmarks.reporting.bootstrap import Interval

GOAL_MS = 0.3


@dataclass(frozen=True, slots=True)
class Model:
    """One model's answers: how many, what is known of them, the ladder, and the claims in pairs
    (better, than) with the difference of their pinball losses."""

    name: str
    answers: int
    prompts: int
    at_limit: float
    mean_tokens: float
    ladder: dict[str, Figures]
    claims: dict[tuple[str, str], Interval]
    given: dict[str, tuple[int, Figures, Figures]] = field(default_factory=dict)
    in_order: Believed | None = None


def page(heading: str, models: Mapping[str, Model], score_ms: tuple[float, float]) -> str:
    """Markdown."""
    mean_ms, high_ms = score_ms
    met = "met" if mean_ms < GOAL_MS else "not met"
    lines = [
        "# Lengths of answers",
        "",
        heading,
        "",
        f"The six scores take {mean_ms:.3f} ms of a core a prompt in the mean, {high_ms:.3f} ms at"
        f" the 95th percentile (goal for the mean: {GOAL_MS} ms, {met}).",
        "",
    ]
    lines += _all(models)
    for model in models.values():
        lines += _model(model)
    return "\n".join(lines)


def _all(models: Mapping[str, Model]) -> list[str]:
    """Each step's loss against the history's alone, over all models."""
    names = list(dict.fromkeys(name for model in models.values() for name in model.ladder))
    base, *steps = names
    lines = [
        f"Pinball loss of `{base}` in tokens, and of the others against it:",
        "",
        f"| model | answers | {' | '.join(names)} |",
        f"|---|---:|{'---:|' * len(names)}",
    ]
    for model in models.values():
        loss = model.ladder[base].pinball
        found = [
            f"{model.ladder[name].pinball / loss - 1.0:+.1%}" if name in model.ladder else ""
            for name in steps
        ]
        lines.append(f"| {model.name} | {model.answers} | {loss:.1f} | {' | '.join(found)} |")
    return [*lines, ""]


def _model(model: Model) -> list[str]:
    lines = [
        f"## {model.name}",
        "",
        f"{model.answers} answers to {model.prompts} prompts, {model.mean_tokens:.0f} tokens in the"
        f" mean; {model.at_limit:.0%} ended at the limit.",
        "",
        "| predictor | pinball loss, tokens | MAE, tokens | Spearman | within 50% | within 90% |",
        "|---|---:|---:|---:|---:|---:|",
        *(f"| {name} | {_columns(each)} |" for name, each in model.ladder.items()),
        "",
        *(_claim(model, *pair) for pair in model.claims),
        "",
    ]
    for name, (answers, without, with_it) in model.given.items():
        lines += [
            f"* `{name}`, of the {answers} answers longer than 64 tokens, when 64 are made: pinball"
            f" loss {with_it.pinball:.1f} tokens given these, {without.pinball:.1f} without;"
            f" {with_it.inside_90:.0%} and {without.inside_90:.0%} within 90%.",
        ]
    if model.in_order is not None:
        lines += _in_order(model.in_order)
    return [*lines, ""]


def _columns(each: Figures) -> str:
    shares = f"{each.inside_50:.0%} | {each.inside_90:.0%}"
    return f"{each.pinball:.1f} | {each.absolute:.1f} | {each.spearman:.2f} | {shares}"


def _claim(model: Model, better: str, than: str) -> str:
    found = model.claims[better, than]
    base = model.ladder[than].pinball
    said = "no difference is shown"
    if found.high < 0.0:
        said = f"{better} is better"
    elif found.low > 0.0:
        said = f"{better} is worse"
    low, value, high = (each / base for each in (found.low, found.value, found.high))
    return f"* {better} against {than}: pinball loss {value:+.1%} [{low:+.1%}, {high:+.1%}]: {said}"


def _in_order(found: Believed) -> list[str]:
    alone = ", ".join(f"`{name}` {loss:.1f}" for name, loss in found.alone.items())
    share = ", ".join(f"`{name}` {part:.0%}" for name, part in found.share.items())
    return [
        f"* One after another, as the server learns (the source is taken for the batch), over"
        f" {found.answers} answers: pinball loss {found.pinball:.1f} tokens of what was believed;"
        f" alone: {alone}. Believed: {share}.",
    ]
