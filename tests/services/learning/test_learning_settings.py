"""Settings of an adapter: what cannot work is refused when it is set, and stays readable."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fake_engine import INFO
from learning_world import world
from patience import until
from tandem.config import LearningConfig
from tandem.core.errors import InvalidRequest
from tandem.core.learning import SampleKind
from tandem.core.training import OptimizerSpec
from tandem.services.answering.models import Models
from tandem.services.jobs.method import read_method
from tandem.services.learning.settings import (
    LearningSettings,
    check_new,
    defaults,
    resolve_settings,
)
from tandem.services.versions.adapters import Adapters
from tandem.services.versions.service import Versions
from tandem.store import adapters

MODEL = replace(INFO, max_rank=64, linears=("model.layers.0.self_attn.q_proj", "model.x.up_proj"))


@pytest.mark.parametrize(
    ("own", "param"),
    [
        ({"learning_rate": 1e30}, "learning_rate"),
        ({"learning_rate": 1.5}, "learning_rate"),
        ({"label_smoothing": 0.5}, "label_smoothing"),
        ({"rank": 65}, "rank"),
        ({"rank": 10**9}, "rank"),
        ({"targets": ["zzz"]}, "targets"),
        ({"targets": ["q_proj", "proj"]}, "targets"),
    ],
)
def test_what_cannot_work_is_refused_but_readable(own: dict[str, Any], param: str) -> None:
    settings = resolve_settings(LearningSettings(), own)  # as it may be kept from before
    with pytest.raises(InvalidRequest) as error:
        check_new(settings, MODEL)
    assert error.value.param == param


def test_what_can_work_is_taken() -> None:
    own = {"rank": 64, "targets": ["q_proj", "x.up_proj"], "label_smoothing": 0.49}
    check_new(resolve_settings(LearningSettings(), {**own, "learning_rate": 1.0}), MODEL)
    check_new(resolve_settings(LearningSettings(), {"rank": 10**9, "targets": ["any"]}), INFO)


def test_the_server_refuses_a_default_that_destroys() -> None:
    with pytest.raises(InvalidRequest, match="learning_rate is at most 1"):
        defaults(LearningConfig(learning_rate=2.0))


@pytest.mark.parametrize("kind", [SampleKind.DPO, SampleKind.KTO, SampleKind.SFT])
def test_the_likelihood_term_reaches_the_losses_of_feedback_and_jobs(kind: SampleKind) -> None:
    """Without it preferences break a real model; demonstrations are likelihood alone."""
    settings = defaults(LearningConfig())
    weight = 0.0 if kind is SampleKind.SFT else settings.rpo_alpha
    assert settings.rpo_alpha == 5.0 and settings.loss(kind).rpo_alpha == weight
    name = "supervised" if kind is SampleKind.SFT else kind.value
    assert read_method({"type": name}, None, settings)[1].loss.rpo_alpha == weight


@pytest.mark.parametrize(
    "hyperparameters",
    [
        {"label_smoothing": 7},
        {"label_smoothing": 0.5},
        {"learning_rate": 2.0},
        {"learning_rate_multiplier": 1e6},
    ],
)
def test_jobs_are_bounded_alike(hyperparameters: dict[str, Any]) -> None:
    method = {"type": "dpo", "dpo": {"hyperparameters": hyperparameters}}
    with pytest.raises(InvalidRequest, match=r"must be in|is at most"):
        read_method(method, None, LearningSettings())


@pytest.mark.parametrize(
    ("own", "param"),
    [
        ({"warmup_steps": -1}, "warmup_steps"),
        ({"warmup_steps": 1.5}, "settings"),
        ({"learning_rate": 10**400}, "settings"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"weight_decay": 1.1}, "weight_decay"),
        ({"max_grad_norm": -1.0}, "max_grad_norm"),
        ({"max_grad_norm": float("inf")}, "max_grad_norm"),
    ],
)
def test_the_optimisers_settings_have_ranges(own: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        resolve_settings(LearningSettings(), own)
    assert error.value.param == param


async def test_the_optimisers_settings_reach_the_trainer(tmp_path: Path) -> None:
    config = LearningConfig(warmup_steps=5, weight_decay=0.1, learning_rate=1e-4)
    settings = replace(defaults(config), version_wait_s=0.0)
    async with world(tmp_path, settings=settings) as made:
        made.engine.step_s = 0.2
        await made.give([made.sample()], {"weight_decay": 0.2, "max_grad_norm": 0.0})
        made.learner.notify("formal")
        await until(lambda: "learn/formal" in made.engine.spec_of)
        spec = made.engine.spec_of["learn/formal"]
        assert spec.optimizer == OptimizerSpec(
            learning_rate=1e-4, weight_decay=0.2, max_grad_norm=0.0, warmup_steps=5
        )
        assert not spec.own_schedule


async def test_a_reference_must_be_a_version_that_exists(tmp_path: Path) -> None:
    async with world(tmp_path) as made:
        models = Models(made.engine, "demo", 0)
        versions = Versions(made.tools, made.learner, models, Adapters(made.engine, (), {}))
        with pytest.raises(InvalidRequest, match="has no version 99"):
            await versions.create("formal", {"reference": "version:99"})
        with pytest.raises(InvalidRequest, match="learning_rate"):
            await versions.create("formal", {"learning_rate": 1e30})
        assert await made.store.read(adapters.find, "formal") is None


async def test_feedback_is_measured_by_the_settings_of_its_adapter(tmp_path: Path) -> None:
    async with world(tmp_path) as made:
        sample = made.sample(chosen="word " * 40)
        await made.give([made.sample(adapter="small")], {"max_sample_tokens": 16})
        assert (await made.tools.encoder_of("formal")).encode(sample).chosen
        with pytest.raises(InvalidRequest, match="tokens are more than"):
            (await made.tools.encoder_of("small")).encode(sample)
