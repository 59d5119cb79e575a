"""Which online requests go first once some are too late for their objective.

With first come, first served, every request is late once the queue is longer than the objective.
Here requests that can be in time go first. Late ones get a share of the starts and of the passes
with prompts, so none starves. Invariant: while no request is late, the order is by class and
arrival, and no running request is paused.
"""

from __future__ import annotations

from tandem.core.sequence import Sequence, SequenceStatus
from tandem.core.slo import WorkClass
from tandem.scheduling.policies.unified.load import RUSH
from tandem.scheduling.queues import first_waiting
from tandem.scheduling.view import View

# Late answers are paused only while they are at most this share of the running requests, and
# running sequences are at most this share of the slots. Otherwise pausing helps little, and paused
# answers keep others from starting.
_FEW = 0.5


class Turns:
    """Keeps the requests that it put first, how many of these have started, and the number of
    passes with prompts.

    `late_share` of the starts go to late requests while others are in time. Late answers take part
    in the same share of the passes with prompts. With 1 the order is always by class and arrival,
    and no request is paused.
    """

    def __init__(self, late_share: float) -> None:
        self._late_share = late_share
        self._credit = 0.0
        self._offered: list[Sequence] = []
        self._passes = 0

    def queue(self, view: View, count: int) -> list[Sequence]:
        """The first `count` waiting sequences, in the order in which they should start.

        Preempted answers come first, since their clients are already reading.
        """
        first = first_waiting(view, count)
        if self._late_share >= 1.0 or not view.starts.any_late(view.now):
            return first
        self._settle()
        in_time = view.starts.in_time(view.now, count)
        late = view.starts.late(view.now, count)
        self._offered = self._merge(in_time, late, count)
        begun = view.starts.begun()
        listed = {seq.seq_id for seq in (*begun, *self._offered)}
        rest = [seq for seq in first if seq.seq_id not in listed]
        return [*begun, *self._offered, *rest][:count]

    def resting(
        self, view: View, serving: list[Sequence], joining: list[Sequence], busy: float
    ) -> set[int]:
        """Ids of the running requests that are paused in the next pass. While prompts of `joining`
        start, most of the late answers pause, in turns. Called once per pass of requests. `busy` is
        the share of the time that prompts have had.

        An answer is late if its first token came too late because its request had to wait. It has
        missed its objective whatever happens now, and its row would delay requests that have not.
        """
        share = self._late_share
        if not joining or share >= 1.0 or busy < RUSH:
            return set()
        running, blocks = len(view.running), -(-len(joining[0].tokens) // view.block_size)
        if running > _FEW * view.budgets.max_sequences or running + blocks > view.available_blocks:
            return set()
        self._passes += 1
        default_s = view.default_slo.ttft_s
        late = [seq.seq_id for seq in serving if _is_late(seq, default_s)]
        if len(late) > _FEW * len(serving):
            return set()
        turns = [(seq_id, self._passes + seq_id) for seq_id in late]
        return {seq_id for seq_id, turn in turns if int((turn + 1) * share) == int(turn * share)}

    def _settle(self) -> None:
        """Count how many of the requests offered last have started. They start in order."""
        for seq in self._offered:
            if seq.status is SequenceStatus.WAITING:
                break
            self._credit += self._late_share
            self._credit -= self._credit >= 1.0
        self._offered = []

    def _merge(self, in_time: list[Sequence], late: list[Sequence], count: int) -> list[Sequence]:
        """A late request whenever their share makes up a whole start, else one in time."""
        merged: list[Sequence] = []
        credit, next_in_time, next_late = self._credit, 0, 0
        for _ in range(min(count, len(in_time) + len(late))):
            credit += self._late_share
            turn = credit >= 1.0
            credit -= turn
            if next_late < len(late) and (turn or next_in_time == len(in_time)):
                merged.append(late[next_late])
                next_late += 1
            else:
                merged.append(in_time[next_in_time])
                next_in_time += 1
        return merged


def _is_late(seq: Sequence, default_s: float) -> bool:
    """Whether the first token came too late, because its request had to wait."""
    first_s, began_s, request = seq.first_token_s, seq.first_scheduled_s, seq.request
    if first_s is None or began_s is None or request.work_class is not WorkClass.ONLINE:
        return False
    ttft_s = default_s if request.slo is None else request.slo.ttft_s
    return first_s - request.arrival_s > ttft_s >= first_s - began_s and seq.decoding
