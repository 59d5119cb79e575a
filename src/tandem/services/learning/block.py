"""What one course has in hand between two versions: claimed samples and what came of them.

Knows neither engine nor store. Invariant: `chosen` holds only samples that can be trained on.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from tandem.core.learning import AdapterRecord, Sample
from tandem.services.learning.selection import (
    balanced,
    is_dislike,
    known,
    settled,
    to_go_on,
    within_shares,
)
from tandem.services.learning.settings import LEAST_WAY, MOST_WAY, LearningSettings
from tandem.store.samples import SampleHead

# The trust region, as shares of what the gate allows: how far a version may move before the gate
# looks at it, and where its adapter may be in the end.
_MOST_MOVE = 0.35
_MOST_DRIFT = 0.75


@dataclass(slots=True)
class Block:
    """What is trained between two versions."""

    record: AdapterRecord
    settings: LearningSettings
    claimed: list[Sample]
    chosen: list[SampleHead]
    """Of claimed samples: those to train on."""
    seen: list[SampleHead]
    """Samples of earlier versions, to be replayed."""
    latest: dict[str, float] = field(default_factory=dict)
    """The last loss of each sample that was trained on."""
    misjudged: set[str] = field(default_factory=set)
    """Those whose preferred answer was not likely enough when the model was last asked."""
    known: set[str] = field(default_factory=set)
    """New samples that would teach the current version nothing."""
    losses: list[float] = field(default_factory=list)
    """Of the steps."""
    epochs: int = 0
    steps: int = 0
    way: float = 0.0
    """In full steps: of as much evidence as moves the model most, at the rate before refusals."""
    room: float = 1.0
    """By what the learning rate was multiplied, since the trust region leaves no more."""
    began: float = 0.0
    drift: float = 0.0
    """How far the model has moved from the base when training began, and now, as shares of what the
    gate allows; below 0 where that is more than usual and hardly used."""
    ahead: float = 0.0
    """What the drift will be after another epoch, if that moves the model as far as the last."""
    refusals: int = field(init=False)
    """How many candidates to which these samples were new were refused before. Dislikes may have
    joined others that were tried less often."""

    def __post_init__(self) -> None:
        likes = (head.refusals for head in self.chosen if not is_dislike(head))
        self.refusals = max(likes, default=0)  # also when none of them is left

    @property
    def used(self) -> list[Sample]:
        """Claimed samples that were trained on."""
        return [sample for sample in self.claimed if sample.sample_id in self.latest]

    @property
    def fair(self) -> bool:
        """Whether no API key has more than its share of what was trained on: samples of others may
        have turned out to be unusable meanwhile."""
        return within_shares([sample.key_id for sample in self.used], self.settings.key_share)

    def meet(self, losses: Mapping[str, float], misjudged: Collection[str], now_s: float) -> None:
        """The current version has scored the new samples: leave out what it knows, which then
        counts for no key's share."""
        heads = [replace(head, loss=losses.get(head.sample_id)) for head in self.chosen]
        self.known = known(heads, misjudged, self.settings.label_smoothing)
        self.chosen = [head for head in self.chosen if head.sample_id not in self.known]
        self.share_out(now_s)

    def share_out(self, now_s: float) -> None:
        """Choose again among what is usable; what is now beyond a key's share waits for others, and
        so do dislikes without a like."""
        most, share = len(self.chosen), self.settings.key_share
        self.chosen = settled(self.chosen, most, share, now_s)

    def moved(self, drift: float) -> None:
        """An epoch has ended here."""
        self.epochs += 1
        self.drift, self.ahead = drift, 2 * drift - self.drift

    @property
    def may_go_on(self) -> bool:
        """Whether another epoch is allowed, though most may be learned: a candidate that the gate
        refuses may be on its way through broken answers."""
        spent = self.epochs >= self.settings.epochs << self.refusals or self.way >= MOST_WAY
        return not spent and self.ahead < _MOST_DRIFT and bool(self.everything())

    def everything(self) -> list[SampleHead]:
        """All samples to train on, with their last losses."""
        scored = [replace(head, loss=self.latest.get(head.sample_id)) for head in self.chosen]
        return balanced(scored)

    def unlearned(self) -> list[SampleHead]:
        """The new samples to go over next; none where the gate is to look at what has come of them:
        most of them are learned, or the next epoch would move the model too far. A first version
        goes on for `LEAST_WAY`."""
        near = self.may_go_on and self.ahead - self.began < _MOST_MOVE
        if self.epochs and not near:
            return []
        if self.way < LEAST_WAY and not self.record.current:
            return self.everything()
        return to_go_on(self.everything(), self.misjudged, self.settings.label_smoothing)
