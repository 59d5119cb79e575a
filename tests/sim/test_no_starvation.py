"""Nobody starves: more online requests wait than can start, for as long as anything else is there.

Of every policy it is said here which class it lets starve, and why; and of `unified` for how long
an offline request waits at most (docs/unified.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from small_load import config, load, run_one, small_profile

from tandem.build import build_simulation
from tandem.core.clock import VirtualClock
from tandem.core.request import Request
from tandem.core.sampling import SamplingParams
from tandem.core.slo import WorkClass
from tandem.core.training import ScoreRequest, StepOutcome, TrainingStep
from tandem.scheduling.registry import known_policies

# By design: what a policy does not promise under such a load.
BATCHES = {
    "offline": "classes come in order, and there is no ageing",
    "learning": "it starts when no request can",
}
STARVES = {
    **dict.fromkeys(("fifo", "hpf", "luf", "muf", "rt_lm"), BATCHES),
    "adainf": {
        "online": "training goes first, for as long as there is any",
        "offline": "classes come in order, and there is no ageing",
    },
    "echo": {
        "offline": "they run once the whole online queue is in",
        "learning": "it comes behind all requests; the paper has none",
    },
    "ekya": {"offline": "classes come in order, and there is no ageing"},
    "fcfs": {
        "offline": "classes come in order, and there is no ageing",
        "learning": "it starts when no request waits",
    },
    "no_retrain": {
        "offline": "classes come in order, and there is no ageing",
        "learning": "training steps never run",
    },
    "priority": {"learning": "it is less urgent than any request, and there is no ageing"},
    "static": {"offline": "classes come in order, and there is no ageing"},
}
ALL = [(policy, kind) for policy in known_policies() for kind in ("offline", "learning")]
# So that runs may be short: what has waited goes first after a second, not half a minute.
OPTIONS = {
    "unified": {"patience_s": "1", "min_share": "0.1"},
    "ekya": {"interval_s": "1"},
}
# What a policy is told so that steps end soon: their turn comes within about a second; a step takes
# up to 0.6 s where there are few rows, of which `unified` gives it a tenth of the time at least.
LEARNS = {
    "adainf": {},
    "ekya": {"interval_s": "1"},
    "mace": {"delta_ft": "3"},
    "static": {},
    "unified": {"patience_s": "0.5", "min_share": "0.1"},
}
MANY = 1500  # iterations; where nothing starves, a fifth of them or less are needed

Shape = tuple[int, int]  # tokens of a prompt and of its answer


def request(shape: Shape, kind: WorkClass, number: int) -> Request:
    """One of a class, with a prompt of its own."""
    prompt = tuple((number + row) % 5 for row in range(shape[0]))
    params = SamplingParams(max_tokens=shape[1], temperature=0.0, ignore_eos=True)
    return Request(f"{kind} {number}", prompt, params, work_class=kind)


@dataclass
class Ended:
    """Times of the tokens of each request, in the order of arrival, and when each step ended."""

    online: list[list[float]] = field(default_factory=list)
    offline: list[list[float]] = field(default_factory=list)
    steps: int = 0
    iterations: int = 0
    ended_s: float = 0.0


def overload(
    policy: str,
    online: Sequence[Shape],
    offline: Sequence[Shape] = (),
    steps: int = 0,
    blocks: int = 64,
    **scheduling: object,
) -> Ended:
    """Until all of `offline` have ended, or the steps if there are none; those of `online` come
    again and again, so that there are always more of them waiting than there are sequence slots."""
    clock, found = VirtualClock(), Ended()
    chosen = config(policy, **scheduling)
    loop, _ = build_simulation(chosen, small_profile(blocks), clock)
    arrivals, trainers = load([(0.0, 1, 1)], steps)
    for spec in trainers:
        loop.teaching.open_trainer(spec)

    def add(shape: Shape, kind: WorkClass, times: list[list[float]]) -> None:
        number = len(times)
        times.append([])
        loop.add(request(shape, kind, number))

    def keep_coming() -> None:
        while len(loop.scheduler.state.starts) <= chosen.scheduling.max_sequences:
            add(online[len(found.online) % len(online)], WorkClass.ONLINE, found.online)

    keep_coming()
    for shape in offline:
        add(shape, WorkClass.OFFLINE, found.offline)
    for arrival in arrivals:
        if isinstance(arrival.work, TrainingStep):
            loop.teaching.add_step(arrival.work)
    unfinished = len(offline)
    while (unfinished if offline else found.steps < steps) and found.iterations < MANY:
        keep_coming()
        for event in loop.step():
            kind, number = event.request_id.split()
            times = found.online if kind == "online" else found.offline
            times[int(number)] += [clock.now()] * len(event.tokens)
            unfinished -= kind == "offline" and event.finish_reason is not None
        found.steps += sum(each.applied for each in loop.teaching.take_learned())
        found.iterations += 1
    found.ended_s = clock.now()
    return found


TYPICAL = [(12, 8), (3, 12), (25, 4)]


@pytest.mark.parametrize(("policy", "kind"), ALL)
def test_a_class_starves_only_where_it_is_said(policy, kind):
    offline, steps = ([(9, 6)] * 3, 0) if kind == "offline" else ([], 3)
    found = overload(
        policy, TYPICAL, offline, steps, blocks=64, policy_options=OPTIONS.get(policy, {})
    )
    assert (found.iterations == MANY) == (kind in STARVES.get(policy, {}))
    if found.iterations == MANY:
        assert not any(found.offline) and not found.steps


def beside_endless_training(policy: str, shapes: Sequence[Shape]) -> Ended:
    """Until online requests of `shapes` have ended, of which one comes after the other, while there
    are always two training steps and as many offline requests as can run."""
    clock, found = VirtualClock(), Ended()
    options = OPTIONS | {"ekya": {"interval_s": "5"}}  # a window, of two steps, takes over a second
    chosen = config(policy, policy_options=options.get(policy, {}))
    loop, _ = build_simulation(chosen, small_profile(), clock)
    arrivals, trainers = load([(0.0, 1, 1)], MANY)
    works = iter([each.work for each in arrivals if isinstance(each.work, TrainingStep)])
    for spec in trainers:
        loop.teaching.open_trainer(spec)

    ended = offline = 0
    loop.add(request(shapes[0], WorkClass.ONLINE, 0))
    while ended < len(shapes) and found.iterations < MANY:
        while len(loop.scheduler.learning.queued) < 2:
            loop.teaching.add_step(next(works))
        while len(loop.scheduler.state.all) < chosen.scheduling.max_sequences:
            loop.add(request((9, 6), WorkClass.OFFLINE, offline))
            offline += 1
        clock.advance(loop.pause_s)
        for event in loop.step():
            if event.finish_reason is not None and event.request_id.startswith(WorkClass.ONLINE):
                ended += 1
                if ended < len(shapes):
                    loop.add(request(shapes[ended], WorkClass.ONLINE, ended))
        found.steps += sum(isinstance(each, StepOutcome) for each in loop.teaching.take_learned())
        found.iterations += 1
    return found


@pytest.mark.parametrize("policy", known_policies())
def test_online_requests_starve_only_where_it_is_said(policy):
    """Beside training and offline requests without end."""
    found = beside_endless_training(policy, 12 * TYPICAL)
    assert (found.iterations == MANY) == ("online" in STARVES.get(policy, {}))
    assert found.steps > 0 or "learning" in STARVES.get(policy, {})


@pytest.mark.parametrize(
    ("online", "offline", "blocks", "slots", "rows"),
    [((2, 40), 50, 19, 5, 7), ((2, 40), 20, 20, 8, 13), ((8, 40), 50, 19, 5, 4)],
)
def test_an_overdue_request_is_not_preempted_again_and_again(online, offline, blocks, slots, rows):
    """Where answers that grow take all blocks, and its prompt needs several iterations."""
    options = {"patience_s": "0.1", "min_share": "0.1"}
    found = overload(
        "unified",
        [online],
        [(offline, 10)],
        blocks=blocks,
        max_sequences=slots,
        max_batch_tokens=rows,
        policy_options=options,
    )
    assert found.iterations < 140  # what runs ends within 40; the rest are prompts and its answer
    (times,) = found.offline
    assert len(times) == 10 and max(b - a for a, b in pairwise(times)) < 0.05


@pytest.mark.parametrize("policy", ["mace", "static"])
def test_steps_end_and_requests_start_at_full_load(policy):
    """20 requests/s for a minute: the three steps end within it, and every request is begun."""
    arrivals, trainers = load([(0.05 * place, 12, 8) for place in range(1200)], steps=3)
    report, _, _ = run_one(policy, arrivals, trainers, small_profile(256), ttft_slo=0.5)
    made = [step for step in report.steps if step.applied]
    assert len(made) == 3 and max(step.finished_s for step in made) < 60.0
    waits = [outcome.ttft_s for outcome in report.outcomes.values()]
    assert len(waits) == 1200 and not any(map(math.isnan, waits))


SHAPES = st.tuples(st.integers(1, 30), st.integers(1, 12))


@settings(max_examples=20)
@given(
    online=st.lists(SHAPES, min_size=1, max_size=4),
    offline=st.lists(SHAPES, min_size=1, max_size=3),
    steps=st.integers(0, 1),
    blocks=st.integers(20, 80),
    slots=st.integers(1, 8),
    rows=st.integers(2, 32),
    patience_s=st.sampled_from([0.1, 1.0]),
)
def test_an_offline_request_waits_no_longer_than_is_said(
    online, offline, steps, blocks, slots, rows, patience_s
):
    """Once those before it have ended: for each of its tokens twice the patience, since time that
    was used ahead counts for as long; and until there is room, but for requests that started
    already or start together. Slots, rows (fewer than decodes, even) and blocks may all be taken
    by online requests, and it is preempted."""
    options = {"patience_s": str(patience_s)}
    found = overload(
        "unified",
        online,
        offline,
        steps,
        blocks=blocks,
        max_sequences=slots,
        max_batch_tokens=rows,
        policy_options=options,
    )
    firsts = [times[0] for times in found.online if times]
    oldest_s = 0.0
    for shape, times in zip(offline, found.offline, strict=True):
        assert len(times) == shape[1]
        for since_s, got_s in pairwise((oldest_s, *times)):
            passed = sum(since_s + 2 * patience_s < first_s < got_s for first_s in firsts)
            assert passed <= 2 * slots
        oldest_s = max(oldest_s, times[-1])


@settings(max_examples=15)
@given(
    online=st.lists(SHAPES, min_size=1, max_size=4),
    steps=st.integers(1, 3),
    blocks=st.integers(20, 80),
    slots=st.integers(1, 8),
    spare=st.integers(1, 24),
)
# Requests of which every fourth iteration is like the one before: looks at learning must not always
# fall into those that have no room for it.
@example(online=[(2, 4)], steps=1, blocks=20, slots=4, spare=2)
# Of which every fourth iteration seems to have room for learning, but its decodes take the blocks.
@example(online=[(28, 2), (20, 6)], steps=1, blocks=40, slots=7, spare=8)
@pytest.mark.parametrize("policy", sorted(LEARNS))
def test_steps_end_within_a_bound_whatever_requests_come(
    policy, online, steps, blocks, slots, spare
):
    """Those that wait behind others included; while requests leave a row (docs/unified.md)."""
    found = overload(
        policy,
        online,
        (),
        steps,
        blocks=blocks,
        max_sequences=slots,
        max_batch_tokens=slots + spare,
        policy_options=LEARNS[policy],
    )
    assert found.steps == steps
    assert found.ended_s <= 1.0 + 7.0 * steps


def beside_endless_scores(shape: Shape, requests: int, rows: int, **options: str) -> Ended:
    """Until so many offline requests have ended, beside scores that fill each iteration, but for
    what a request takes, and never end with one: something always holds blocks. The cache has 14.
    Times count from when the requests came."""
    clock, found, asked, scored = VirtualClock(), Ended(), 0, 0
    chosen = config("unified", max_batch_tokens=rows, policy_options=options)
    loop, _ = build_simulation(chosen, small_profile(14), clock)

    def keep_scoring() -> None:
        nonlocal asked, scored
        while asked - found.steps < 4:
            length = 10 if (scored + 9) % rows else 11  # the last token is not forwarded
            tokens = tuple(range(100 * asked, 100 * asked + length))
            loop.teaching.add_score(ScoreRequest(f"score {asked}", tokens, 1))
            asked += 1
            scored += length - 1

    keep_scoring()
    params = SamplingParams(max_tokens=shape[1], temperature=0.0, ignore_eos=True)
    for number in range(requests):
        found.offline.append([])
        prompt = tuple(range(number, number + shape[0]))
        loop.add(Request(str(number), prompt, params, work_class=WorkClass.OFFLINE))
    unfinished = requests
    while unfinished and found.iterations < MANY:
        keep_scoring()
        clock.advance(loop.pause_s)
        for event in loop.step():
            found.offline[int(event.request_id)] += [clock.now()] * len(event.tokens)
            unfinished -= event.finish_reason is not None
        found.steps += len(loop.teaching.take_learned())
        found.iterations += 1
    return found


@pytest.mark.parametrize(
    ("patience_s", "temporal"), [("0.5", "false"), ("0.05", "false"), ("0.05", "true")]
)
def test_an_offline_request_does_not_starve_beside_learning_that_always_holds_blocks(
    patience_s, temporal
):
    """It needs nearly all of them; nobody takes those of learning that has waited for long, and no
    online request starts at all."""
    options = {"patience_s": patience_s, "min_share": "0.1"}
    found = beside_endless_scores((51, 5), 3, 8, temporal_only=temporal, **options)
    assert found.iterations < MANY and found.steps >= 3
    waits = [after[0] - before[-1] for before, after in pairwise(([0.0], *found.offline))]
    assert max(waits) < 3.0
    # Scores for which there are no blocks take no time. In turns, one that is starving may take a
    # block of the request, which is computed again.
    again_s = 0.053 if temporal == "true" else 0.0
    assert max(times[-1] - times[0] for times in found.offline) < 4 * 0.021 + 0.01 + again_s


@pytest.mark.parametrize("policy", ["fcfs", "fifo", "hpf", "luf", "muf", "rt_lm"])
def test_a_score_that_has_begun_ends_although_a_request_waits_for_its_place(policy):
    clock = VirtualClock()
    chosen = config(policy, max_batch_tokens=8, max_sequences=1)
    loop, _ = build_simulation(chosen, small_profile(64), clock)
    loop.teaching.add_score(ScoreRequest("score", tuple(range(21)), 1))
    loop.step()
    loop.add(request((4, 2), WorkClass.ONLINE, 0))
    ended = set()
    for _ in range(40):
        clock.advance(loop.pause_s)
        ended |= {each.request_id for each in loop.step() if each.finish_reason is not None}
        ended |= {each.request_id for each in loop.teaching.take_learned()}
    assert ended == {"score", "online 0"}
