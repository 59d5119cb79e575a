"""RT-LM and its baselines: who starts, with whom, and when."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_policies import Recording, run

from fake_executor import FakeExecutor
from tandem.core.lengths import LEVELS, Forecast
from tandem.core.request import Request
from tandem.core.sampling import SamplingParams
from tandem.core.sequence import Sequence
from tandem.core.slo import Slo, WorkClass
from tandem.kv.cache import KVCache
from tandem.scheduling.bounded_batch import expected_tokens, priority_point_s
from tandem.scheduling.policies.rt_lm import Options, rank_of
from tandem.scheduling.registry import build_policy
from tandem.scheduling.scheduler import Scheduler
from tandem.scheduling.view import Budgets


def scheduler(name: str, **options: str) -> tuple[Scheduler, Recording]:
    policy = Recording(build_policy(name, options))
    info = replace(FakeExecutor(400, 4, max_model_len=500).info, eos_token_ids=())
    return Scheduler(policy, KVCache(400, 4), Budgets(16, 256), info), policy


def request(name: str, answer: int, *, prompt: int = 8, at: float = 0.0, **of: object) -> Request:
    """Its forecast is right."""
    length = Forecast((float(answer),) * len(LEVELS), 400, "test")
    sampling = SamplingParams(max_tokens=answer, ignore_eos=True)
    return Request(name, tuple(range(prompt)), sampling, length=length, arrival_s=at, **of)


def started(target: Scheduler) -> list[str]:
    """Names of what runs after an iteration."""
    run(target, target.schedule(0.0))
    return sorted(seq.request.request_id for seq in target.state.running.values())


def sequence(answer: int, prompt: int = 8, **of: object) -> Sequence:
    made = request("one", answer, prompt=prompt, **of)
    return Sequence(0, made, 0, None, list(made.prompt))


@pytest.mark.parametrize(
    ("policy", "first"),
    [("fifo", ["a", "b"]), ("luf", ["b", "d"]), ("muf", ["a", "c"]), ("hpf", ["b", "c"])],
)
def test_baselines_start_in_their_order(policy, first):
    target, _ = scheduler(policy, batch="2")
    for name, answer, prompt, at in (
        ("a", 90, 60, 0.0),
        ("b", 10, 8, 0.1),
        ("c", 80, 4, 0.2),
        ("d", 20, 30, 0.3),
    ):
        target.add(request(name, answer, prompt=prompt, at=at), None)
    assert started(target) == first


@pytest.mark.parametrize("static", ["true", "false"])
def test_a_static_batch_runs_until_its_longest_answer_ends(static):
    target, _ = scheduler("fifo", batch="2", static=static)
    for name, answer in (("a", 2), ("b", 6), ("c", 6)):
        target.add(request(name, answer), None)
    assert started(target) == ["a", "b"]
    assert started(target) == ["b"]
    assert started(target) == (["b"] if static == "true" else ["b", "c"])
    for _ in range(4):
        last = started(target)
    assert last == ["c"]


def test_answers_of_about_one_length_run_together():
    """Nine have gathered. The sixth of them takes more than 1.5 times as long as the fifth."""
    target, _ = scheduler("rt_lm", batch="8", gather="1.2", phi="10", static="true")
    for name, answer in zip("abcdefghi", (40, 10, 90, 12, 11, 14, 95, 10, 99), strict=True):
        target.add(request(name, answer), None)
    assert started(target) == ["b", "d", "e", "f", "h"]


def test_a_static_batch_has_at_least_half_of_its_places_filled():
    """The third of them takes more than 1.5 times as long as the second."""
    target, _ = scheduler("rt_lm", batch="8", gather="1.2", phi="10", static="true")
    for name, answer in zip("abcdefghi", (40, 70, 190, 12, 11, 174, 195, 197, 199), strict=True):
        target.add(request(name, answer), None)
    assert started(target) == ["a", "b", "d", "e"]


def test_no_place_stays_free_while_requests_wait():
    target, _ = scheduler("rt_lm", batch="3", gather="2")
    for name, answer in zip("abcdefg", (9, 3, 90, 9, 9, 9, 9), strict=True):
        target.add(request(name, answer), None)
    assert started(target) == ["a", "b", "d"], "of six, those that are expected to be shortest"
    assert started(target) == ["a", "b", "d"]
    assert started(target) == ["a", "d"]
    assert started(target) == ["a", "d", "e"], "four wait, and six would gather"


def test_slack_is_the_time_that_remains():
    rank = rank_of(Options(phi=0.1, eta=0.01, alpha=0.0))
    late, fresh = sequence(10, prompt=60), sequence(10, prompt=40, at=5.0)
    assert rank(late, 5.0) == pytest.approx(-1.0 / (6.0 - 0.1 - 5.0))
    assert rank(late, 5.0) < rank(fresh, 5.0) < rank(late, 0.0)


def test_equation_3_prefers_what_is_urgent_and_short():
    rank = rank_of(Options(phi=0.1, eta=0.01))
    long, urgent = sequence(100, prompt=40), sequence(10, prompt=4)
    rank(long, 0.0)  # the largest u
    assert rank(urgent, 0.0) < rank(sequence(10, prompt=40), 0.0) < rank(long, 0.0)
    assert rank(urgent, 0.0) == pytest.approx(-(1 - 0.1) / (0.4 - 0.1))


@given(st.integers(1, 300), st.integers(0, 9), st.sampled_from([0.5, 1.0, 2.0]))
@settings(max_examples=100)
def test_with_equal_slack_a_longer_answer_is_never_more_urgent(short, tens, alpha):
    """A prompt token is worth 0.5 s of slack, an output token costs 0.05 s."""
    rank = rank_of(Options(alpha=alpha, phi=0.5, eta=0.05))
    rank(sequence(400), 0.0)
    longer = sequence(short + 10 * tens, prompt=50 + tens)
    assert rank(sequence(short, prompt=50), 0.0) <= rank(longer, 0.0) + 1e-9


def test_the_literal_equation_inverts_urgency():
    rank = rank_of(Options(literal=True, phi=0.5, eta=0.05))
    urgent, patient = sequence(20, prompt=8), sequence(20, prompt=80)
    assert rank(urgent, 0.0) > rank(patient, 0.0), "a short slack makes it less urgent"
    weighted = rank_of(Options(phi=0.5, eta=0.05))
    assert weighted(urgent, 0.0) < weighted(patient, 0.0)


def test_equation_2_is_the_slack_alone():
    rank = rank_of(Options(slack=True, phi=0.1, eta=0.01))
    assert rank(sequence(50, prompt=20), 0.0) == pytest.approx(2.0 - 0.5)


def test_an_objective_of_its_own_is_the_priority_point():
    assert priority_point_s(sequence(10, slo=Slo(2.0, 0.1)), 0.08) == pytest.approx(3.0)
    assert priority_point_s(sequence(10, prompt=20), 0.08) == pytest.approx(1.6)


@pytest.mark.parametrize(("limit", "counted"), [(50, 12.0), (9, 9.0)])
def test_what_is_not_known_counts_by_its_input_up_to_its_limit(limit, counted):
    made = replace(request("one", limit, prompt=12), length=None)
    assert made.sampling.max_tokens == limit
    assert expected_tokens(Sequence(0, made, 0, None, list(made.prompt))) == counted


def test_online_requests_start_before_offline_ones():
    target, _ = scheduler("luf", batch="1")
    target.add(request("offline", 2, work_class=WorkClass.OFFLINE), None)
    target.add(request("online", 9), None)
    assert started(target) == ["online"]
