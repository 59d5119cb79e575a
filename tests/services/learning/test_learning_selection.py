"""Which samples, in which steps."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tandem.core.learning import SampleKind
from tandem.services.learning.selection import (
    UNSCORED_LOSS,
    choose,
    plan_steps,
    priority,
    to_go_on,
    within_shares,
)
from tandem.services.learning.settings import LearningSettings
from tandem.store.samples import SampleHead

NOW_S = 10_000.0


def head(row: int, **changes: object) -> SampleHead:
    made = SampleHead(
        row=row,
        sample_id=f"s{row}",
        kind=SampleKind.DPO,
        created_s=NOW_S - 100.0,
        weight=1.0,
        uses=0,
        loss=None,
        version=None,
        conversation=f"c{row}",
        user="",
        key_id="",
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def test_priority_grows_with_age_and_loss() -> None:
    fresh = head(1, created_s=NOW_S)
    assert priority(fresh, NOW_S) == UNSCORED_LOSS
    assert priority(head(1), NOW_S) > priority(fresh, NOW_S)
    assert priority(head(1, loss=2.0), NOW_S) > priority(head(1), NOW_S)


def test_misaligned_and_old_samples_come_first() -> None:
    heads = [head(1, loss=0.1), head(2), head(3, loss=3.0), head(4, created_s=NOW_S - 90_000.0)]
    assert [h.sample_id for h in choose(heads, 3, 1.0, NOW_S)] == ["s4", "s3", "s2"]


@given(
    keys=st.lists(st.sampled_from("abcd"), max_size=40),
    most=st.integers(1, 32),
    share=st.sampled_from([0.1, 0.25, 0.34, 0.5, 0.9, 1.0]),
)
def test_no_key_exceeds_its_share(keys: list[str], most: int, share: float) -> None:
    heads = [head(row, key_id=key) for row, key in enumerate(keys)]
    chosen = choose(heads, most, share, NOW_S)
    assert len(chosen) <= most and len({h.row for h in chosen}) == len(chosen)
    counts = Counter(h.key_id for h in chosen)
    assert all(count <= share * len(chosen) + 1e-9 for count in counts.values())
    if share == 1.0:
        assert len(chosen) == min(most, len(heads))
    assert chosen == choose(list(reversed(heads)), most, share, NOW_S)
    assert within_shares([h.key_id for h in chosen], share)
    fits = within_shares(keys, share)
    assert fits == (len(choose(heads, len(heads), share, NOW_S)) == len(heads))


def test_steps_have_one_kind_and_a_share_of_replay() -> None:
    settings = LearningSettings(batch_samples=4, replay=0.25)
    new = [head(row) for row in range(6)] + [head(9, kind=SampleKind.SFT)]
    old = [head(20, uses=2, loss=9.0), head(21, uses=1, loss=0.1), head(22, uses=1, loss=0.2)]
    steps = plan_steps(new, old, settings)
    assert [(step.kind, len(step.new), len(step.replayed)) for step in steps] == [
        (SampleKind.SFT, 1, 0),
        (SampleKind.DPO, 3, 1),
        (SampleKind.DPO, 3, 1),
    ]
    assert [step.replayed for step in steps[1:]] == [("s22",), ("s21",)]
    assert {s for step in steps for s in step.new} == {h.sample_id for h in new}


def test_later_epochs_take_the_same_samples_with_other_neighbours() -> None:
    settings = LearningSettings(batch_samples=4, replay=0.0)
    heads = [head(row) for row in range(6)]
    first, second = (plan_steps(heads, [], settings, epoch) for epoch in (0, 1))
    for steps in (first, second):
        assert sorted(s for step in steps for s in step.new) == [h.sample_id for h in heads]
    assert set(first[0].new) != set(second[0].new)


def test_samples_are_seen_again_until_their_loss_is_low() -> None:
    kto, sft = SampleKind.KTO, SampleKind.SFT
    left = [head(1), head(2, loss=0.6), head(3, kind=kto, loss=0.4), head(4, kind=sft, loss=0.4)]
    done = [head(5, loss=0.3), head(6, kind=sft, loss=0.05), head(7, kind=kto, loss=0.2)]
    assert to_go_on([*left, *done], ()) == left


def test_a_pair_is_learned_only_when_the_model_itself_prefers_its_answer() -> None:
    heads = [head(1, loss=0.3), head(2, loss=0.01)]
    assert to_go_on(heads, {"s2"}) == [heads[1]]
    assert to_go_on(heads, ()) == []


def test_the_last_few_are_not_chased() -> None:
    learned = [head(row, loss=0.1) for row in range(6)]
    stubborn = [head(row, loss=2.0) for row in (10, 11)]
    assert to_go_on([*learned, *stubborn], ()) == []
    assert to_go_on([*learned[1:], *stubborn], ()) == stubborn
    assert to_go_on([head(1, loss=2.0)], ()) == [head(1, loss=2.0)]
