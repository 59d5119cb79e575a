"""How far versions are from the gate's bounds, as the live studies tell it."""

from __future__ import annotations

from benchmarks.live.api import Version
from benchmarks.live.margins import margins, stated

METRICS = {
    "answers_read": 36,
    "broken_answers": 9,
    "kept": 0.3,
    "asked_kept": 0.6,
    "length": 0.5,
    "asked_length": 1.0,
    "canary_quality_drop": 0.2,
    "canary_divergence": 0.5,
    "asked_divergence": 1.5,
    "chosen_gain": None,
}


def test_a_measure_is_turned_as_the_gate_turns_it() -> None:
    served = stated(Version(1, "rolled_back", "", METRICS))
    refused = [
        stated(Version(number, "refused", "it repeats itself", {**METRICS, "broken_answers": n}))
        for number, n in ((2, 18), (3, 36), (4, 27))
    ]
    waiting = stated(Version(5, "candidate", "", METRICS))
    table = "\n".join(margins([served, *refused, waiting]))
    assert "published (1): least, median, most | refused (3): least, median, most" in table
    assert "| at most 0.08 | 0.25, 0.25, 0.25 | 0.50, 0.75, 1.00 |" in table
    assert "| at least 0.15 | 0.50, 0.50, 0.50 |" in table
    # Half a nat more than the chosen answers' is allowed.
    assert "| at most 0 | -1.50, -1.50, -1.50 |" in table
    assert "| chosen gain, nats a token | at least -0.02 | - | - |" in table


def test_what_was_not_measured_is_left_out() -> None:
    unread = stated(Version(1, "published", "", {"key_share": 1.0}))
    assert all(line.endswith("| - | - |") for line in margins([unread])[3:])
    assert margins([{"version": 1, "state": "published", "reason": ""}]) == []
