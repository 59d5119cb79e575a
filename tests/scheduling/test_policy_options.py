"""Options of policies: texts become the types that the policy declares, wrong ones are named."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

import msgspec
import pytest

from tandem.core.errors import InvalidRequest
from tandem.estimators.batching import MEASURED
from tandem.scheduling.bounded_batch import BoundedBatch
from tandem.scheduling.policies.ekya import PeriodicRetraining
from tandem.scheduling.policies.rt_lm import Options as RtLm
from tandem.scheduling.policies.unified import Options, Unified
from tandem.scheduling.registry import build_policy


def test_texts_are_converted():
    policy = build_policy("unified", {"ceiling_s": "0.1", "temporal_only": "true"})
    assert isinstance(policy, Unified)
    assert policy._options == Options(ceiling_s=0.1, temporal_only=True)
    assert isinstance(build_policy("ekya", {"interval_s": "7"}), PeriodicRetraining)
    assert build_policy("unified")._options == Options()  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Needs:
    needed: Annotated[int, msgspec.Meta(le=10)]
    kind: Literal["a", "b"] = "a"


class Demanding:
    def __init__(self, options: Needs) -> None:
        raise AssertionError("made of wrong options")


@pytest.mark.parametrize(
    ("name", "options", "needle"),
    [
        ("unified", {"none": "1"}, "ceiling_s"),
        ("fcfs", {"interval_s": "1"}, "it has: none"),
        ("ekya", {"interval_s": "soon"}, "interval_s .* type float, not 'soon'"),
        ("unified", {"temporal_only": "perhaps"}, "temporal_only .* type bool, not 'perhaps'"),
        ("ekya", {"interval_s": "0"}, "with interval_s=0: .* above 0"),
        ("unified", {"min_share": "2"}, "min_share.* at most 1"),
        ("unified", {"min_share": "0"}, "min_share.* above 0"),
        ("unified", {"training_weight": "0"}, "training_weight must be above 0"),
        ("unified", {"patience_s": "0"}, "patience_s and .* above 0"),
        (f"{__name__}:Demanding", {}, "with no option: .*`needed`"),
        (f"{__name__}:Demanding", {"needed": "11"}, "needed .* not '11' .*<= 10"),
        (f"{__name__}:Demanding", {"needed": "1", "kind": "c"}, "kind .* not 'c' .*Invalid enum"),
    ],
)
def test_wrong_options_are_refused_by_name(name, options, needle):
    with pytest.raises(InvalidRequest, match=needle):
        build_policy(name, options)


def test_a_profile_gives_the_options_that_are_left_out():
    measured = {"phi": "0.2", "eta": "0.03", "batch": "4", "alpha": "0.5"}
    batches = build_policy("rt_lm", {"eta": "0.01"}, measured)
    assert isinstance(batches, BoundedBatch) and batches.options == RtLm(
        batch=4, phi=0.2, eta=0.01, alpha=0.5
    )
    assert isinstance(fifo := build_policy("fifo", None, measured), BoundedBatch)
    assert fifo.options.batch == 4
    build_policy("fcfs", None, measured)  # it has none of them
    with pytest.raises(InvalidRequest, match="no option 'phy'"):
        build_policy("rt_lm", {"phy": "1"}, measured)


@dataclass(frozen=True)
class Own:
    alpha: float = 3.0
    batch: int = 5
    gather: float = field(default=1.5, metadata=MEASURED)


class TakesSome(BoundedBatch):
    """Its options have names of a profile's constants; one of them is meant."""

    def __init__(self, options: Own = Own()) -> None:
        super().__init__(RtLm(), lambda seq, now: 0.0)
        self.own = options


def test_a_profile_gives_no_option_that_only_has_the_name_of_a_constant():
    measured = {"phi": "0.2", "eta": "0.03", "batch": "4", "alpha": "0.5", "gather": "1.2"}
    policy = build_policy(f"{__name__}:TakesSome", None, measured)
    assert isinstance(policy, TakesSome) and policy.own == Own(gather=1.2)
