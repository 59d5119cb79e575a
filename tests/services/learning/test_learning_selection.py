"""Which samples, in which steps."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tandem.core.learning import AdapterRecord, SampleKind
from tandem.services.learning.block import Block
from tandem.services.learning.families import UNSCORED_LOSS
from tandem.services.learning.selection import (
    candidates,
    choose,
    groups,
    known,
    plan_steps,
    priority,
    ready_in_s,
    to_go_on,
    why_none,
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
    left = [head(1), head(2, loss=0.6), head(3, kind=kto, loss=0.4), head(4, kind=sft, loss=0.2)]
    done = [head(5, loss=0.3), head(6, kind=sft, loss=0.05), head(7, kind=kto, loss=0.2)]
    assert [to_go_on([each], {"s3", "s4"}) for each in left] == [[each] for each in left]
    assert not any(to_go_on([each], {"s3", "s4"}) for each in done)


def test_what_is_learned_stays_in_while_the_rest_is_gone_over_again() -> None:
    """Trained on the rest alone, a model forgets it."""
    heads = [head(1, loss=0.01), head(2, loss=0.6), head(3, loss=0.3), head(4, loss=2.0)]
    assert to_go_on(heads, ()) == heads


def test_a_liked_answer_is_learned_once_it_is_likely() -> None:
    """Its loss cannot fall further than the answer was unlikely at first."""
    likely = head(1, kind=SampleKind.KTO, loss=0.45)
    assert known([likely], ()) == {"s1"} and known([likely], {"s1"}) == set()
    disliked = head(2, kind=SampleKind.KTO, desirable=False, loss=0.45)
    assert to_go_on([likely, disliked], {"s1"}) and not known([disliked], ())


def test_smoothed_pairs_are_learned_although_their_loss_stays_high() -> None:
    best = 0.3 * math.log(1 / 0.3) + 0.7 * math.log(1 / 0.7)
    pair = head(1, loss=best + 0.01)
    assert known([pair], (), 0.3) == {"s1"} and known([pair], ()) == set()
    assert known([head(1, loss=math.log(2.0))], (), 0.3) == set()


def test_known_likes_stay_with_dislikes_that_are_new() -> None:
    likes = [head(row, kind=SampleKind.KTO, loss=0.1) for row in range(8)]
    dislikes = [head(row, kind=SampleKind.KTO, desirable=False, loss=0.5) for row in (8, 9)]
    assert known([*likes, *dislikes], ()) == {f"s{row}" for row in range(2, 8)}
    new = head(10, kind=SampleKind.KTO, loss=0.9)
    assert known([*likes, *dislikes, new], {"s10"}) == {f"s{row}" for row in range(1, 8)}


def test_nothing_is_offered_that_shares_and_likes_leave_nothing_of() -> None:
    """Each takes from the other what it needs: two likes of one key, a dislike of two others."""
    settings = LearningSettings(key_share=0.34, version_wait_s=0.0)
    given = [("a", True), ("a", True), ("b", False), ("c", False)]
    heads = [
        head(row, kind=SampleKind.KTO, key_id=key, desirable=up)
        for row, (key, up) in enumerate(given)
    ]
    versions = candidates(heads, 40, settings, 0.0)
    assert not any(versions) and "too few other keys" in why_none(versions, settings)


def test_an_answer_to_imitate_is_learned_by_its_loss_or_by_what_it_gained() -> None:
    heads = [head(row, kind=SampleKind.SFT, loss=loss) for row, loss in ((1, 0.6), (2, 0.05))]
    assert to_go_on(heads, {"s1", "s2"}) == heads
    assert to_go_on(heads, {"s2"}) == []


def test_a_pair_is_learned_only_when_the_model_itself_prefers_its_answer() -> None:
    heads = [head(1, loss=0.3), head(2, loss=0.01)]
    assert to_go_on(heads, {"s2"}) == heads
    assert to_go_on(heads, ()) == []


def test_the_last_few_are_not_chased() -> None:
    learned = [head(row, loss=0.1) for row in range(6)]
    stubborn = [head(row, loss=2.0) for row in (10, 11)]
    assert to_go_on([*learned, *stubborn], ()) == []
    assert to_go_on([*learned[1:], *stubborn], ()) == [*learned[1:], *stubborn]
    assert to_go_on([head(1, loss=2.0)], ()) == [head(1, loss=2.0)]


def thumbs(likes: int, dislikes: int) -> list[SampleHead]:
    labels = [True] * likes + [False] * dislikes
    return [head(row, kind=SampleKind.KTO, desirable=up) for row, up in enumerate(labels)]


def test_dislikes_wait_for_likes() -> None:
    assert groups(thumbs(0, 5)) == []
    [mixed] = groups(thumbs(2, 5))
    assert [h.desirable for h in mixed] == [True, True, False, False]
    assert [len(group) for group in groups(thumbs(5, 2))] == [7]
    assert groups([head(9), *thumbs(0, 5)]) == [[head(9)]]


def test_dislikes_that_a_refusal_left_without_likes_go_with_later_ones() -> None:
    """Before newer dislikes, also where there are as many of those as likes. The likes say how many
    are tried together, and at which rate."""
    early = [replace(each, refusals=1) for each in thumbs(1, 3)]
    later = [
        replace(each, row=10 + each.row, sample_id=f"t{each.row}", created_s=NOW_S)
        for each in thumbs(6, 6)
    ]
    first, second = groups([*early, *later])
    assert [each.sample_id for each in first] == ["s0", "s1"]
    assert [each.sample_id for each in second if not each.desirable] == [
        *("s2", "s3"),
        *("t6", "t7", "t8", "t9"),
    ]
    settings = LearningSettings(batch_samples=4)
    assert [len(each) for each in candidates([*early, *later], 8, settings, NOW_S)] == [2, 8]
    block = Block(AdapterRecord("a", 0.0), settings, [], second, [])
    assert block.refusals == 0
    block = Block(AdapterRecord("a", 0.0), settings, [], first, [])
    block.chosen = []  # nothing of it could be trained in the end
    assert block.refusals == first[0].refusals > 0
    assert groups(early[1:]) == []
    deadly = [replace(each, deaths=1) for each in early[1:]]
    assert [each.deaths for group in groups([*deadly, *later]) for each in group] == [0] * 12


def test_dislikes_are_not_gone_over_without_likes() -> None:
    learned = [replace(h, loss=0.05 if h.desirable else 0.5) for h in thumbs(4, 4)]
    assert to_go_on(learned, ()) == []
    [like] = [h for h in learned if h.row == 2]
    again = to_go_on(learned, {like.sample_id})
    assert [h.desirable for h in again] == []  # two of eight are the last few
    assert to_go_on(learned, {h.sample_id for h in learned[:2]}) == learned


def test_nothing_goes_on_with_dislikes_alone() -> None:
    """Likes may turn out to be unusable."""
    block = Block(AdapterRecord("a", 0.0), LearningSettings(), [], thumbs(2, 5), [], epochs=1)
    block.latest = {each.sample_id: 0.5 for each in block.chosen}
    assert block.may_go_on
    assert [each.desirable for each in block.everything()] == [True, True, False, False]
    assert {each.loss for each in block.everything()} == {0.5}
    block.chosen = [each for each in block.chosen if not each.desirable]
    assert not block.may_go_on and block.everything() == []


def test_no_step_is_made_of_dislikes_alone() -> None:
    settings = LearningSettings(batch_samples=2, replay=0.0)
    up = {h.sample_id for h in thumbs(6, 6) if h.desirable}
    for step in plan_steps(thumbs(6, 6), (), settings):
        assert len(step.new) == 2 and len(up & set(step.new)) == 1
    for likes, dislikes, size, epoch in itertools.product(range(1, 8), range(8), (2, 3, 8), (0, 1)):
        heads = thumbs(likes, min(likes, dislikes))
        up = {each.sample_id for each in heads if each.desirable}
        steps = plan_steps(heads, (), replace(settings, batch_samples=size), epoch)
        assert all(up & set(step.new) for step in steps)
        assert {s for step in steps for s in step.new} == {each.sample_id for each in heads}
    assert [len(step.new) for step in plan_steps(thumbs(4, 0), (), settings)] == [2, 2]


def test_old_dislikes_do_not_crowd_out_the_likes() -> None:
    heads = [replace(h, row=9 - h.row, sample_id=f"s{9 - h.row}") for h in thumbs(5, 5)]
    heads.sort(key=lambda head: head.row)
    assert [h.desirable for h in heads[:5]] == [False] * 5
    chosen = choose(heads, 4, 1.0, NOW_S)
    assert sorted(h.desirable for h in chosen) == [False, False, True, True]
    assert len(choose(heads[:5], 4, 1.0, NOW_S)) == 4


def test_what_was_refused_learns_apart_from_what_is_new() -> None:
    fresh, once, twice = head(1), head(2, refusals=1), head(3, refusals=2)
    assert len(groups([twice, once, fresh])) == 3
    once = replace(once, created_s=NOW_S - 300.0)
    twice = replace(twice, created_s=NOW_S - 200.0)
    assert groups([fresh, once, twice]) == [[once], [twice], [fresh]]  # nobody waits for ever
    assert groups([]) == []


def test_a_few_bad_samples_take_fewer_others_with_them_each_time() -> None:
    settings = LearningSettings(batch_samples=8, steps_per_version=8)
    bad = [head(row, loss=9.0, refusals=1) for row in range(6)]
    good = [head(row, loss=0.5, refusals=1) for row in range(6, 64)]
    [again] = candidates([*good, *bad], 64, settings, NOW_S)
    assert len(again) == 32 and set(again) >= set(bad)
    [last] = candidates([replace(each, refusals=2) for each in again], 64, settings, NOW_S)
    assert len(last) == 16 and sum(each.loss == 9.0 for each in last) == 6
    assert len(candidates([replace(good[0], refusals=2)], 1, settings, NOW_S)[0]) == 1
    # No fewer than the keys' shares need, or they would wait without end.
    shares = replace(settings, key_share=0.25)
    few = [head(row, refusals=2, key_id=str(row % 4)) for row in range(16)]
    [again] = candidates(few, 8, shares, NOW_S)
    assert len(again) == 4 and ready_in_s(again, 8, shares, NOW_S) == 0.0
    assert candidates(few, 8, replace(settings, key_share=5e-324), NOW_S) == [[]]


def arrived(count: int, newest_s: float, oldest_s: float) -> list[SampleHead]:
    """So many samples, the newest and the oldest so many seconds ago."""
    return [
        head(row, created_s=NOW_S - (newest_s if row == count - 1 else oldest_s))
        for row in range(count)
    ]


def test_a_version_waits_for_enough_samples_or_for_a_time() -> None:
    settings = LearningSettings(batch_samples=8, version_wait_s=60.0)

    def ready(count: int, newest_s: float, oldest_s: float) -> bool:
        return ready_in_s(arrived(count, newest_s, oldest_s), 64, settings, NOW_S) == 0.0

    assert ready(64, 0.0, 1.0)  # a full version
    assert ready(40, 1.5, 2.0) and not ready(40, 0.5, 2.0)  # an import that has just ended
    assert not ready(8, 5.0, 40.0) and ready(8, 15.0, 40.0)  # a lull
    assert ready(12, 1.0, 60.0)  # one every five seconds, for a minute
    assert not ready(1, 300.0, 300.0) and ready(1, 600.0, 600.0)
    assert ready_in_s([], 64, settings, NOW_S) == math.inf
    assert ready(1, -3600.0, -3600.0)  # the clock was set back


def test_how_long_a_version_will_wait_if_nothing_else_comes() -> None:
    settings = LearningSettings(batch_samples=8, version_wait_s=60.0)

    def wait_s(count: int, newest_s: float, oldest_s: float) -> float:
        return ready_in_s(arrived(count, newest_s, oldest_s), 64, settings, NOW_S)

    assert wait_s(3, 0.0, 20.0) == 580.0  # ten times as long: less than a step's worth
    assert wait_s(8, 5.0, 40.0) == 10.0  # a quarter without another
    assert wait_s(8, 1.0, 55.0) == 5.0  # all of it since the first
    assert wait_s(32, 0.25, 2.0) == 0.75


def test_what_the_version_says_already_teaches_nothing() -> None:
    sft = SampleKind.SFT
    new = [
        head(1, loss=0.1),
        head(2, loss=0.1),
        head(3, loss=0.6),
        head(4, kind=sft, loss=1.2),
        head(5, kind=sft, loss=1.3),
        head(6, kind=sft),
        head(7, kind=sft, loss=0.05),  # the base gives it that, too: there is nothing to gain
    ]
    assert known(new, {"s2", "s5", "s7"}) == {"s1", "s4", "s7"}
    assert known(new, ()) == {"s1", "s2", "s4", "s5", "s7"}


def test_what_is_known_counts_for_no_share() -> None:
    """Else the rest would be trained on in vain: one key has too much of it."""
    mine = [head(row, key_id="mine") for row in range(4)]
    others = [head(row, key_id="others") for row in range(4, 8)]
    losses = {each.sample_id: 0.1 if each in mine[1:] else 0.6 for each in (*mine, *others)}
    settings = LearningSettings(key_share=0.5)
    block = Block(AdapterRecord("formal", 1.0), settings, [], [*mine, *others], [])
    block.meet(losses, (), NOW_S)
    assert block.known == {"s1", "s2", "s3"}
    assert sorted(each.key_id for each in block.chosen) == ["mine", "others"]


def test_what_a_share_takes_from_likes_is_taken_from_dislikes() -> None:
    kto = SampleKind.KTO
    chosen = [
        *(head(row, key_id=key) for row, key in ((1, "a"), (2, "b"))),
        *(head(row, kind=kto, key_id="a") for row in (3, 4)),
        *(head(row, kind=kto, key_id=key, desirable=False) for row, key in ((5, "b"), (6, "c"))),
    ]
    settings = LearningSettings(key_share=0.4)
    block = Block(AdapterRecord("formal", 1.0), settings, [], chosen, [])
    block.meet({"s1": 0.1, "s2": 0.1}, (), NOW_S)
    likes = sum(each.desirable for each in block.chosen)
    assert len(block.chosen) - likes <= likes
    assert within_shares([each.key_id for each in block.chosen], 0.4)
