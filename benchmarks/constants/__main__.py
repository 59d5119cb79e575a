"""Search for the constants that MACE leaves open, in simulation: see docs/benchmarks.md.

    python -m benchmarks constants --policy mace --seconds 100     # again, until nothing is left

Dials of a policy are first turned one at a time, then drawn at random, then walked from the best
draw; what changes the score by next to nothing goes back to its default. Candidates meet the search
set only; the best one meets the held-out set, beside the defaults. Every run is kept in `--cache`,
so an interrupted search goes on. Invariant: the rule and both sets stand here before anything is
run, and the same code gives the same results.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from benchmarks.constants.dials import (
    DIALS,
    Point,
    defaults,
    drawn,
    one_at_a_time,
    options_of,
    stepped,
)
from benchmarks.constants.report import Found, Tried, as_markdown
from benchmarks.constants.rule import allowed, score
from benchmarks.constants.workloads import HELD_OUT, SEARCH, Run, Share, fingerprint, measure

SCHEMA = "tandem-constants-1"
DRAWS, SEED = 48, 0
STEP = 0.12
# A dial that gains less goes back to its default.
NEXT_TO_NOTHING = 0.002


class OutOfTime(Exception):
    """The time of this call is used up; what was measured is kept."""


class Bench:
    """Runs of one policy, each made once: its options and a workload with a seed give shares."""

    def __init__(self, policy: str, cache: Path, until_s: float) -> None:
        self._policy = policy
        self._until_s = until_s
        self._path = cache / f"constants-{policy}-{fingerprint()}.jsonl"
        self._known: dict[str, Share] = {}
        if self._path.exists():
            for line in self._path.read_bytes().splitlines():
                key, share = msgspec.json.decode(line, type=tuple[str, Share])
                self._known[key] = share

    def shares(self, point: Point, runs: tuple[Run, ...]) -> list[Share]:
        """What came of every run. Raises `OutOfTime`."""
        return [self._share(point, run) for run in runs]

    def _share(self, point: Point, run: Run) -> Share:
        options = options_of(self._policy, point)
        key = msgspec.json.encode([options, run.workload.name, run.seed]).decode()
        if key not in self._known:
            if time.monotonic() > self._until_s:
                raise OutOfTime
            self._known[key] = measure(self._policy, options, run)
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab") as file:
                file.write(msgspec.json.encode((key, self._known[key])) + b"\n")
        return self._known[key]


def search(policy: str, bench: Bench) -> Found:
    """The candidates with their shares, the best by the rule, and the verdict on it."""
    start = defaults(policy)
    base = bench.shares(start, SEARCH)
    tried: list[Tried] = [(start, base)]

    def meets(point: Point) -> bool:
        """Try a point; whether it is the best of all so far."""
        shares = bench.shares(point, SEARCH)
        before = _best(tried, base)[1]
        tried.append((point, shares))
        return allowed(shares, base) and score(shares) > score(before)

    alone = list(one_at_a_time(policy))
    for point in (*alone, *drawn(policy, DRAWS, SEED)):
        meets(point)
    _walk(policy, _best(tried, base)[0], meets)
    best = _plain(start, _best(tried, base), base, lambda point: bench.shares(point, SEARCH))
    held, held_base = bench.shares(best[0], HELD_OUT), bench.shares(start, HELD_OUT)
    return Found(policy, tried, len(alone), best, held, held_base)


def _walk(policy: str, point: Point, meets: Callable[[Point], bool]) -> None:
    """Turn one dial after the other by a step up or down, and keep what is better."""
    for name in DIALS[policy]:
        for step in (STEP, -STEP):
            moved = stepped(policy, point, name, step)
            if moved != point and meets(moved):
                point = moved
                break


def _plain(
    start: Point, best: Tried, base: list[Share], shares_of: Callable[[Point], list[Share]]
) -> Tried:
    """The best candidate with as many dials at their defaults as its score allows."""
    least, (point, shares) = score(best[1]) - NEXT_TO_NOTHING, best
    for name, value in start.items():
        plainer = {**point, name: value}
        found = shares_of(plainer)
        if allowed(found, base) and score(found) >= least:
            point, shares = plainer, found
    return point, shares


def _best(tried: list[Tried], base: list[Share]) -> Tried:
    """Of what is allowed the highest score; the first of equal ones."""
    return max((each for each in tried if allowed(each[1], base)), key=lambda each: score(each[1]))


def _content(found: list[Found]) -> Iterator[tuple[str, object]]:
    yield "schema", SCHEMA
    for each in found:
        yield each.policy, each.as_data()


def main(
    policy: Annotated[
        list[str] | None, typer.Option(help="Repeatable; default: all that have dials.")
    ] = None,
    seconds: Annotated[float, typer.Option(help="Stop after so long, to go on later.")] = 1e9,
    cache: Annotated[Path, typer.Option(help="Where runs are kept.")] = Path(".bench-cache"),
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("benchmarks/results"),
) -> None:
    """Search, judge, and write `constants.json` and `constants.md`."""
    until_s = time.monotonic() + seconds
    try:
        found = [search(name, Bench(name, cache, until_s)) for name in policy or DIALS]
    except OutOfTime:
        print("not finished: the same command goes on", file=sys.stderr)
        raise typer.Exit(3) from None
    encoded = msgspec.json.encode(dict(_content(found)))
    (out / "constants.json").write_bytes(msgspec.json.format(encoded, indent=1) + b"\n")
    page = as_markdown(found)
    (out / "constants.md").write_text(page)
    print(page)


if __name__ == "__main__":
    typer.run(main)
