"""Which samples the next version learns from, and how they are grouped into steps.

MACE's priority (4.1): older and worse-aligned samples first. Pure functions of sample heads.
Invariant: the same heads and the same time give the same choice, no API key contributes more than
its share of what is chosen, and no more answers are disliked in it than liked.
"""

from __future__ import annotations

import math
import sys
from collections import Counter, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Protocol, TypeVar

from tandem.core.learning import SampleKind
from tandem.services.learning.families import FAMILIES, UNSCORED_LOSS, smoothing_entropy
from tandem.services.learning.settings import LearningSettings
from tandem.store.samples import SampleHead

# pi_ft is the same for all samples and drops out of their order. A sample of ln 2 more loss is
# worth as much as one that has waited ten minutes longer.
_DELTA_PER_S = UNSCORED_LOSS / 600.0
_GAMMA = 1.0

TRIES = 3
"""How many candidates to which a sample was new may be refused, before the sample is."""

# When some samples are enough for a version: nothing came for a while, or the first waited long.
_SETTLED_S = 1.0
_ENOUGH_STEPS = 4
_QUIET_SHARE = 0.25
_LONG_WAITS = 10.0

# Not more than this share of a version's samples may be left unlearned at its end.
_MOST_LEFT = 0.25


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The samples of one step, all of one kind; `replayed` were used by an earlier version."""

    kind: SampleKind
    new: tuple[str, ...]
    replayed: tuple[str, ...] = ()
    urgency: float = UNSCORED_LOSS

    @property
    def sample_ids(self) -> tuple[str, ...]:
        """New and replayed."""
        return self.new + self.replayed


def priority(head: SampleHead, now_s: float) -> float:
    """MACE's total priority of a fine-tuning task, without the constant of its class."""
    age_s = max(0.0, now_s - head.created_s)
    return _DELTA_PER_S * age_s + _GAMMA * _loss(head)


def groups(heads: Sequence[SampleHead]) -> list[list[SampleHead]]:
    """The samples that may share a version: those with as many refusals, and as many deaths of the
    engine. Whoever has waited longest is in the first group, so none waits without end.

    A dislike says only what not to move to, so it waits until as many answers are liked. One that
    a refusal has left without a like goes with those that were tried less often; not one that may
    have ended the engine.
    """
    found, left = [], list[SampleHead]()
    for tries in sorted({(head.refusals, head.deaths) for head in heads}, reverse=True):
        alike = [head for head in heads if (head.refusals, head.deaths) == tries]
        group = balanced(sorted([*alike, *left], key=lambda head: head.row))
        taken = {head.sample_id for head in group}
        apart = [head for head in (*alike, *left) if head.sample_id not in taken]
        left = [head for head in apart if not head.deaths]
        if group:
            found.append(group)
    return sorted(found, key=lambda group: min(head.created_s for head in group))


def balanced(heads: Sequence[SampleHead]) -> list[SampleHead]:
    """Without the last dislikes, so that there are no more of them than likes."""
    dislikes = [head for head in heads if is_dislike(head)]
    liked = sum(head.kind is SampleKind.KTO for head in heads) - len(dislikes)
    waiting = {head.sample_id for head in dislikes[liked:]}
    return [head for head in heads if head.sample_id not in waiting]


def is_dislike(head: SampleHead) -> bool:
    """Whether a sample says only what an answer should not be."""
    return head.kind is SampleKind.KTO and not head.desirable


def candidates(
    waiting: Sequence[SampleHead], most: int, settings: LearningSettings, now_s: float
) -> list[list[SampleHead]]:
    """What versions could be made of samples that wait, each of `most` at most, in the order in
    which they would be made. Only what the keys' shares let in counts.

    Each refusal, and each death of the engine, halves `most`: bad ones, of which the loss is high,
    come first and take fewer others with them.
    """
    found = []
    for group in groups(waiting):
        number = _together(group, most, settings.key_share)
        found.append(settled(group, number, settings.key_share, now_s))
    return found


def settled(
    heads: Sequence[SampleHead], most: int, key_share: float, now_s: float
) -> list[SampleHead]:
    """What keys' shares and dislikes without a like leave of them, `most` at most; each may take
    from the other what it needs."""
    found, before = list(heads), -1
    while before != len(found):
        before = len(found)
        found = balanced(choose(found, min(most, before), key_share, now_s))
    return found


