"""Claims are judged where the paper makes them; what does not hold is said with its reason."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from benchmarks.mace.claims import Claim, Results, claims
from benchmarks.mace.measured import Capacity, Measured
from benchmarks.mace.overhead import Overhead
from benchmarks.mace.report import as_markdown, as_page
from benchmarks.mace.runs import FIFO_VARIANTS, SCALES, VARIANTS, Figures
from tandem.estimators.datasheet import load_profile

SERVER, EDGE = SCALES
PROFILES = {scale.name: load_profile(scale.profile) for scale in SCALES}
RATES = (0.0, 0.1, 0.5)
REQUEST_RATES = (3.0, 12.0, 18.0)


def row(variant: str, retrain_rate: float, request_rate: float = 12.0) -> Figures:
    """The same for everybody."""
    return Figures(
        variant, retrain_rate, request_rate, 100.0, 1.0, 2.0, 0.05, 3.0, 0.9, 10, 0.02, 0.3, 4, 4,
        0, 60.0,
    )  # fmt: skip


def results(scale=SERVER, **changes: dict) -> Results:
    """Equal figures, but for `changes`: by part (rates, loads, fifo), by variant, field: value or a
    function of the row."""

    def changed(part: str, each: Figures) -> Figures:
        found = changes.get(part, {}).get(each.variant, {})
        return replace(each, **{k: v(each) if callable(v) else v for k, v in found.items()})

    return Results(
        scale,
        PROFILES[scale.name],
        [changed("rates", row(each.name, rate)) for rate in RATES for each in VARIANTS],
        [
            changed("loads", row(each.name, 0.2, rate))
            for rate in REQUEST_RATES
            for each in VARIANTS
        ],
        [changed("fifo", row(each.name, rate)) for rate in RATES for each in FIFO_VARIANTS],
        [Overhead(each.name, 10, **changes.get("cost", COST)) for each in VARIANTS],
    )


COST = {"schedule_s": 0.0005, "state_bytes": 6_000_000}


def found(given: Results, text: str) -> Claim:
    (claim,) = [claim for claim in claims(given) if claim.text.startswith(text)]
    return claim


@pytest.mark.parametrize("scale", SCALES, ids=lambda scale: scale.name)
def test_among_equals_only_equality_holds_and_all_else_has_a_reason(scale):
    given = results(scale)
    for claim in claims(given):
        assert claim.holds == claim.text.startswith("unified")
        assert bool(claim.reason) != claim.holds
    page = as_markdown(given)
    for claim in claims(given):
        assert (f"* {claim.text}: {claim.reason}" in page) != claim.holds


def test_a_latency_has_to_be_lower_at_every_rate_and_not_at_the_best():
    """The paper names no rate for its 63%."""
    slow = {"ttft_s": lambda each: 10.0 if each.retrain_rate == 0.5 else 2.0}
    prefill = found(results(rates={"adainf": slow}), "prefill latency")
    assert not prefill.holds and prefill.found == "50% at 10%, 90% at 50%"
    assert "reached at 50%" in prefill.reason
    slow = {"ttft_s": 10.0}
    prefill = found(results(rates={"adainf": slow}), "prefill latency")
    assert prefill.holds and prefill.reason == ""


def test_what_no_policy_could_reach_is_told_from_what_mace_does_not():
    """Without training 1 s, adainf's 2 s: 50% at most. With 10 s there would be room."""
    near = {"ttft_s": lambda each: 2.0 if each.retrain_rate else 1.0}
    far = {"ttft_s": lambda each: 10.0 if each.retrain_rate else 1.0}
    slow = {"ttft_s": lambda each: 8.0 if each.retrain_rate else 1.0}
    reason = found(results(rates={"adainf": near}), "prefill latency").reason
    assert "50% and 50% below is all that could be had" in reason
    reason = found(results(rates={"adainf": far, "mace": slow}), "prefill latency").reason
    assert "all that could be had" not in reason
    assert "`mace` takes 8000 and 8000 ms, adainf 10000 and 10000 ms" in reason


def test_the_edge_device_has_claims_of_its_own():
    quick = {"tbt_s": 0.03, "throughput": 120.0}
    assert found(results(EDGE, rates={"mace": quick}), "decode latency").holds
    assert found(results(EDGE, rates={"mace": quick}), "throughput").holds
    assert "not built" in found(results(EDGE), "decode latency").reason
    texts = [claim.text for claim in claims(results(SERVER))]
    assert not any(text.startswith("decode latency") for text in texts)


def test_throughput_is_judged_at_the_rate_that_the_paper_names():
    at = {"throughput": lambda each: 150.0 if each.retrain_rate == 0.1 else 100.0}
    assert found(results(rates={"mace": at}), "throughput").holds
    at = {"throughput": lambda each: 150.0 if each.retrain_rate == 0.5 else 100.0}
    missed = found(results(rates={"mace": at}), "throughput")
    assert not missed.holds and "1.00 times is all that could be had" in missed.reason
    idle = {"throughput": lambda each: 100.0 if each.retrain_rate else 200.0}
    missed = found(results(rates={"adainf": idle}), "throughput")
    assert "all that could be had" not in missed.reason


def by_load(**ends: tuple[float, float]) -> dict:
    return {
        name.replace("_", "/"): {
            "attainment": lambda each, span=span: span[each.request_rate == REQUEST_RATES[-1]]
        }
        for name, span in ends.items()
    }


