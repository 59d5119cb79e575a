"""Output of `tandem bench fidelity`: the rows of its two tables, and both as a page.

Formats only. Invariant: the screen and the page have the same cells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tandem.bench.fidelity import Comparison, Figures, Part

FIGURES = ("figure", "real", "simulated", "error", "allowed", "spread of real runs", "holds")
PARTS = ("kind", "real", "simulated", "ms, real", "ms, predicted for it", "ms, simulated")


def figure_rows(found: Sequence[Comparison]) -> list[tuple[str, ...]]:
    """Cells of `FIGURES`; latencies in milliseconds."""
    rows: list[tuple[str, ...]] = []
    for each in found:
        in_ms = not each.figure.endswith("tokens_s")
        name = f"{each.figure.removesuffix('_s')}, {'ms' if in_ms else 'a second'}"
        real, simulated = ((1e3 if in_ms else 1.0) * side for side in (each.real, each.simulated))
        sides = (f"{real:.2f}", f"{simulated:.2f}")
        shares = (f"{each.error:+.1%}", f"{each.allowed:.1%}", f"{each.spread:.1%}")
        rows.append((name, *sides, *shares, "yes" if each.holds else "no"))
    return rows


def part_rows(real: Sequence[Figures], simulated: Sequence[Figures]) -> list[tuple[str, ...]]:
    """Cells of `PARTS`, which show where the sides differ: times of the last real run, predictions
    for the same work, and times of the last simulated run."""
    ours, theirs = real[-1], simulated[-1]
    rows: list[tuple[str, ...]] = []
    for kind in dict.fromkeys((*ours.parts, *theirs.parts)):
        mine, its = ours.parts.get(kind, Part()), theirs.parts.get(kind, Part())
        means = (
            _mean_ms(mine.seconds, mine.count),
            _mean_ms(mine.predicted_s, mine.count),
            _mean_ms(its.seconds, its.count),
        )
        rows.append((kind, str(mine.count), str(its.count), *means))
    outside = (_mean_ms(ours.outside_s, 1), "", _mean_ms(theirs.outside_s, 1))
    rows.append(("outside of it", str(ours.iterations), str(theirs.iterations), *outside))
    return rows


def as_markdown(
    machine: Mapping[str, object],
    load: str,
    found: Sequence[Comparison],
    real: Sequence[Figures],
    simulated: Sequence[Figures],
) -> str:
    """The page. `load` describes the load in a sentence."""
    lines = ["# How near the simulator comes", ""]
    lines += [", ".join(f"{name}: {value}" for name, value in machine.items()), "", load, ""]
    lines += _table(FIGURES, figure_rows(found))
    lines += ["", "The last run of each side, by kind of work: how often, and mean times.", ""]
    lines += _table(PARTS, part_rows(real, simulated))
    return "\n".join([*lines, ""])


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    cells = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(row) + " |" for row in cells]


def _mean_ms(seconds: float, count: int) -> str:
    return f"{1e3 * seconds / count:.2f}" if count else "-"
