"""Policies that do not exist yet fit through the seam: three sketches of them, and a toy.

Each is a policy of some lines in this file, run through the loop over the fake device, which
asserts every rule of a plan.
"""

from __future__ import annotations

import sys
from itertools import pairwise

import pytest
from learning_bench import Bench, request, sft_step

from fake_executor import Costs
from tandem.core.decision import Candidate, Decision, LaneDecision, SliceCandidate
from tandem.core.plan import DEVICE_LANE, LanePlan
from tandem.core.ports import Urgent
from tandem.core.sequence import Sequence
from tandem.core.slo import Slo, WorkClass
from tandem.estimators.terms import coldness
from tandem.estimators.work import PassWork
from tandem.kv.eviction import IdleBlock
from tandem.scheduling.queues import class_then_arrival
from tandem.scheduling.registry import build_policy
from tandem.scheduling.state import class_of
from tandem.scheduling.view import Traits, View


class SharedPrefixFirst:
    """Echo in outline: online first, then the longest cached prefix; unread blocks go first, the
    youngest of them before the others. It hands over the order of all blocks, every time.

    Offline work starts while it leaves online requests the blocks that they will want (5.3)."""

    traits = Traits()

    def __init__(self) -> None:
        self.idle: list[IdleBlock] = []
        self.wish: list[IdleBlock] = []
        self.occupied: list[tuple[int, int]] = []

    def decide(self, view: View) -> Decision:
        waiting = sorted(
            view.waiting,
            key=lambda seq: (
                class_of(seq) is not WorkClass.ONLINE,
                -view.kv.match(seq),
                seq.seq_id,
            ),
        )
        running = sorted(view.running, key=class_then_arrival)
        room = view.kv.num_blocks - view.kv.online_demand_blocks
        room -= sum(blocks_at_its_end(seq, view) for seq in running if is_offline(seq))
        admitted: list[Sequence] = []
        for seq in waiting:
            if is_offline(seq):
                room -= blocks_at_its_end(seq, view)
                if room < 0.0 and (running or admitted):
                    break
            admitted.append(seq)
        self.idle = view.kv.idle_blocks()
        self.wish = sorted(self.idle, key=lambda each: (each.readers, -each.last_access))
        held = tuple(view.kv.held_blocks(each) for each in (WorkClass.ONLINE, WorkClass.OFFLINE))
        self.occupied.append(held)
        lane = LaneDecision(tuple(Candidate(seq.seq_id) for seq in (*running, *admitted)))
        return Decision({DEVICE_LANE: lane}, evict=tuple(each.block for each in self.wish))


def is_offline(seq: Sequence) -> bool:
    return class_of(seq) is WorkClass.OFFLINE


