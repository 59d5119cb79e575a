"""How one adapter learns: the server's defaults under the adapter's own settings.

An adapter keeps only what differs from the defaults (`AdapterRecord.settings`). Invariant: what is
kept was checked here, so that reading it back cannot fail.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import msgspec

from tandem.config import LearningConfig
from tandem.core.errors import InvalidRequest
from tandem.core.events import ModelInfo
from tandem.core.learning import GateMode, SampleKind
from tandem.core.training import LoraSpec, LossKind, LossSpec, OptimizerSpec
from tandem.services.learning.families import FAMILIES

BASE = "base"
MOST_LEARNING_RATE = 1.0
"""Each update of Adam moves a parameter by about as much as this."""
LEAST_WAY, MOST_WAY = 9.0, 24.0
"""How far a first version goes at least, and any version at most, in full steps. Between the base
and a taste answers are broken, though most samples are likely already (docs/adr/0019)."""
LOOK_EVERY = 4.0
"""How many full steps an unsound candidate goes on before the gate looks at it again."""
LABEL_SMOOTHING_LIMIT = 0.5
"""At 0.5 a pair expresses no preference; above it, the opposite one."""
_VERSION = re.compile(r"version:([1-9]\d{0,17})")


@dataclass(frozen=True, slots=True)
class LearningSettings:
    """One adapter's settings; meanings as in `LearningConfig` and `core.training`.

    `epochs`: most passes over a version's samples. `version_wait_s`: longest time that the first
    sample waits for others.
    """

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = ()
    learning_rate: float = 1e-3
    warmup_steps: int = 0
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    beta: float = 0.1
    label_smoothing: float = 0.0
    rpo_alpha: float = 5.0
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    batch_samples: int = 8
    micro_batch_samples: int = 4
    steps_per_version: int = 8
    epochs: int = 9
    version_wait_s: float = 60.0
    replay: float = 0.25
    reference: str = BASE
    gate: GateMode = GateMode.AUTO
    key_share: float = 1.0
    max_sample_tokens: int = 2048

    @property
    def reference_version(self) -> int:
        """The number of the version that is the reference; 0 for the base model."""
        return reference_number(self.reference)

    def version_samples(self, *, replaying: bool) -> int:
        """Most new samples that one version uses. `replaying`: part of each step is replayed
        samples."""
        fresh = self.batch_samples - (self.replay_samples if replaying else 0)
        return self.steps_per_version * fresh

    @property
    def replay_samples(self) -> int:
        """Replayed samples in a full step; at least one sample is new."""
        return min(round(self.replay * self.batch_samples), self.batch_samples - 1)

    @property
    def lora(self) -> LoraSpec:
        """The shape of a new adapter."""
        return LoraSpec(self.rank, self.alpha, self.targets)

    def optimizer(self, refusals: int = 0) -> OptimizerSpec:
        """The optimiser. The rate is halved for each refused version of the same samples."""
        return OptimizerSpec(
            learning_rate=self.learning_rate / 2**refusals,
            weight_decay=self.weight_decay,
            max_grad_norm=self.max_grad_norm,
            warmup_steps=self.warmup_steps,
        )

    def loss(self, kind: SampleKind) -> LossSpec:
        """The loss for samples of one kind."""
        return LossSpec(
            LossKind(kind.value),
            self.beta,
            self.label_smoothing,
            self.desirable_weight,
            self.undesirable_weight,
            self.rpo_alpha if FAMILIES[kind].likelihood else 0.0,
        )


def reference_number(reference: str, param: str = "reference") -> int:
    """The version that a reference names; 0 for the base. Raises `InvalidRequest`."""
    if reference == BASE:
        return 0
    match = _VERSION.fullmatch(reference)
    if match is None:
        raise InvalidRequest(
            f"{param} is 'base' or 'version:N', not '{reference[:40]}'", param=param
        )
    return int(match[1])


def defaults(config: LearningConfig) -> LearningSettings:
    """The server's defaults. Raises `InvalidRequest` that names the setting."""
    names = {item.name for item in fields(LearningSettings)}
    known = {item.name: getattr(config, item.name) for item in fields(config) if item.name in names}
    settings = resolve_settings(LearningSettings(), known)
    check_bounds(settings.learning_rate, settings.label_smoothing)
    return settings