@pytest.mark.parametrize(
    ("without", "holds"),
    [((0.9, 0.1), True), ((0.9, 0.3), False), ((0.5, 0.19), False), ((0.9, 0.19), True)],
)
def test_without_bins_attainment_has_to_fall_most_over_load(without, holds):
    given = results(loads=by_load(mace=(0.9, 0.5), mace_bin=without, mace_prefix=(0.9, 0.4)))
    assert found(given, "without bins").holds == holds


def test_the_hybrid_in_order_of_arrival_has_to_need_fewer_iterations_than_anybody():
    fewer = {"mace/fifo": {"iterations": 9}}
    assert found(results(fifo=fewer), "in order of arrival").holds
    fewer["ekya"] = {"iterations": lambda each: 8 if each.retrain_rate == 0.5 else 10}
    missed = found(results(fifo=fewer), "in order of arrival")
    assert not missed.holds
    assert "at 50% `ekya` takes 8" in missed.reason and "at 10%" not in missed.reason


def test_scheduling_is_held_to_the_papers_milliseconds_and_megabytes():
    cheap = results(cost={"schedule_s": 0.0001, "state_bytes": 4_000_000})
    for text in ("scheduling an iteration", "the scheduler's memory"):
        assert found(cheap, text).holds and not found(results(), text).holds


@pytest.mark.parametrize(
    ("name", "worse"),
    [("ttft_s", 1.1), ("tbt_s", 1.1), ("throughput", 90.0), ("attainment", 0.8)],
)
def test_unified_has_to_be_as_good_at_every_rate(name, worse):
    at = {name: lambda each: worse if each.retrain_rate == 0.5 else getattr(each, name)}
    missed = found(results(rates={"unified": at}), f"unified at least as good as mace: {name}")
    assert not missed.holds and missed.found == "at 1 of 2 retrain rates"
    assert missed.reason.startswith("At 50% ")


def test_the_page_has_a_table_for_each_part():
    page = as_markdown(results(fifo={"mace/fifo": {"iterations": 7}}))
    for part in ("Figure 12:", "Figure 13:", "Table 1:"):
        assert part in page
    assert "| `mace/fifo` | 7, 20.0 | 7, 20.0 | 7, 20.0 |" in page
    assert "| `mace` | 0.50 | 0.11 to 0.15 | 6.0 | 3.5 to 4.5 |" in page
    bare = replace(results(), fifo=[], overheads=[])
    assert "Figure 13" not in as_markdown(bare) and "Table 1" not in as_markdown(bare)


def measured(rounds: int) -> Results:
    """As if that had not been simulated."""
    capacity = Capacity(ttft_s=0.03, forward_s=0.02, tpot_s=0.01, request_s=0.1, job_s=0.8)
    how = Measured({"cpu": "a fine one", "cores": 3}, capacity, 0.5, rounds, others=0.07)
    group = [row("mace", 0.1), replace(row("mace", 0.1), ttft_s=3.0)][:rounds]
    return replace(results(), measured=how, runs={"rates": [group], "loads": [], "fifo": []})


def test_what_was_measured_claims_nothing_and_says_where_and_how():
    found = measured(rounds=2)
    page = as_markdown(found)
    assert claims(found) == [] and "| claim |" not in page and "three runs" not in page
    for text in (
        "cpu: a fine one, cores: 3.", "364200 GFLOP/s", "took 7.0% of the cores",
        "first token after 30 ms (its forward: 20 ms by the profile) and then one every 10.0 ms",
        "100 ms of the machine, a job that is alone 800 ms",
        "first token within 5 times its prompt's own forward", "every 0.5 s", "of 2 rounds",
        "0% in output tokens/s, 100% in mean TTFT, 0% in TBT",
        "| `mace/fifo` |", "| `mace/prefix` | 90%, 100 |", "Table 1:",
    ):  # fmt: skip
        assert text in page, text
    alone = as_markdown(measured(rounds=1))
    assert "of one round" in alone and "differ" not in alone


def test_the_heading_tells_what_is_simulated():
    simulated, other = results(), measured(rounds=1)
    for found, heading in (
        ([simulated], "# MACE at the paper's scale, simulated"),
        ([other], "# MACE at a small scale, measured"),
        (
            [simulated, other],
            "# MACE at the paper's scale, simulated; at a small scale, measured",
        ),
    ):
        assert as_page(found).splitlines()[0] == heading


def test_the_page_says_whose_requests_did_not_end():
    assert "cut off" not in as_markdown(results())
    page = as_markdown(results(loads={"ekya": {"unfinished": 3}}))
    assert "`ekya` 3 at " in page and "failed, or were cut off" in page


@pytest.mark.parametrize("name", ["ttft_s", "tbt_s"])
def test_nothing_is_claimed_of_those_who_never_got_so_far(name):
    """Nobody had two tokens, say."""
    nobody = results(rates={"unified": {name: math.nan}})
    assert not found(nobody, f"unified at least as good as mace: {name}").holds


def test_no_tokens_are_no_throughput_to_compare_with():
    nothing = results(rates={"adainf": {"throughput": 0.0}}, loads={"adainf": {"throughput": 0.0}})
    assert not found(nothing, "throughput over adainf's").holds
