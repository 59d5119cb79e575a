"""Hyperparameters and the steps that follow from them."""

from __future__ import annotations

import pytest

from tandem.core.errors import InvalidRequest
from tandem.core.learning import SampleKind
from tandem.core.training import LossKind
from tandem.services.jobs.method import read_method
from tandem.services.learning.settings import LearningSettings

DEFAULTS = LearningSettings(learning_rate=1e-3, beta=0.2)


def test_everything_may_be_left_to_us() -> None:
    shown, method = read_method(None, None, DEFAULTS)
    assert shown == {
        "type": "supervised",
        "supervised": {
            "hyperparameters": {
                "n_epochs": "auto",
                "batch_size": "auto",
                "learning_rate_multiplier": "auto",
            }
        },
    }
    decided = method.decided(5)
    assert (decided.kind, decided.n_epochs, decided.batch_size) == (SampleKind.SFT, 3, 5)
    assert decided.learning_rate == 1e-3


def test_what_is_given_holds() -> None:
    given = {"n_epochs": 2, "batch_size": 4, "learning_rate_multiplier": 0.5, "beta": 0.3}
    shown, method = read_method({"type": "dpo", "dpo": {"hyperparameters": given}}, None, DEFAULTS)
    assert shown["dpo"]["hyperparameters"] == given
    assert method.loss.kind is LossKind.DPO and method.loss.beta == 0.3
    assert method.learning_rate == 5e-4
    again, same = read_method(shown, None, DEFAULTS)
    assert (again, same) == (shown, method)


def test_old_hyperparameters_are_supervised() -> None:
    _, method = read_method(None, {"n_epochs": 7}, DEFAULTS)
    assert method.kind is SampleKind.SFT and method.n_epochs == 7


@pytest.mark.parametrize(
    ("method", "problem"),
    [
        ({"type": "reinforcement"}, "method.type is one of"),
        ({"type": "dpo", "kto": {}}, "method.kto does not go with"),
        ({"type": "supervised", "supervised": {"hyperparameters": {"beta": 0.1}}}, "beta"),
        ({"type": "dpo", "dpo": {"hyperparameters": {"beta": -1.0}}}, "above 0"),
        ({"type": "dpo", "dpo": {"hyperparameters": {"reference": "v1"}}}, "'base' or 'version:N'"),
        ({"type": "kto", "kto": {"hyperparameters": {"reference": "version:0"}}}, "reference"),
        ({"type": "supervised", "supervised": {"hyperparameters": {"reference": "base"}}}, "go"),
        ({"type": "dpo", "dpo": {"hyperparameters": {"n_epochs": 0}}}, "above 0"),
        ({"type": "dpo", "dpo": {"hyperparameters": {"n_epochs": 5000}}}, "at most 1000"),
        ({"type": "dpo", "dpo": {"hyperparameters": {"speed": 1}}}, "unknown field `speed`"),
        ({"type": "dpo", "dpo": {"hyperparameters": {"n_epochs": "many"}}}, "n_epochs"),
    ],
)
def test_what_cannot_be_is_refused_by_name(method: dict[str, object], problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        read_method(method, None, DEFAULTS)


def test_steps_are_the_same_each_time_and_cover_every_epoch() -> None:
    _, method = read_method(None, {"n_epochs": 2, "batch_size": 3}, DEFAULTS)
    ids = [f"line-{n}" for n in range(7)]
    steps = method.decided(7).steps(ids, seed=1)
    assert steps == method.decided(7).steps(ids, seed=1)
    assert steps != method.decided(7).steps(ids, seed=2)
    assert [len(step) for step in steps] == [3, 3, 1, 3, 3, 1]
    for epoch in (steps[:3], steps[3:]):
        assert sorted(sample for step in epoch for sample in step) == ids
    assert steps[:3] != steps[3:]