def why_none(versions: Sequence[Sequence[SampleHead]], settings: LearningSettings) -> str:
    """Why nothing can be learned of samples of which `candidates` made no more than `versions`,
    all empty."""
    if not versions:
        return (
            "dislikes wait: they say what an answer should not be, and nothing can be learned from "
            "that alone; rate some answers up"
        )
    return (
        f"samples wait: no API key may give more than {settings.key_share:.0%} of what a version "
        "learns from (`key_share`), and too few other keys have given any"
    )


def _together(group: Sequence[SampleHead], most: int, key_share: float) -> int:
    """How many of a group share a version; not so few that no key may give one."""
    first = next(head for head in group if not is_dislike(head))
    keys = min(1.0 / key_share, float(sys.maxsize))  # the quotient may be infinite
    return max(math.ceil(keys - 1e-9), most >> first.refusals + first.deaths)


def ready_in_s(
    group: Sequence[SampleHead], most: int, settings: LearningSettings, now_s: float
) -> float:
    """Seconds until a version is made of these samples, `most` at most, if no other comes; 0: now.

    Some steps' worth that arrived together begin at once; fewer wait for a quarter of
    `version_wait_s` without another, or all of it; less than a step's worth ten times as long.
    """
    if not group:
        return math.inf
    if len(group) >= _together(group, most, settings.key_share):
        return 0.0
    arrived = [head.created_s for head in group]
    # A clock that was set back makes nobody wait until it has caught up.
    quiet_s, waited_s = abs(now_s - max(arrived)), abs(now_s - min(arrived))
    wait_s = settings.version_wait_s
    left_s = _LONG_WAITS * wait_s - waited_s
    if len(group) >= _ENOUGH_STEPS * settings.batch_samples:
        left_s = min(left_s, min(_SETTLED_S, wait_s) - quiet_s)
    elif len(group) >= settings.batch_samples:
        left_s = min(left_s, _QUIET_SHARE * wait_s - quiet_s, wait_s - waited_s)
    return max(0.0, left_s)


def choose(
    heads: Sequence[SampleHead], most: int, key_share: float, now_s: float
) -> list[SampleHead]:
    """The new samples of the next version, at most so many, best first.

    As many as the keys' shares allow: what one key sent beyond its share waits for others. A
    dislike is not taken before a like that goes with it, however old it is.
    """
    ranked = _with_likes(sorted(heads, key=lambda head: (-priority(head, now_s), head.row)))
    return shared(ranked, most_shared(ranked, most, key_share), key_share)


class OfKey(Protocol):
    """What an API key has given."""

    @property
    def key_id(self) -> str:
        """The key's tenant."""
        ...


_Given = TypeVar("_Given", bound=OfKey)


def most_shared(given: Sequence[OfKey], most: int, key_share: float) -> int:
    """The largest number up to `most` to which no key would have to give more than its share."""
    keys = Counter(each.key_id for each in given)
    for number in range(min(most, len(given)), 0, -1):
        if sum(min(n, _cap(key_share, number)) for n in keys.values()) >= number:
            return number
    return 0


def shared(given: Sequence[_Given], number: int, key_share: float) -> list[_Given]:
    """The first `number` of which no key gives more than its share; all there are, if fewer."""
    cap, taken, found = _cap(key_share, number), Counter[str](), list[_Given]()
    for each in given:
        if len(found) < number and taken[each.key_id] < cap:
            taken[each.key_id] += 1
            found.append(each)
    return found


def within_shares(key_ids: Sequence[str], key_share: float) -> bool:
    """Whether no API key has more than its share of samples, of which each one's key is given."""
    return max(Counter(key_ids).values(), default=0) <= _cap(key_share, len(key_ids))


def to_go_on(
    heads: Sequence[SampleHead], misjudged: Collection[str], smoothing: float = 0.0
) -> list[SampleHead]:
    """The samples of a version that are seen again: all, or none once most of it is learned.

    MACE's CheckEnd (4.2), but for two things. The last few are not chased, or every version would
    end with full steps towards whatever contradicts the rest. And what is learned stays in:
    training on the others alone, it is forgotten.
    """
    left = balanced([head for head in heads if not _learned(head, misjudged, smoothing)])
    return list(heads) if len(left) > _MOST_LEFT * len(heads) else []


