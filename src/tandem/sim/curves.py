"""How training goes in a simulation: a model of the falling loss, or the losses of a recorded run.

The margin of a trained pair is beta * (log p(chosen) - log p(rejected)), relative to the reference.
It rises from 0 to `top` with the number of updates, so DPO's loss falls from log 2. This is an
assumption: the gain of a real run depends on data. A recorded run is a CSV file like a fine-tuning
job's result file: one row per update, with its `step` and its `train_loss`.

    margin(n) = top * (1 - exp(-n / updates))
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
# Files have six decimals. A loss of 0 counts as half of the last one.
_LEAST_LOSS = 5e-7


class Curve(Protocol):
    """The learning curve of one trainer."""

    def margin(self, updates: int) -> float:
        """Reference-relative margin of the log-probabilities after so many updates, times beta."""
        ...


@dataclass(frozen=True, slots=True)
class Saturating:
    """The formula of the module. After `updates` updates, 63% of the margin `top` are reached."""

    top: float = 2.0
    updates: float = 50.0

    def margin(self, updates: int) -> float:
        """Margin after so many updates."""
        return self.top * (1.0 - math.exp(-updates / self.updates))


class Recorded:
    """The losses of a recorded run, one per update. Later updates have the last one."""

    def __init__(self, losses: list[float]) -> None:
        """`losses` are DPO losses above 0, each from before its update. Raises `InvalidRequest`."""
        if not losses or not all(math.isfinite(loss) and loss > 0.0 for loss in losses):
            raise InvalidRequest("a recorded curve needs losses above 0", param="loss_curve")
        # -log sigmoid(m) = loss, solved for m without a power that could be too large.
        self._margins = [-loss - math.log(-math.expm1(-loss)) for loss in losses]

    def margin(self, updates: int) -> float:
        """Margin after so many updates."""
        return self._margins[min(updates, len(self._margins) - 1)]


def read_curve(path: Path) -> Recorded:
    """A recorded curve from a CSV file with a header that names `step` and `train_loss`.

    Steps rise. A skipped step has no row, since it made no update. Losses are at least 0. Raises
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
    """The loss of each row. Steps must rise. Raises `ValueError`."""
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
    """Write the losses of a run's updates, in order, in the format of `read_curve`."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow((STEP, LOSS))
        writer.writerows((step, f"{loss:.6f}") for step, loss in enumerate(losses, start=1))
