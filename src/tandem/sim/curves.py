"""How training goes in a simulation: a model of the falling loss, or the losses of a recorded run.

The margin of a trained pair, beta * (log p(chosen) - log p(rejected) against the reference), rises
from 0 towards `margin` with the number of updates, so DPO's loss falls from log 2:

    margin(n) = margin * (1 - exp(-n / updates))

Documented rather than true: what a run gains depends on data. A recorded run is a CSV file, as a
fine-tuning job's result file is one: a row for each update, with its `step` and its `train_loss`.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tandem.core.errors import InvalidRequest

# The columns of a recorded curve; others are ignored.
STEP, LOSS = "step", "train_loss"
# Files have six decimals: what they show as 0 is taken for half of the last one.
_LEAST_LOSS = 5e-7


class Curve(Protocol):
    """Of one trainer."""

    def margin(self, updates: int) -> float:
        """Margin of the reference-relative log-probabilities after so many updates, times beta."""
        ...


@dataclass(frozen=True, slots=True)
class Saturating:
    """See the module; `updates` is when 63% of the margin are reached."""

    top: float = 2.0
    updates: float = 50.0

    def margin(self, updates: int) -> float:
        """See `Curve`."""
        return self.top * (1.0 - math.exp(-updates / self.updates))


class Recorded:
    """The losses of a run that was made, one an update; the last one goes on."""

    def __init__(self, losses: list[float]) -> None:
        """DPO losses, above 0, each before its update. Raises `InvalidRequest`."""
        if not losses or not all(math.isfinite(loss) and loss > 0.0 for loss in losses):
            raise InvalidRequest("a recorded curve needs losses above 0", param="loss_curve")
        # -log sigmoid(m) = loss, solved for m without a power that could be too large.
        self._margins = [-loss - math.log(-math.expm1(-loss)) for loss in losses]

    def margin(self, updates: int) -> float:
        """See `Curve`."""
        return self._margins[min(updates, len(self._margins) - 1)]


def read_curve(path: Path) -> Recorded:
    """A recorded curve from a CSV file with a header that names `step` and `train_loss`.

    Steps rise; one that was left out has no row, and made no update. Losses are from 0 on. Raises
    `InvalidRequest` that names the file and the line.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            losses = list(_losses(csv.DictReader(file)))
        if not losses:
            raise ValueError("it has no step")
    except (OSError, ValueError, csv.Error) as error:
        message = f"cannot read the loss curve {path}: {error}"
        raise InvalidRequest(message, param="loss_curve") from error
    return Recorded([max(loss, _LEAST_LOSS) for loss in losses])


def _losses(reader: csv.DictReader[str]) -> Iterator[float]:
    """Of each row, whose step must be above the one before. Raises `ValueError`."""
    missing = [name for name in (STEP, LOSS) if name not in (reader.fieldnames or ())]
    if missing:
        raise ValueError(f"its first line names no column {' and no '.join(missing)}")
    before = 0
    for row in reader:
        line = reader.line_num
        try:
            step, loss = int(row[STEP] or ""), float(row[LOSS] or "")
        except ValueError:
            raise ValueError(f"line {line} lacks a whole step or a loss") from None
        if step <= before:
            raise ValueError(f"line {line}: step {step} must be above {before}")
        if not math.isfinite(loss) or loss < 0.0:
            raise ValueError(f"line {line}: the loss {loss:g} is below 0 or not finite")
        before = step
        yield loss


def write_curve(losses: Iterable[float], path: Path) -> None:
    """The losses of a run's updates, in their order, as `read_curve` reads them."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow((STEP, LOSS))
        writer.writerows((step, f"{loss:.6f}") for step, loss in enumerate(losses, start=1))
