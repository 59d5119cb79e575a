"""Hyperparameters and the steps that follow from them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tandem.core.errors import InvalidRequest
from tandem.core.learning import Sample, SampleKind
from tandem.core.training import LossKind, OptimizerSpec, Schedule
from tandem.services.jobs.method import read_method, written_down
from tandem.services.learning.settings import LearningSettings

DEFAULTS = LearningSettings(learning_rate=1e-3, beta=0.2)


def sample(sample_id: str, *, desirable: bool = True) -> Sample:
    return Sample(sample_id, "", "", SampleKind.KTO, 0.0, (), "?", "!", desirable=desirable)


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
    assert (decided.kind, decided.n_epochs, decided.batch_size) == (SampleKind.SFT, 9, 5)
    assert decided.learning_rate == 1e-3
    assert [method.decided(n).n_epochs for n in (1, 8, 12, 24, 40, 1000)] == [9, 9, 5, 3, 3, 3]


def test_what_is_given_holds() -> None:
    given = {"n_epochs": 2, "batch_size": 4, "learning_rate_multiplier": 0.5, "beta": 0.3}
    shown, method = read_method({"type": "dpo", "dpo": {"hyperparameters": given}}, None, DEFAULTS)
    assert shown["dpo"]["hyperparameters"] == given
    assert method.loss.kind is LossKind.DPO and method.loss.beta == 0.3
    assert method.learning_rate == 5e-4
    again, same = read_method(shown, None, DEFAULTS)
    assert (again, same) == (shown, method)


def test_the_optimiser_is_the_jobs_own_or_as_the_settings_say() -> None:
    defaults = replace(DEFAULTS, warmup_steps=7, weight_decay=0.1, max_grad_norm=2.0)
    _, method = read_method(None, None, defaults)
    assert method.optimizer == OptimizerSpec(1e-3, weight_decay=0.1, max_grad_norm=2.0)
    given = {
        "lr_scheduler_type": "cosine",
        "warmup_steps": 3,
        "weight_decay": 0.0,
        "max_grad_norm": 0.0,
    }
    shown, method = read_method(None, given, defaults)
    assert method.optimizer == OptimizerSpec(
        1e-3, weight_decay=0.0, max_grad_norm=0.0, schedule=Schedule.COSINE, warmup_steps=3
    )
    assert shown["supervised"]["hyperparameters"]["lr_scheduler_type"] == "cosine"
    assert read_method(shown, None, defaults)[1] == method


@pytest.mark.parametrize("kind", ["supervised", "dpo", "kto"])
@pytest.mark.parametrize("given", [{}, {"learning_rate": 3e-4, "learning_rate_multiplier": 2.0}])
def test_what_is_written_down_means_the_same_under_other_settings(
    kind: str, given: dict[str, float]
) -> None:
    method = {"type": kind, kind: {"hyperparameters": given}}
    shown, meaning = read_method(method, None, DEFAULTS)
    kept = written_down(shown, DEFAULTS)
    others = LearningSettings(
        learning_rate=7e-3,
        weight_decay=0.3,
        max_grad_norm=9.0,
        beta=0.9,
        label_smoothing=0.4,
        desirable_weight=3.0,
        undesirable_weight=4.0,
        rpo_alpha=2.0,
    )
    assert kept[kind]["hyperparameters"]["n_epochs"] == "auto"  # the examples decide that
    again, found = read_method(kept, None, others)
    assert again == kept and written_down(kept, others) == kept
    assert found.optimizer == meaning.optimizer
    used = ("kind", "rpo_alpha", "beta", "label_smoothing") if kind == "dpo" else ("kind",)
    if kind == "kto":
        used = ("kind", "rpo_alpha", "beta", "desirable_weight", "undesirable_weight")
    assert [getattr(found.loss, name) for name in used] == [
        getattr(meaning.loss, name) for name in used
    ]


def test_settings_that_nobody_could_make_today_are_kept() -> None:
    old = LearningSettings(label_smoothing=0.6)
    kept = written_down(read_method({"type": "dpo"}, None, old)[0], old)
    assert read_method(kept, None, DEFAULTS, kept=True)[1].loss.label_smoothing == 0.6
    with pytest.raises(InvalidRequest, match="label_smoothing"):  # as a client's wish
        read_method(kept, None, DEFAULTS)


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
        ({"type": "kto", "kto": {"hyperparameters": {"lr_scheduler_type": "steep"}}}, "steep"),
        ({"type": "kto", "kto": {"hyperparameters": {"warmup_steps": -1}}}, "at least 0"),
        ({"type": "kto", "kto": {"hyperparameters": {"warmup_steps": 0.5}}}, "warmup_steps"),
        ({"type": "kto", "kto": {"hyperparameters": {"weight_decay": 1.5}}}, "at most 1"),
        ({"type": "kto", "kto": {"hyperparameters": {"max_grad_norm": -1.0}}}, "at least 0"),
        ({"type": "dpo", "dpo": {"hyperparameters": {"n_epochs": "many"}}}, "n_epochs"),
        ({"type": "dpo", "dpo": {"hyperparameters": {"learning_rate": 10**400}}}, "method: "),
        ({"type": "dpo", "dpo": {"hyperparameters": {"n_epochs": 10**400}}}, "n_epochs|method: "),
        ({"type": "dpo", "dpo": {"hyperparameters": {"batch_size": 10**400}}}, "batch|method: "),
        ({"type": "dpo", "dpo": {"hyperparameters": {"warmup_steps": 10**400}}}, "warm|method: "),
    ],
)
def test_what_cannot_be_is_refused_by_name(method: dict[str, object], problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        read_method(method, None, DEFAULTS)


def test_steps_are_the_same_each_time_and_cover_every_epoch() -> None:
    _, method = read_method(None, {"n_epochs": 2, "batch_size": 3}, DEFAULTS)
    ids = [f"line-{n}" for n in range(7)]
    given = [sample(each) for each in ids]
    decided = method.decided(7)
    first, second = (decided.epoch(given, 1, epoch) for epoch in range(2))
    assert first == decided.epoch(given, 1, 0) != decided.epoch(given, 2, 0)
    assert first != second
    for steps in (first, second):
        assert [len(step) for step in steps] == [3, 3, 1]
        assert sorted(sample for step in steps for sample in step) == ids
    assert decided.epoch_steps(7) == 3


def test_every_step_has_a_like_where_there_are_enough() -> None:
    """Dislikes alone say only what an answer should not be."""
    method = read_method({"type": "kto"}, None, DEFAULTS)[1].decided(20)
    given = [sample(f"line-{n}", desirable=n < 3) for n in range(20)]
    liked = {each.sample_id for each in given if each.desirable}
    for epoch in range(20):
        steps = method.epoch(given, 1, epoch)
        assert [len(step) for step in steps] == [8, 8, 4]
        assert all(liked.intersection(step) for step in steps)
        assert {each for step in steps for each in step} == {each.sample_id for each in given}
