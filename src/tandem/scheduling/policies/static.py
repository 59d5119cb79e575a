"""A fixed share of the device's time for training, whatever requests need (Harli's `static`).

Training and requests alternate by iteration. Training runs alone while it has had less than its
share of the time; otherwise requests run. If one side has nothing that can run, the other runs.
Memory goes to the side that arrived first. If it went to the side whose turn it is, both sides
could lose what they have computed again and again.
"""

from __future__ import annotations

from dataclasses import dataclass

from tandem.core.decision import Decision
from tandem.core.plan import StepPlan
from tandem.core.sequence import SequenceStatus
from tandem.scheduling.queues import is_lone_score
from tandem.scheduling.retraining import serve, train
from tandem.scheduling.training import StepWork
from tandem.scheduling.view import Policy, Traits, View

# Time constant of the decay of used time, in seconds. After this long without a decision, nothing
# is remembered.
_MEMORY_S = 10.0


@dataclass(frozen=True, slots=True)
class Options:
    """Training's part of the time."""

    share: float = 0.4  # of the time, for training (40% in Harli's `static`)
    slice_s: float = 0.1  # longest iteration of training, in seconds

    def __post_init__(self) -> None:
        if not 0.0 < self.share < 1.0 or self.slice_s <= 0.0:
            raise ValueError("share must be above 0 and below 1, slice_s above 0")


def create(options: Options = Options()) -> Policy:
    """The policy of this file."""
    return FixedShare(options)


class FixedShare:
    """Keeps the recent device time of each side, measured by its iterations."""

    traits = Traits()

    def __init__(self, options: Options) -> None:
        self._options = options
        self._used_s = {"training": 0.0, "requests": 0.0}
        self._last_side: str | None = None
        self._last_plan: StepPlan | None = None
        self._decided_s = 0.0

    def decide(self, view: View) -> Decision:
        """Train if that is below its share and can run; otherwise serve."""
        self._account(view)
        step = view.steps[0] if view.steps else None
        requests = bool(view.waiting or view.serving)
        if step is not None and (not requests or self._trains(view, step)):
            self._last_side = "training"
            return train(view, {step.step_id}, self._options.slice_s, step.arrival_s)
        self._last_side = "requests" if requests else None
        return serve(view, pause=True)

    def _trains(self, view: View, step: StepWork) -> bool:
        """Whether it is training's turn although requests exist. A turn that one side cannot use
        goes to the other side."""
        if not _can_serve(view):
            return True
        owed = self._used_s["training"] < self._options.share * sum(self._used_s.values())
        return owed and _can_train(view, step)

    def _account(self, view: View) -> None:
        """Add the last iteration's time to the side that was chosen for it; decay both sides."""
        passed, self._decided_s = view.now - self._decided_s, view.now
        keep = max(0.0, 1.0 - passed / _MEMORY_S)
        for side in self._used_s:
            self._used_s[side] *= keep
        ran = view.last_plan is not self._last_plan
        self._last_plan = view.last_plan
        if self._last_side is not None and ran:
            # `passed` may include idle time, so the iteration's own time counts.
            elapsed_s = max(result.elapsed_s for result in view.last_results)
            self._used_s[self._last_side] += min(elapsed_s, _MEMORY_S)


def _can_serve(view: View) -> bool:
    """Whether a request can run. False if paused training that arrived earlier holds the blocks or
    slots that it needs."""
    running = view.running_in_order
    paused = [seq for seq in running if seq.scoring is not None and not is_lone_score(seq)]
    if not paused or len(paused) < len(running):
        return True
    first = view.waiting_in_order[0]
    if first.request.arrival_s <= paused[0].request.arrival_s:
        return True
    needed = -(-len(first.tokens) // view.kv.block_size) + len(running)
    return needed <= view.kv.available_blocks and len(running) < view.budgets.max_sequences


def _can_train(view: View, step: StepWork) -> bool:
    """Whether a part of the step can run. False if requests that arrived earlier hold the blocks or
    slots that it needs."""
    sequences = list(step.sequences.values())
    if step.owed() or any(seq.status is SequenceStatus.RUNNING for seq in sequences):
        return True
    if not sequences:
        return step.updatable
    kept = [
        seq
        for seq in view.running_in_order
        if is_lone_score(seq) or seq.request.arrival_s <= step.arrival_s
    ]
    needed = -(-len(sequences[0].tokens) // view.kv.block_size) + len(kept)
    fits = needed <= view.kv.num_blocks - view.kv.blocks_of(kept)
    return fits and len(kept) < view.budgets.max_sequences