def known(
    heads: Sequence[SampleHead], misjudged: Collection[str], smoothing: float = 0.0
) -> set[str]:
    """Of new samples with the loss that the current version gives them, those that would teach it
    nothing; but for likes with which a dislike can be learned."""
    found = {head.sample_id for head in heads if _learned(head, misjudged, smoothing)}
    unknown = [head for head in heads if head.sample_id not in found]
    alone = len(unknown) - len(balanced(unknown))
    likes = [head.sample_id for head in heads if head.kind is SampleKind.KTO and head.desirable]
    return found - set([like for like in likes if like in found][:alone])


def _learned(head: SampleHead, misjudged: Collection[str], smoothing: float) -> bool:
    """The last loss is low enough, and what the sample prefers is not `misjudged`: the losses of
    DPO and KTO fall as soon as the policy moves, however unlikely the preferred answer still is. An
    answer to imitate is compared with no other: one of both is enough. The loss of a liked one says
    nothing: it cannot fall further than the answer was unlikely at first."""
    if head.loss is None:
        return False
    preferred = head.sample_id not in misjudged
    if head.kind is SampleKind.KTO and head.desirable:
        return preferred
    family = FAMILIES[head.kind]
    bound = family.learned_loss
    if family.paired and smoothing:  # half way to the least loss that smoothing leaves
        bound += 0.5 * smoothing_entropy(smoothing)
    low = head.loss <= bound
    return low or preferred if head.kind is SampleKind.SFT else low and preferred


def plan_steps(
    chosen: Sequence[SampleHead],
    seen: Sequence[SampleHead],
    settings: LearningSettings,
    epoch: int = 0,
) -> list[StepPlan]:
    """Steps over `chosen`, once; each kind of sample has steps of its own.

    A share of each step is replay: of the samples `seen` by earlier versions those that were used
    least come first, among them those with the highest loss. In a later `epoch` neighbours differ.
    """
    steps: list[StepPlan] = []
    for kind in SampleKind:
        new = [head for head in chosen if head.kind is kind]
        if not new:
            continue
        whole, replayed = settings.batch_samples, settings.replay_samples
        old = sorted(
            (head for head in seen if head.kind is kind),
            key=lambda head: (head.uses, -_loss(head), head.row),
        )
        size = whole - replayed if old else whole
        turn = epoch * size // 2 % len(new)
        order = _mixed([*new[turn:], *new[:turn]])
        at = epoch * math.ceil(len(order) / size) * replayed
        for start in range(0, len(order), size):
            part = order[start : start + size]
            share = math.ceil(len(part) * replayed / (whole - replayed))
            count = min(share, len(old))
            again = [old[(at + place) % len(old)] for place in range(count)]
            at += count
            steps.append(_plan(kind, part, again))
    return steps


def _with_likes(ranked: Sequence[SampleHead]) -> list[SampleHead]:
    """In this order, but for dislikes that come before as many likes: each waits for one."""
    found: list[SampleHead] = []
    early: deque[SampleHead] = deque()
    spare = 0
    for head in ranked:
        if is_dislike(head):
            early.append(head)
        else:
            found.append(head)
            spare += head.kind is SampleKind.KTO
        while early and spare:
            found.append(early.popleft())
            spare -= 1
    return [*found, *early]


def _mixed(heads: Sequence[SampleHead]) -> list[SampleHead]:
    """Likes and dislikes in turns. A like follows each dislike, so that no step of two or more is
    made of dislikes alone, the last one included."""
    likes = [head for head in heads if not is_dislike(head)]
    dislikes = [head for head in heads if is_dislike(head)]
    both = zip_longest(dislikes, likes)
    return [head for pair in both for head in pair if head is not None]


def _plan(kind: SampleKind, new: Sequence[SampleHead], old: Sequence[SampleHead]) -> StepPlan:
    heads = [*new, *old]
    return StepPlan(
        kind,
        tuple(head.sample_id for head in new),
        tuple(head.sample_id for head in old),
        math.fsum(_loss(head) for head in heads) / len(heads),
    )


def _loss(head: SampleHead) -> float:
    return UNSCORED_LOSS if head.loss is None else head.loss


def _cap(share: float, total: int) -> int:
    return math.floor(share * total + 1e-9)