def check_bounds(learning_rate: float, label_smoothing: float) -> None:
    """Refuse values that can only damage the adapter. Raises `InvalidRequest`.

    Checked for new settings and jobs only, so that stored ones stay readable.
    """
    if not learning_rate <= MOST_LEARNING_RATE:
        raise InvalidRequest(
            f"learning_rate is at most {MOST_LEARNING_RATE:g}, not {learning_rate:g}",
            param="learning_rate",
        )
    if not 0.0 <= label_smoothing < LABEL_SMOOTHING_LIMIT:
        raise InvalidRequest(
            f"label_smoothing must be in [0, {LABEL_SMOOTHING_LIMIT:g}), not {label_smoothing:g}",
            param="label_smoothing",
        )


def check_new(settings: LearningSettings, info: ModelInfo) -> None:
    """Refuse settings that no trainer of this model can have. Raises `InvalidRequest`."""
    check_bounds(settings.learning_rate, settings.label_smoothing)
    if info.max_rank and settings.rank > info.max_rank:
        raise InvalidRequest(
            f"rank is at most {info.max_rank} (adapters.max_rank), not {settings.rank}",
            param="rank",
        )
    for target in settings.targets if info.linears else ():
        if not any(name == target or name.endswith(f".{target}") for name in info.linears):
            known = ", ".join(sorted({name.rpartition(".")[2] for name in info.linears}))
            raise InvalidRequest(
                f"no linear layer of the model is called '{target[:100]}'; known: {known}",
                param="targets",
            )


def resolve_settings(base: LearningSettings, own: Mapping[str, Any]) -> LearningSettings:
    """`base` with an adapter's own settings. Raises `InvalidRequest` that names the setting."""
    unknown = set(own) - {item.name for item in fields(LearningSettings)}
    if unknown:
        known = ", ".join(item.name for item in fields(LearningSettings))
        raise InvalidRequest(
            f"there is no setting '{min(unknown)}'; known: {known}", param=min(unknown)
        )
    try:
        typed = msgspec.convert(msgspec.to_builtins(dict(own)), dict[str, Any])
        merged = {**msgspec.to_builtins(base), **typed}
        settings = msgspec.convert(merged, LearningSettings)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"learning settings: {error}", param="settings") from error
    except (OverflowError, SystemError):  # an integer that is no float; msgspec does not catch it
        raise InvalidRequest("learning settings: a number is too large", param="settings") from None
    _check(settings)
    return settings


def _check(settings: LearningSettings) -> None:  # noqa: C901
    at_least_one = ("rank", "batch_samples", "micro_batch_samples", "steps_per_version", "epochs")
    values = msgspec.to_builtins(settings)
    for name in (*at_least_one, "max_sample_tokens"):
        if values[name] < 1:
            raise InvalidRequest(f"{name} must be at least 1, not {values[name]}", param=name)
    for name in ("alpha", "learning_rate", "beta", "desirable_weight", "undesirable_weight"):
        if not 0.0 < values[name] < float("inf"):
            raise InvalidRequest(f"{name} must be above 0, not {values[name]}", param=name)
    for name in ("warmup_steps", "max_grad_norm", "rpo_alpha", "version_wait_s"):
        if not 0.0 <= values[name] < float("inf"):
            raise InvalidRequest(f"{name} must be at least 0, not {values[name]}", param=name)
    if not 0.0 <= settings.weight_decay <= 1.0:
        raise InvalidRequest(
            f"weight_decay must be in [0, 1], not {settings.weight_decay}", param="weight_decay"
        )
    # Stored settings may smooth by up to 1; `check_bounds` limits new ones to 0.5.
    for name in ("replay", "label_smoothing"):
        if not 0.0 <= values[name] < 1.0:
            raise InvalidRequest(f"{name} must be in [0, 1), not {values[name]}", param=name)
    if not 0.0 < settings.key_share <= 1.0:
        raise InvalidRequest("key_share must be in (0, 1]", param="key_share")
    reference_number(settings.reference)
