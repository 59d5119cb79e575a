"""What a policy decides for one iteration.

A decision is an ordered list of wishes. `scheduling/admission` grants them within the budgets:
tokens, blocks, sequence slots and, if the policy sets it, predicted time. So no policy can exceed a
budget.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec import Struct

from tandem.core.plan import DEVICE_LANE


# A struct, since one is made for every sequence in every iteration (docs/adr/0017). Never changed.
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

    The update is made when no layer is left. It needs a candidate too, with 0 layers.
    """

    step_id: str
    max_layers: int | None = None


@dataclass(frozen=True, slots=True)
class LaneDecision:
    """What one lane should do.

    With `seconds`, candidates are granted in order, each cut to the rows that there is time for,
    until one gets none. Slices and updates follow in the time that is left, until one is cut. The
    first piece of work is granted in any case, so that nothing stalls: a decode, a block of rows of
    a prompt or training forward, a layer, or an update.
    """

    # in the order in which they get resources; training forwards too
    candidates: tuple[Candidate, ...]
    share: float = 1.0  # of the device that the lane may use
    slices: tuple[SliceCandidate, ...] = ()  # backward work beside the candidates
    # Preemptible: learning without requests ends between two layers when a request comes.
    preemptible: bool = False
    # Limit of the lane's predicted time (`estimators/latency`, for the whole device).
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """A policy's answer to one view. Sequences are named by `seq_id`."""

    lanes: dict[str, LaneDecision] = field(default_factory=dict)
    preempt: tuple[int, ...] = ()  # preempted in any case, before anything is admitted
    # Running sequences in the order in which they may be preempted when a candidate needs their
    # resources. A sequence that was granted something in this iteration is never preempted.
    victims: tuple[int, ...] = ()
    # Cached blocks to evict before the cache's own order, if this iteration needs more than are
    # free. A parent follows its children wherever it is listed.
    evict: tuple[int, ...] = ()
    wake_at: float | None = None  # decide again at this time even if nothing arrives

    @staticmethod
    def on_device(
        candidates: tuple[Candidate, ...],
        *,
        slices: tuple[SliceCandidate, ...] = (),
        victims: tuple[int, ...] = (),
        preempt: tuple[int, ...] = (),
        wake_at: float | None = None,
        preemptible: bool = False,
        seconds: float | None = None,
    ) -> Decision:
        """The common case: everything on the one device lane."""
        lane = LaneDecision(candidates, slices=slices, preemptible=preemptible, seconds=seconds)
        return Decision({DEVICE_LANE: lane}, preempt=preempt, victims=victims, wake_at=wake_at)
