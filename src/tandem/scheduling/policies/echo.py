"""Echo (sections 3 to 5): offline requests in the time and memory that online requests leave.

Online requests go first, first come, first served. Then come the offline requests that run, as far
as there is time until the first online token is due. Once the whole online queue is in, one more
offline prompt may start: the one with the largest (benefit - punishment) / time. Benefit and
punishment are tokens: those that are computed or found in the cache, and those that are evicted
although a waiting request would read them. Learning comes last, in the time that is left.

Where this departs from the paper, docs/policies.md says why.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from tandem.core.decision import Candidate, Decision
from tandem.core.sequence import Sequence
from tandem.core.slo import WorkClass
from tandem.estimators.work import PassWork
from tandem.kv.eviction import ByClass, LeastRecentlyUsed
from tandem.kv.offline_pool import Offered
from tandem.scheduling.queues import is_waiting, num_online, slices_within
from tandem.scheduling.view import Policy, Traits, View

# Share of TPOT to aim at: an objective that is aimed at exactly is missed every other time.
_AIM = 0.9
# Share of the answers that are no longer than what an offline request is taken to need.
_LONG = 0.95
# Seconds of backward slices in an iteration with requests (at least one layer), and without.
_BESIDE_S = 0.02
_ALONE_S = 0.25


@dataclass(frozen=True, slots=True)
class Options:
    """The paper's ablations (section 7.1): BS has none of its three parts, Echo has all."""

    estimator: bool = True  # E: an iteration ends before the first online token is due
    scheduler: bool = True  # S: offline requests are chosen by score, else first come, first served
    # M: blocks are evicted by class and readers, and memory is left for the online requests to come
    cache: bool = True
    # Benefit of a prompt's token, and of a generated one. The paper gives none.
    prefill_weight: float = 1.0
    decode_weight: float = 1.0

    def __post_init__(self) -> None:
        if self.scheduler and not self.estimator:
            raise ValueError("the scheduler needs the estimator's times")
        if min(self.prefill_weight, self.decode_weight) <= 0.0:
            raise ValueError("prefill_weight and decode_weight must be above 0")


def create(options: Options = Options()) -> Policy:
    """The policy of this file."""
    return Echo(options)


class Deadlines:
    """When the next token of each online request is due, in seconds on the engine's clock.

    The first is due at arrival + TTFT, token i after it at i * 0.9 TPOT after the first. A missed
    deadline moves to one TPOT from now, and later ones move along.
    """

    def __init__(self) -> None:
        self._moved_s: dict[tuple[int, bool], float] = {}  # by `seq_id`, and whether it has a token

    def slack_s(self, view: View, sequences: Iterable[Sequence]) -> float:
        """Seconds until the first of their next tokens is due (equation 5); infinity if there is
        none."""
        least_s = math.inf
        for seq in sequences:
            slo, made = view.slo(seq), seq.output_tokens
            if made and seq.first_token_s is not None:
                due_s = seq.first_token_s + made * _AIM * slo.tpot_s
            else:
                due_s = seq.request.arrival_s + slo.ttft_s
            key = (seq.seq_id, made > 0)
            slack_s = due_s + self._moved_s.get(key, 0.0) - view.now
            if slack_s < 0.0:
                tpot_s = _AIM * slo.tpot_s
                self._moved_s[key] = self._moved_s.get(key, 0.0) + tpot_s - slack_s
                slack_s = tpot_s
            least_s = min(least_s, slack_s)
        if len(self._moved_s) > 2 * view.budgets.max_sequences:
            alive = {(seq.seq_id, seq.output_tokens > 0) for seq in (*view.serving, *view.waiting)}
            self._moved_s = {key: moved for key, moved in self._moved_s.items() if key in alive}
        return least_s


@dataclass(slots=True)
class _Batch:
    """What an iteration will run, nearly as admission will grant it."""

    work: PassWork
    rows: int  # left
    seconds: float = math.inf  # that the pass may take
    benefit: float = 0.0  # of what is in it
    full: bool = False  # whether something was cut or is late
    starting: list[Sequence] = field(default_factory=list)  # what waits and gets rows in time

    def add(self, view: View, seq: Sequence, weight: float) -> None:
        """Add what is left of a sequence, as far as there are rows; each is worth `weight`."""
        if self.rows <= 0:
            self.full = True
            return
        if is_waiting(seq) and not self.full:
            self.starting.append(seq)
        start = seq.computed or view.kv.match(seq)
        wanted = len(seq.tokens) - start
        rows = min(wanted, self.rows)
        self.rows -= rows
        self.benefit += weight * rows
        if seq.decoding:
            self.work.decode(len(seq.tokens))
        else:
            self.work.span(start, rows, draws=int(rows == wanted))
        self.full |= rows < wanted or view.latency.forward_s(self.work) > self.seconds


