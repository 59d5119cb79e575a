"""What a policy decides for one iteration.

A decision is a wish list in order; `scheduling/admission` grants it as far as tokens, blocks,
sequence slots and, if the policy says so, predicted time go, so no policy can break a budget.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec import Struct

from tandem.core.plan import DEVICE_LANE


# A struct, since one is made for every sequence in every iteration (docs/adr/0017). Nobody changes
# one.
class Candidate(Struct, gc=False):
    """Run up to `max_tokens` tokens of one sequence (`None`: as many as fit).

    `may_preempt` lets this candidate take blocks or a sequence slot from the decision's victims.
    """

    seq_id: int
    max_tokens: int | None = None
    may_preempt: bool = False


@dataclass(slots=True)
class SliceCandidate:
    """Run backward slices of one training step: up to `max_layers` layers (`None`: all it has).

    The update is made when no layer is left to do; it needs a candidate, too (of 0 layers).
    """

    step_id: str
    max_layers: int | None = None


@dataclass(frozen=True, slots=True)
class LaneDecision:
    """Candidates of one lane in the order in which they get resources; `share` of its device.

    Training forwards are candidates like any other; `slices` are the backward work beside them.
    With `gives_way`, learning without requests ends between two layers when a request comes.

    With `seconds`, the lane's predicted time (`estimators/latency`, of the whole device) stays
    within it: candidates are granted in order, cut to the rows that fit, up to the first of which
    none do; then slices and updates in the time that is left, up to the first that is cut. So that
    nothing stalls, the first piece of work is granted in any case: a decode, a block of rows of a
    prompt or training forward, a layer, an update.
    """

    candidates: tuple[Candidate, ...]
    share: float = 1.0
    slices: tuple[SliceCandidate, ...] = ()
    gives_way: bool = False
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """A policy's answer to one view.

    `preempt` is done in any case, before anything is admitted. `victims` lists running sequences
    in the order in which they may be preempted when a candidate needs their resources; a
    candidate never preempts one that was granted before it. `evict` orders cached blocks that go
    first when this iteration needs more than are free (before the cache's own order), as many as it
    needs, a parent after its children wherever it is listed. `wake_at` asks for a new decision at
    that time even if nothing arrives.
    """

    lanes: dict[str, LaneDecision] = field(default_factory=dict)
    preempt: tuple[int, ...] = ()
    victims: tuple[int, ...] = ()
    evict: tuple[int, ...] = ()
    wake_at: float | None = None

    @staticmethod
    def on_device(
        candidates: tuple[Candidate, ...],
        *,
        slices: tuple[SliceCandidate, ...] = (),
        victims: tuple[int, ...] = (),
        preempt: tuple[int, ...] = (),
        wake_at: float | None = None,
        gives_way: bool = False,
        seconds: float | None = None,
    ) -> Decision:
        """The common case: everything on the one device lane."""
        lane = LaneDecision(candidates, slices=slices, gives_way=gives_way, seconds=seconds)
        return Decision({DEVICE_LANE: lane}, preempt=preempt, victims=victims, wake_at=wake_at)
