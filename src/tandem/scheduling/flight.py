"""Plans whose results are not there yet: one, or two if the second follows the first.

A plan follows another one if it only goes on with that one's answers: each of its tokens is what
the other draws, so it can be made and given to the device before a token is known. Knows no policy.
Invariant: no sequence of a plan in flight is released.
"""

from __future__ import annotations

from collections.abc import Iterator

from tandem.core.plan import UNDRAWN, LanePlan, Span, StepPlan
from tandem.core.sequence import Sequence, SequenceStatus
from tandem.kv.cache import KVCache
from tandem.scheduling.admission import plain_decode
from tandem.scheduling.limits import ends_at
from tandem.scheduling.state import SchedulerState


class Flight:
    """The plans in flight of one scheduler, oldest first."""

    def __init__(
        self, state: SchedulerState, cache: KVCache, max_model_len: int, steps: Iterator[int]
    ) -> None:
        """`steps` gives the numbers of plans."""
        self._state, self._cache, self._max_model_len = state, cache, max_model_len
        self._steps = steps
        self.plans: list[StepPlan] = []
        self._staying: frozenset[int] = frozenset()
        self._left_out: set[int] = set()

    def begin(self, plan: StepPlan) -> None:
        """`plan` was made by a decision, while none was in flight."""
        assert not self.plans, "the last plan has not been applied"
        self.plans.append(plan)

    def follow(self) -> StepPlan | None:
        """Make the plan after the one in flight, if that is known before its results: None if not
        (some sequences then have the block for their next token already).

        To be called where the next decision is the last one again (`Scheduler.steady`). The plan
        must be decodes, of all sequences that run. Nothing may be wanted of it but their tokens,
        and the next draw must depend on nothing else.
        """
        if len(self.plans) != 1 or self._left_out or self._state.num_waiting:
            return None
        lane = _only_lane(self.plans[0])
        if lane is None:
            return None
        spans: list[Span] = []
        going_on = 0
        for span in lane.spans:
            seq = self._state.running.get(span.seq_id)
            if seq is None or not _decodes_plainly(seq, span):
                return None
            if seq.status is SequenceStatus.FINISHED:
                continue
            going_on += 1
            if ends_at(seq, span.end + 1, self._max_model_len):
                continue
            table = self._cache.try_slot(seq, span.end)
            if table is None:
                return None
            spans.append(plain_decode(seq, span.end, UNDRAWN, table))
        running = self._state.running.values()
        if not spans or going_on < sum([seq.status is SequenceStatus.RUNNING for seq in running]):
            return None
        following = LanePlan(next(self._steps), lane.lane, tuple(spans), follows=True)
        plan = StepPlan(following.step, (following,))
        self.plans.append(plan)
        return plan

    def drop_following(self) -> None:
        """The plan that `follow` made was not given to the device."""
        self.plans.pop()

    def land(self) -> tuple[StepPlan, set[int]]:
        """The oldest plan, whose results have come; and sequences whose part in it does not
        count."""
        assert self.plans, "no plan is in flight"
        plan, left_out = self.plans.pop(0), self._left_out
        stay = [span.seq_id for each in self.plans for lane in each.lanes for span in lane.spans]
        self._staying, self._left_out = frozenset(stay), set()
        return plan, left_out

    def holds(self, seq: Sequence) -> bool:
        """Whether a sequence is in a plan that stays in flight, so it cannot be released."""
        return seq.seq_id in self._staying

    def leave_out(self, seq: Sequence) -> None:
        """The plan in flight reads another token of this sequence than was drawn in the end: its
        part in the plan does not count."""
        if self.holds(seq):
            self._left_out.add(seq.seq_id)


def _only_lane(plan: StepPlan) -> LanePlan | None:
    """The lane of a plan that has one, uses the whole device and does no learning; else None."""
    lane = plan.lanes[0]
    if len(plan.lanes) > 1 or lane.share != 1.0 or lane.slices or lane.updates:
        return None
    return lane


def _decodes_plainly(seq: Sequence, span: Span) -> bool:
    """Whether a span is a decode that is wanted for its token alone, and the draw after it is known
    but for that token. A sequence that was redrawn is left to the host, since it may be again."""
    if span.start < seq.prompt_tokens or len(span.tokens) != 1 or len(span.draws) != 1:
        return False
    if seq.scoring is not None or seq.needs_history or seq.redrawn:
        return False
    draw = span.draws[0]
    sampling = draw.sampling
    return sampling.logprobs is None and draw.position >= sampling.min_tokens - 1