class Echo:
    """Keeps the deadlines that have moved."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._deadlines = Deadlines()
        self.traits = Traits(eviction=ByClass() if options.cache else LeastRecentlyUsed())

    def decide(self, view: View) -> Decision:
        """Online requests, then running offline ones, then one more prompt; learning last."""
        serving, waiting = view.serving, view.waiting_in_order
        first = num_online(serving)
        running, offline = serving[:first], serving[first:]
        # Decodes go first: a prompt may take all the time there is.
        online = sorted(running, key=lambda seq: not seq.decoding)
        online += waiting[: min(num_online(waiting), view.budgets.max_sequences)]
        batch = self._batch(view, online)
        preempted: list[Sequence] = []
        if self._options.scheduler:
            offline = self._by_score(view, batch, offline)
            preempted = offline[: self._in_the_way(view, batch.starting, offline)]
            offline = offline[len(preempted) :]
            chosen = self._choose(view, batch, offline)
        else:
            chosen = [*offline, *_first_offline(view)]
            offline.reverse()
        learning = view.running_in_order[len(serving) :]
        victims = [*reversed(learning), *offline, *reversed(running)]
        wanted = [Candidate(seq.seq_id, None, True) for seq in online]
        first_come = not self._options.scheduler  # then none is preempted for one that came later
        wanted += [Candidate(e.seq_id, None, first_come and not is_waiting(e)) for e in chosen]
        wanted += [Candidate(seq.seq_id) for seq in (*learning, *view.learning_in_order)]
        slices_s = _BESIDE_S if online or chosen else _ALONE_S
        slices, _ = slices_within(view.steps, view.latency, slices_s, True)
        return Decision.on_device(
            tuple(wanted),
            slices=tuple(slices),
            preempt=tuple([seq.seq_id for seq in preempted]),
            victims=tuple([seq.seq_id for seq in victims]),
            seconds=batch.seconds if math.isfinite(batch.seconds) else None,
        )

    def _batch(self, view: View, online: list[Sequence]) -> _Batch:
        """The online requests, in the time until the first of their tokens is due.

        There is time for every decode and a block of a prompt in any case. Prompts are not cut for
        their own deadlines, or those that are late would hold each other up.
        """
        batch, latency = _Batch(PassWork(), view.budgets.max_batch_tokens), view.latency
        decodes = [seq for seq in online if seq.output_tokens]
        timed = bool(online) and self._options.estimator
        if timed:
            least = PassWork()
            least.decode_all([len(seq.tokens) for seq in decodes])
            least.span(0, view.kv.block_size)
            slack_s = self._deadlines.slack_s(view, decodes)
            batch.seconds = max(slack_s, latency.forward_s(least))
        for seq in online:
            batch.add(view, seq, self._weight(seq))
        if timed and not batch.full:
            prompts = [seq for seq in online if not seq.output_tokens]
            due_s = self._deadlines.slack_s(view, prompts)
            batch.seconds = min(batch.seconds, max(due_s, latency.forward_s(batch.work)))
        return batch

    def _choose(self, view: View, batch: _Batch, offline: list[Sequence]) -> list[Sequence]:
        """The offline requests that have their blocks, decodes first, short contexts before long
        ones, since these add least time; and one more prompt, if the online queue is in."""
        chosen = sorted(offline, key=lambda seq: (not seq.decoding, len(seq.tokens), seq.order))
        for seq in chosen:
            batch.add(view, seq, self._weight(seq))
        if not batch.full and batch.rows > 0:
            chosen += self._one_prompt(view, batch)
        return chosen

    def _one_prompt(self, view: View, batch: _Batch) -> list[Sequence]:
        """Of the prompts that the buckets offer the one with the best score (equation 4) for which
        there is room."""
        if len(view.running) >= view.budgets.max_sequences:
            return []
        offers = view.kv.offline_pool.best_of_buckets()
        scored = [(self._score(view, batch, each), each.seq) for each in offers]
        scored.sort(key=lambda pair: (-pair[0], pair[1].order))
        for score, seq in scored:
            if (score > 0.0 or not batch.work.tokens) and self._leaves_room(view, seq):
                return [seq]
        return []

    def _score(self, view: View, batch: _Batch, offered: Offered) -> float:
        """(Benefit - punishment) / time of the iteration with a prompt. What is cached of it counts
        as if it was computed now."""
        seq, start, weight = offered.seq, offered.cached_tokens, self._options.prefill_weight
        rows = min(len(seq.tokens) - start, batch.rows)
        work = batch.work.copy()
        work.span(start, rows)
        seconds = view.latency.forward_s(work)
        if seconds > batch.seconds:  # it gets the part that there is time for
            before_s = view.latency.forward_s(batch.work)
            rows = int(rows * (batch.seconds - before_s) / (seconds - before_s))
            if rows < view.kv.block_size:
                return 0.0
            seconds = batch.seconds
        missing = -(-(start + rows) // view.kv.block_size) - -(-start // view.kv.block_size)
        punishment = weight * view.kv.block_size * view.kv.wanted_evictions(missing)
        return (batch.benefit + weight * (start + rows) - punishment) / seconds

    def _leaves_room(self, view: View, seq: Sequence) -> bool:
        """Whether the blocks of offline requests at their ends, with this one, leave those that
        online requests will want (sections 4.2, 5.3).

        The first offline request need not leave more than online requests hold now. Else a long
        prompt would never start."""
        if not self._options.cache:
            return True
        offline, size = view.serving[num_online(view.serving) :], view.kv.block_size
        more = (
            view.kv.online_demand_blocks - view.kv.held_blocks(WorkClass.ONLINE) if offline else 0.0
        )
        grow = sum([-(-_at_its_end(each) // size) - -(-each.computed // size) for each in offline])
        return grow + view.kv.new_blocks(seq, _at_its_end(seq)) + more <= view.kv.available_blocks

    def _by_score(self, view: View, batch: _Batch, offline: list[Sequence]) -> list[Sequence]:
        """Running offline requests, the one first whose preemption leaves the best score (equation
        4) if all of them take part. The punishment is what it computed itself: its prefix is
        shared."""
        latency, work = view.latency, batch.work.copy()
        decodes = [seq for seq in offline if seq.decoding]
        work.decode_all([len(seq.tokens) for seq in decodes])
        seconds, benefit = latency.forward_s(work), batch.benefit
        benefit += self._options.decode_weight * len(decodes)

        def without(seq: Sequence) -> tuple[float, int]:
            gone, gone_s = self._options.prefill_weight * _own_tokens(seq), 0.0
            if seq.decoding:
                gone += self._options.decode_weight
                gone_s = latency.added_decode_s(len(seq.tokens))
            return (benefit - gone) / max(seconds - gone_s, 1e-6), seq.seq_id

        return sorted(offline, key=without, reverse=True)

    def _in_the_way(self, view: View, starting: list[Sequence], offline: list[Sequence]) -> int:
        """How many of the offline requests, in their order, have to give their blocks to the online
        requests that start. Learning gives its blocks before."""
        missing = sum([view.kv.new_blocks(seq, len(seq.tokens)) for seq in starting])
        learning = view.running_in_order[len(view.serving) :]
        missing -= view.kv.available_blocks + view.kv.blocks_of(learning)
        missing += len(view.running) + len(starting)
        count = 0
        while starting and missing > 0 and count < len(offline):
            missing -= _own_tokens(offline[count]) // view.kv.block_size + 1
            count += 1
        return count

    def _weight(self, seq: Sequence) -> float:
        options = self._options
        return options.decode_weight if seq.decoding else options.prefill_weight


def _at_its_end(seq: Sequence) -> int:
    """Tokens of a sequence with an answer longer than nearly all: its longest, if nothing is
    known of it."""
    length, made = seq.request.length, seq.output_tokens
    answer = seq.request.sampling.max_tokens
    if length is not None:
        answer = min(answer, math.ceil(length.quantile(_LONG, made)))
    return seq.prompt_tokens + answer


def _own_tokens(seq: Sequence) -> int:
    """Tokens of a running sequence that it computed itself."""
    return max(0, seq.computed - seq.cached_tokens)


def _first_offline(view: View) -> list[Sequence]:
    """The offline requests that have waited longest, as many as may start."""
    waiting, slots = view.waiting_in_order, view.budgets.max_sequences - len(view.running)
    begin = num_online(waiting)
    return waiting[begin : begin + max(0, slots)]