def blocks_at_its_end(seq: Sequence, view: View) -> int:
    return -(-(seq.prompt_tokens + seq.request.sampling.max_tokens) // view.kv.block_size)


class WithinSlack:
    """Echo's time budget in outline (5.1): an iteration ends before the next online token is due,
    or when all decodes could be done, if that is later."""

    traits = Traits()
    seconds = 0.0

    def decide(self, view: View) -> Decision:
        decodes = [seq for seq in sorted(view.running, key=class_then_arrival) if seq.decoding]
        others = [seq for seq in (*view.running, *view.waiting) if not seq.decoding]
        work = PassWork()
        work.decode_all([len(seq.tokens) for seq in decodes])
        online = [seq for seq in (*decodes, *others) if not is_offline(seq)]
        slack_s = min((due_s(seq, view) - view.now for seq in online), default=CEILING_S)
        self.seconds = max(min(slack_s, CEILING_S), view.latency.forward_s(work))
        order = (*decodes, *sorted(others, key=class_then_arrival))
        return Decision.on_device(
            tuple(Candidate(seq.seq_id) for seq in order), seconds=self.seconds
        )


CEILING_S = 0.25


def due_s(seq: Sequence, view: View) -> float:
    slo = view.slo(seq)
    first_s = seq.first_token_s
    due = slo.ttft_s if first_s is None else first_s - seq.request.arrival_s + slo.tpot_s
    return seq.request.arrival_s + due + max(0, seq.output_tokens - 1) * slo.tpot_s


class ByPredictedLength:
    """RT-LM in outline: batches of similar predicted length; the long ones go to a second lane."""

    traits = Traits()

    def __init__(self, batch: int = 2, offload_above: int = 12) -> None:
        self._batch, self._above = batch, offload_above
        self.lane_of: dict[int, str] = {}

    def decide(self, view: View) -> Decision:
        wishes: dict[str, list[Sequence]] = {lane: [] for lane in view.lanes}
        for seq in (*view.running, *sorted(view.waiting, key=predicted_length)):
            lane = self.lane_of.setdefault(seq.seq_id, self.choose(seq, view))
            if len(wishes[lane]) < self._batch:
                wishes[lane].append(seq)
        return Decision(
            {
                lane: LaneDecision(tuple(Candidate(seq.seq_id) for seq in chosen))
                for lane, chosen in wishes.items()
            }
        )

    def choose(self, seq: Sequence, view: View) -> str:
        return view.lanes[predicted_length(seq) > self._above]


def predicted_length(seq: Sequence) -> int:
    return seq.request.sampling.max_tokens


class SharesByLoad:
    """Harli in outline: the fewer sequences, the smaller their share of the device."""

    traits = Traits()

    def decide(self, view: View) -> Decision:
        order = sorted((*view.running, *view.waiting), key=class_then_arrival)
        share = min(1.0, 0.25 * max(1, len(order)))
        lane = LaneDecision(tuple(Candidate(seq.seq_id) for seq in order), share=share)
        return Decision({DEVICE_LANE: lane})


def bench_of(policy, monkeypatch, lanes: tuple[str, ...] = (DEVICE_LANE,), **more: object) -> Bench:
    monkeypatch.setattr("learning_bench.build_policy", lambda name, options: policy)
    return Bench(lanes=lanes, **more)


def serve(bench: Bench, count: int) -> None:
    while len(bench.ended) < count:
        bench.step()
        assert bench.clock.now() < 600.0


def test_offline_work_is_chosen_by_shared_prefix(monkeypatch):
    policy = SharedPrefixFirst()
    bench = bench_of(policy, monkeypatch, max_sequences=1)
    shared = tuple(range(12))
    bench.loop.add(request("first", (*shared, 1), 2))
    serve(bench, 1)
    for name, prompt in (("other", tuple(range(20, 33))), ("sharing", (*shared, 2))):
        bench.loop.add(request(name, prompt, 2, work_class=WorkClass.OFFLINE))
    bench.loop.add(request("online", (7, 7, 7), 2))
    serve(bench, 4)
    ends = sorted(("online", "sharing", "other"), key=lambda name: bench.times[name][-1])
    assert ends == ["online", "sharing", "other"]
    assert bench.ended["sharing"].cached_tokens == 12
    assert max(online for online, _ in policy.occupied) >= 1
    assert max(offline for _, offline in policy.occupied) >= 3


def test_offline_work_leaves_the_blocks_that_online_requests_will_want(monkeypatch):
    """They held up to 12 of 30; then seven offline requests of four blocks each come at once."""
    bench = bench_of(SharedPrefixFirst(), monkeypatch, num_blocks=30)
    for name in range(2):
        bench.loop.add(request(f"online{name}", (name, 1), 22))
    while len(bench.ended) < 2:
        bench.step()
        bench.clock.advance(0.2)
    assert bench.loop.stats().prediction_errors["online_blocks"].samples >= 3
    demand = bench.scheduler.demand.demand
    assert 10.0 < demand < 18.0
    for name in range(7):
        bench.loop.add(request(f"offline{name}", (2, name), 14, work_class=WorkClass.OFFLINE))
    bench.step()
    assert len(bench.plans[-1].spans) == int((30 - demand) / 4) >= 3
    serve(bench, 9)


def test_blocks_leave_in_the_policys_order_and_only_when_they_are_needed(monkeypatch):
    policy = SharedPrefixFirst()
    bench = bench_of(policy, monkeypatch, max_sequences=1, num_blocks=20)
    for name in range(8):  # no two alike: what is not idle any more has left
        bench.loop.add(request(str(name), tuple(range(name, name + 11 + name)), 4))
    evicted = 0
    while len(bench.ended) < 8:
        before = bench.cache.counters.evictions_blocks
        bench.step()
        count = bench.cache.counters.evictions_blocks - before
        gone = [each.block for each in expected_to_leave(policy, count)]
        left = {each.block for each in bench.cache.idle_blocks()}
        assert {each.block for each in policy.idle} - left == set(gone)
        ended = bench.cache.held_blocks == 0  # then its last block is free again
        assert not count or bench.cache.free_blocks == 0 or ended
        evicted += count
    assert evicted > 10


def expected_to_leave(policy: SharedPrefixFirst, count: int) -> list[IdleBlock]:
    """The first `count` by the policy's order, a parent after its only child, which follows it."""
    child = {
        parent.block: child
        for parent, child in pairwise(policy.idle)
        if child.depth == parent.depth + 1
    }
    gone: list[IdleBlock] = []
    for _ in range(count):
        left = [each for each in policy.wish if each not in gone]
        gone.append(next(e for e in left if e.block not in child or child[e.block] in gone))
    return gone


def test_an_iteration_is_predicted_to_end_before_the_next_online_token_is_due(monkeypatch):
    """Offline prompts of 30 rows, beside an answer: all of one would take 150 ms."""
    policy = WithinSlack()
    bench = bench_of(policy, monkeypatch, costs=Costs(iteration_s=0.03, token_s=0.004))
    submit, made = bench.executor.submit, []

    def note_and_submit(plan: LanePlan, urgent: Urgent) -> int:
        seconds = bench.scheduler.latency.forward_s(PassWork.of(plan))
        made.append((plan.num_tokens, seconds, policy.seconds))
        return submit(plan, urgent)

    monkeypatch.setattr(bench.executor, "submit", note_and_submit)
    bench.loop.add(request("online", (1, 2), 60, slo=Slo(ttft_s=0.2, tpot_s=0.04)))
    for name in range(3):
        prompt = tuple((name + row) % 40 for row in range(30))
        bench.loop.add(request(str(name), prompt, 4, work_class=WorkClass.OFFLINE))
    serve(bench, 4)
    assert all(seconds <= most + 1e-9 or rows <= 4 for rows, seconds, most in made)
    assert max(rows for rows, _, _ in made) > 4, "slack was not used"
    assert sum(1 < rows < 30 for rows, _, _ in made) >= 3, "nothing was cut"


def test_batches_are_cut_by_predicted_length_and_long_ones_run_on_another_lane(monkeypatch):
    policy = ByPredictedLength()
    bench = bench_of(policy, monkeypatch, lanes=(DEVICE_LANE, "overflow"))
    lengths = {"a": 4, "b": 20, "c": 6, "d": 5, "e": 16}
    for place, (name, length) in enumerate(lengths.items()):
        bench.loop.add(request(name, (place, 1, 2), length))
    serve(bench, len(lengths))
    for plan in bench.plans:
        assert len(plan.spans) <= 2
        for span in plan.spans:
            assert plan.lane == policy.lane_of[span.seq_id]
    assert {plan.lane for plan in bench.plans} == {DEVICE_LANE, "overflow"}
    long = {seq_id for seq_id, lane in policy.lane_of.items() if lane == "overflow"}
    assert len(long) == 2
    assert bench.times["a"][-1] <= bench.times["d"][-1] <= bench.times["c"][-1]


def test_a_share_of_the_device_reaches_the_plan(monkeypatch):
    bench = bench_of(SharesByLoad(), monkeypatch)
    for name, length in (("a", 3), ("b", 6), ("c", 9)):
        bench.loop.add(request(name, (1, 2, ord(name) % 40), length))
    serve(bench, 3)
    shares = [plan.share for plan in bench.plans]
    assert shares == sorted(shares, reverse=True)
    assert set(shares) == {0.75, 0.5, 0.25}
    # Times on a share are not learned from, but tell how the next pass finds the caches.
    latency, last_s = bench.scheduler.latency, bench.times["c"][-1] - bench.times["c"][-2]
    assert latency.forward.errors.samples == 0
    assert latency._cold == pytest.approx(coldness(last_s), abs=1e-4)


def test_what_one_lane_runs_another_does_not(monkeypatch):
    class Greedy:
        traits = Traits()

        def decide(self, view: View) -> Decision:
            some = (*view.running, *view.waiting, *view.learning)
            everybody = tuple(Candidate(seq.seq_id) for seq in some)
            slices = tuple(SliceCandidate(step.step_id, 1) for step in view.steps)
            return Decision({lane: LaneDecision(everybody, slices=slices) for lane in view.lanes})

    bench = bench_of(Greedy(), monkeypatch, lanes=(DEVICE_LANE, "overflow"), max_sequences=2)
    bench.open("t")
    bench.loop.teaching.add_step(sft_step("s", "t", [6, 5]))
    for number in range(4):
        bench.loop.add(request(f"r{number}", (number, 1), 4))
    bench.run()
    steps: dict[int, list[object]] = {}
    for plan in bench.plans:
        done = steps.setdefault(plan.step, [])
        done += [span.seq_id for span in plan.spans]
        done += [(piece.micro_batch, piece.hi) for piece in plan.slices]
        done += [update.trainer for update in plan.updates]
    assert all(len(ids) == len(set(ids)) for ids in steps.values())
    assert bench.outcomes["s"].applied


class Nothing:
    """Runs nothing, and does not say when it will."""

    traits = Traits()

    def __init__(self) -> None:
        self.asked = 0

    def decide(self, view: View) -> Decision:
        self.asked += 1
        return Decision()


def test_an_engine_does_not_spin_over_a_policy_that_runs_nothing_and_says_so(monkeypatch, caplog):
    policy = Nothing()
    bench = bench_of(policy, monkeypatch)
    bench.loop.add(request("r", (1, 2), 3))
    assert bench.loop.step() == [] and not bench.loop.has_work
    for number in range(200):
        assert 0.005 < bench.loop.pause_s < 0.02
        bench.clock.advance(bench.loop.pause_s)
        assert bench.loop.has_work and bench.loop.step() == []
        if number == 50:  # a command is heard at once
            bench.loop.add(request("s", (1, 2), 3))
            assert bench.loop.has_work and bench.loop.step() == []
    assert policy.asked == 202
    (record,) = caplog.records
    assert "runs nothing although 2 requests wait" in record.getMessage()
    bench.loop.abort("r")
    bench.loop.abort("s")
    assert bench.loop.pause_s > 1e9


TOY = """
from tandem.core.decision import Candidate, Decision
from tandem.scheduling.view import Traits

class LastComeFirstServed:
    traits = Traits()

    def decide(self, view):
        order = sorted((*view.running, *view.waiting), key=lambda seq: -seq.seq_id)
        return Decision.on_device(tuple(Candidate(seq.seq_id) for seq in order))
"""


def test_a_policy_is_one_file(tmp_path, monkeypatch):
    """Nothing but the file is touched: it is found by its module's name."""
    (tmp_path / "toy_policy.py").write_text(TOY)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "toy_policy", raising=False)
    policy = build_policy("toy_policy:LastComeFirstServed")
    bench = bench_of(policy, monkeypatch, max_sequences=1)
    for name in ("a", "b", "c"):
        bench.loop.add(request(name, (ord(name) % 40, 1), 3))
    serve(bench, 3)
    assert sorted(bench.times, key=lambda name: bench.times[name][-1]) == ["c", "b", "a"]


@pytest.mark.parametrize("policy", ["toy_policy", "nowhere:Policy"])
def test_a_policy_that_is_not_there_is_refused_with_what_there_is(policy):
    with pytest.raises(Exception, match="known: adainf, echo, ekya, fcfs, fifo"):
        build_policy(policy)
