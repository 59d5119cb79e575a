"""A job's method: which loss, which hyperparameters, and the steps that follow from them.

Reads OpenAI's `method` object; "auto" is decided here. Pure. Invariant: the same job over the same
examples has the same steps, so that a job goes on where its last checkpoint was.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Literal

import msgspec

from tandem.core.errors import InvalidRequest
from tandem.core.learning import Sample, SampleKind
from tandem.core.training import LossKind, LossSpec, OptimizerSpec, Schedule
from tandem.services.learning.settings import (
    LEAST_WAY,
    LearningSettings,
    check_bounds,
    reference_number,
)
from tandem.services.learning.steps import cut_steps

KINDS = {"supervised": SampleKind.SFT, "dpo": SampleKind.DPO, "kto": SampleKind.KTO}
_AUTO_EPOCHS = 3
_AUTO_BATCH = 8
_MOST_EPOCHS = 1000
_MOST_BATCH = 1024
_MAY_BE_0 = ("label_smoothing", "rpo_alpha", "warmup_steps", "weight_decay", "max_grad_norm")

Auto = Literal["auto"]


class _Hyperparameters(msgspec.Struct, forbid_unknown_fields=True):
    n_epochs: Auto | int | None = None
    batch_size: Auto | int | None = None
    learning_rate_multiplier: Auto | float | None = None
    learning_rate: float | None = None
    lr_scheduler_type: Schedule | None = None
    warmup_steps: int | None = None
    weight_decay: float | None = None
    max_grad_norm: float | None = None
    beta: Auto | float | None = None
    label_smoothing: float | None = None
    rpo_alpha: float | None = None
    desirable_weight: float | None = None
    undesirable_weight: float | None = None
    reference: str | None = None


class _Options(msgspec.Struct, forbid_unknown_fields=True):
    hyperparameters: _Hyperparameters | None = None


class _Method(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    supervised: _Options | None = None
    dpo: _Options | None = None
    kto: _Options | None = None


_OWN = {
    "supervised": {
        "n_epochs",
        "batch_size",
        "learning_rate_multiplier",
        "learning_rate",
        "lr_scheduler_type",
        "warmup_steps",
        "weight_decay",
        "max_grad_norm",
    },
    "dpo": {"beta", "label_smoothing", "rpo_alpha", "reference"},
    "kto": {"beta", "rpo_alpha", "desirable_weight", "undesirable_weight", "reference"},
}

_OF_SETTINGS = (
    "learning_rate",
    "weight_decay",
    "max_grad_norm",
    "beta",
    "label_smoothing",
    "rpo_alpha",
    "desirable_weight",
    "undesirable_weight",
)
"""What the settings decide where it is not given."""


@dataclass(frozen=True, slots=True)
class Method:
    """A job's hyperparameters; None (OpenAI's "auto") until the examples are known.

    `optimizer` has no `total_steps` yet; `reference` is empty where none was given.
    """

    kind: SampleKind
    n_epochs: int | None
    batch_size: int | None
    learning_rate_multiplier: float | None
    optimizer: OptimizerSpec
    loss: LossSpec
    reference: str = ""

    @property
    def learning_rate(self) -> float:
        """The highest that the schedule reaches."""
        return self.optimizer.learning_rate

    def decided(self, examples: int) -> Method:
        """With "auto" replaced for so many examples. A few make nine steps or more."""
        sized = replace(self, batch_size=self.batch_size or min(_AUTO_BATCH, examples))
        enough = math.ceil(LEAST_WAY / sized.epoch_steps(examples))
        return replace(
            sized,
            n_epochs=self.n_epochs or max(_AUTO_EPOCHS, enough),
            learning_rate_multiplier=self.learning_rate_multiplier or 1.0,
        )

    def epoch_steps(self, examples: int) -> int:
        """Steps of one epoch over so many examples."""
        assert self.batch_size
        return -(-examples // self.batch_size)

    def epoch(self, samples: Sequence[Sample], seed: int, epoch: int) -> list[list[str]]:
        """Samples of each step of an epoch; shuffled anew for each, by the seed."""
        assert self.batch_size
        order = list(samples)
        Random(f"{seed}/{epoch}").shuffle(order)
        steps = cut_steps(order, self.batch_size, lambda sample: sample.desirable)
        return [[sample.sample_id for sample in step] for step in steps]


def read_method(
    method: Mapping[str, Any] | None,
    hyperparameters: Mapping[str, Any] | None,
    defaults: LearningSettings,
    *,
    kept: bool = False,
) -> tuple[dict[str, Any], Method]:
    """OpenAI's objects, complete, and what they mean. Raises `InvalidRequest`.

    `hyperparameters` is the old way to give them, for supervised jobs alone. Of what a job has
    `kept`, some may come from settings that nobody could make today.
    """
    if method is None:
        method = {"type": "supervised", "supervised": {"hyperparameters": hyperparameters or {}}}
    elif hyperparameters:
        raise InvalidRequest("give 'method' or 'hyperparameters', not both", param="method")
    try:
        parsed = msgspec.convert(dict(method), _Method)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"method: {error}", param="method") from None
    except (OverflowError, SystemError):  # an integer that is no float; msgspec does not catch it
        raise InvalidRequest("method: a number is too large", param="method") from None
    if parsed.type not in KINDS:
        raise InvalidRequest(
            f"method.type is one of {', '.join(KINDS)}, not '{parsed.type[:40]}'", param="method"
        )
    options = {"supervised": parsed.supervised, "dpo": parsed.dpo, "kto": parsed.kto}
    foreign = [name for name, given in options.items() if given and name != parsed.type]
    if foreign:
        raise InvalidRequest(
            f"method.{foreign[0]} does not go with the type '{parsed.type}'", param="method"
        )
    chosen = options[parsed.type]
    given = (chosen.hyperparameters if chosen else None) or _Hyperparameters()
    return _complete(parsed.type, given), _meaning(parsed.type, given, defaults, kept)


def written_down(method: Mapping[str, Any], defaults: LearningSettings) -> dict[str, Any]:
    """What `read_method` has made complete, with what `defaults` decide of it: a later change of
    the settings is not for this job."""
    kind, values = method["type"], msgspec.to_builtins(defaults)
    given = method[kind]["hyperparameters"]
    allowed = _OWN["supervised"] | _OWN[kind]
    left = {
        name: values[name]
        for name in _OF_SETTINGS
        if name in allowed and given.get(name, "auto") == "auto"
    }
    return {"type": kind, kind: {"hyperparameters": {**given, **left}}}


def _complete(kind: str, given: _Hyperparameters) -> dict[str, Any]:
    """As OpenAI shows it: what was not given is "auto"."""
    values = {
        name: value for name, value in msgspec.to_builtins(given).items() if value is not None
    }
    shown = {"n_epochs": "auto", "batch_size": "auto", "learning_rate_multiplier": "auto"}
    if kind == "dpo":
        shown["beta"] = "auto"
    return {"type": kind, kind: {"hyperparameters": {**shown, **values}}}


def _meaning(kind: str, given: _Hyperparameters, defaults: LearningSettings, kept: bool) -> Method:
    values = {
        name: value
        for name, value in msgspec.to_builtins(given).items()
        if value not in (None, "auto")
    }
    allowed = _OWN["supervised"] | _OWN[kind]
    for name, value in values.items():
        path = f"method.{kind}.hyperparameters.{name}"
        if name not in allowed:
            raise InvalidRequest(f"'{path}' does not go with this method", param=path)
        if name == "reference":
            reference_number(value, path)
        elif name != "lr_scheduler_type":
            _check_number(value, name, path)
    if values.get("n_epochs", 1) > _MOST_EPOCHS or values.get("batch_size", 1) > _MOST_BATCH:
        raise InvalidRequest(
            f"n_epochs is at most {_MOST_EPOCHS}, batch_size at most {_MOST_BATCH}", param="method"
        )
    multiplier = values.get("learning_rate_multiplier")
    rate = values.get("learning_rate", defaults.learning_rate) * (multiplier or 1.0)
    loss = LossSpec(
        LossKind(KINDS[kind].value),
        values.get("beta", defaults.beta),
        values.get("label_smoothing", defaults.label_smoothing),
        values.get("desirable_weight", defaults.desirable_weight),
        values.get("undesirable_weight", defaults.undesirable_weight),
        0.0 if kind == "supervised" else values.get("rpo_alpha", defaults.rpo_alpha),
    )
    optimizer = OptimizerSpec(
        learning_rate=rate,
        weight_decay=values.get("weight_decay", defaults.weight_decay),
        max_grad_norm=values.get("max_grad_norm", defaults.max_grad_norm),
        schedule=given.lr_scheduler_type or Schedule.CONSTANT,
        warmup_steps=values.get("warmup_steps", 0),
    )
    if not kept:
        check_bounds(rate, loss.label_smoothing if "label_smoothing" in values else 0.0)
    return Method(
        KINDS[kind],
        values.get("n_epochs"),
        values.get("batch_size"),
        multiplier,
        optimizer,
        loss,
        values.get("reference", ""),
    )


def _check_number(value: float, name: str, path: str) -> None:
    least = "at least 0" if name in _MAY_BE_0 else "above 0"
    if not 0 <= value <= sys.float_info.max or (value == 0 and name not in _MAY_BE_0):
        raise InvalidRequest(f"'{path}' must be {least}", param=path)
    if name == "weight_decay" and value > 1:
        raise InvalidRequest(f"'{path}' is at most 1", param=path)
