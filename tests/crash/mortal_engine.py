"""The engine process with points in it where it may die. Arguments: the file of the orders."""

from __future__ import annotations

import sys
from pathlib import Path

from mortality import Mortality

from tandem.build import run_engine_process
from tandem.executor import training
from tandem.executor.recorder import Recorder
from tandem.training.checkpoint import Checkpoint

LAYER = 2
"""Of the demo model's five, where a pass is cut."""


def make_mortal(mortality: Mortality) -> None:
    """Put the points into the classes."""
    take, by_hand = Recorder.take, training.LoraReplay.by_hand

    def mortal_take(self, number, hidden):
        if number == LAYER and self._targets:
            mortality.at("mid-forward")
        take(self, number, hidden)

    def mortal_by_hand(self, number, *arguments):
        if number == LAYER:
            mortality.at("mid-backward")
        return by_hand(self, number, *arguments)

    Recorder.take = mortal_take
    training.LoraReplay.by_hand = mortal_by_hand
    state = training.TrainingState
    state.run_slice = mortality.after("between slices", state.run_slice)
    state.run_update = mortality.after(
        "after update", mortality.before("before update", state.run_update)
    )
    Checkpoint._write_files = mortality.after("files written", Checkpoint._write_files)
    Checkpoint.write = mortality.after("files complete", Checkpoint.write)


if __name__ == "__main__":
    # What is left are numbers of cores.
    make_mortal(Mortality(Path(sys.argv.pop(1))))
    run_engine_process()
