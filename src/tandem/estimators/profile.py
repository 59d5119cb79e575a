"""What is known of a model on a device: rates, errors, ceilings; a JSON file.

`tandem profile` measures one, `datasheet` computes one; the server starts its time model from it
and the simulator replaces the device by it. Invariant: a profile that was read is complete and all
its numbers are finite.
"""

from __future__ import annotations

import math
from codecs import BOM_UTF8
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from tandem.core.errors import InvalidRequest
from tandem.core.events import ModelInfo
from tandem.estimators.latency import Rates
from tandem.estimators.terms import FORWARD_TERMS, SLICE_TERMS

SCHEMA = "tandem-profile-6"


# Shares of a model's layers of which a pass keeps everything, and the inner part.
KeptShare = tuple[float, float]
NOTHING_KEPT: KeptShare = (0.0, 0.0)


@dataclass(frozen=True, slots=True)
class FitError:
    """Of relative errors (predicted less observed, over observed) on samples held out of the fit.

    `mape` is the mean of their absolute values, `p95` what 95% of those are at most.
    """

    samples: int
    bias: float
    mape: float
    p95: float

    @staticmethod
    def of(relative: Sequence[float]) -> FitError | None:
        """Of these errors; None if there are none."""
        if not relative:
            return None
        ordered = sorted(map(abs, relative))
        count = len(ordered)
        p95 = ordered[min(count - 1, int(0.95 * count))]
        return FitError(count, sum(relative) / count, sum(ordered) / count, p95)


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the device reaches at most: a large matrix product, FLOP/s; reading memory, bytes/s."""

    flops: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Caches:
    """Seconds by which a pass differs from what rates say, which know only the pass before.

    It takes `resume_s` longer when the engine slept before it, and up to `decode_s` less (with rows
    of a prompt `prompt_s`) when passes came before it that did not train: the caches hold more of
    the weights then. Of that, `cold_share` to the power of their number is still missing.
    """

    resume_s: float = 0.0
    decode_s: float = 0.0
    prompt_s: float = 0.0
    cold_share: float = 0.0

    @property
    def numbers(self) -> tuple[float, ...]:
        """All of them; none is below 0."""
        return (self.resume_s, self.decode_s, self.prompt_s, self.cold_share)


NO_CACHES = Caches()


@dataclass(frozen=True, slots=True)
class Profile:
    """See the module. `errors` and `noise` by kind of work; noise are relative residuals, from
    which the simulator draws (those of `pass` for a kind without any); `source` says where the
    rates come from, `caches` what comes on top of them. A pass predicts the same pass right after
    it with the error `repeat`. `host_s` are seconds of an iteration outside of its work: to decide,
    to start, to collect and to apply. Passes of nothing but whole micro-batches keep `kept_alone`
    of them for the backward, others `kept_beside`. `threads` computed, where the device is a CPU
    (0: it is none, or they were not counted).
    """

    info: ModelInfo
    rates: Rates
    ceilings: Ceilings
    source: str
    errors: dict[str, FitError] = field(default_factory=dict)
    noise: dict[str, tuple[float, ...]] = field(default_factory=dict)
    caches: Caches = NO_CACHES
    repeat: FitError | None = None
    host_s: float = 0.0
    kept_alone: KeptShare = NOTHING_KEPT
    kept_beside: KeptShare = NOTHING_KEPT
    versions: dict[str, str] = field(default_factory=dict)
    threads: int = 0

    def mismatch(self, info: ModelInfo) -> str | None:
        """Why this profile does not speak of the model and device of `info`, if so."""
        for name in ("weights_hash", "device", "dtype", "kernels"):
            mine, theirs = getattr(self.info, name), getattr(info, name)
            if mine != theirs:
                return f"{name} is {mine} in the profile and {theirs} here"
        if self.threads and info.threads and self.threads != info.threads:
            return f"threads is {self.threads} in the profile and {info.threads} here"
        return None


def write_profile(profile: Profile, path: Path) -> None:
    """As JSON; coefficients under their names."""
    content = asdict(profile) | {"schema": SCHEMA}
    rates = content["rates"]
    rates["forward"] = dict(zip(FORWARD_TERMS, rates["forward"], strict=True))
    rates["slices"] = dict(zip(SLICE_TERMS, rates["slices"], strict=True))
    path.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n")


def read_profile(path: Path) -> Profile:
    """Raises `InvalidRequest` if it cannot be read, or is no profile."""
    try:
        content: dict[str, Any] = msgspec.json.decode(path.read_bytes().removeprefix(BOM_UTF8))
        if content.pop("schema", None) != SCHEMA:
            raise ValueError(f"its schema is not {SCHEMA}: make it again")
        rates = content["rates"]
        rates["forward"] = [rates["forward"][name] for name in FORWARD_TERMS]
        rates["slices"] = [rates["slices"][name] for name in SLICE_TERMS]
        profile = msgspec.convert(content, Profile)
    except FileNotFoundError as error:
        hint = "`tandem profile MODEL` writes one"
        raise InvalidRequest(f"there is no profile {path}; {hint}", param="profile") from error
    except (OSError, ValueError, KeyError, TypeError, msgspec.DecodeError) as error:
        raise InvalidRequest(f"cannot read the profile {path}: {error}", param="profile") from error
    seconds = (*profile.rates.forward, *profile.rates.slices, profile.rates.update_s)
    if not all(math.isfinite(value) and value > 0.0 for value in seconds):
        raise InvalidRequest(f"{path}: a rate is not above 0", param="profile")
    if not (all(each >= 0.0 for each in profile.caches.numbers) and profile.caches.cold_share <= 1):
        raise InvalidRequest(
            f"{path}: caches must be 0 or more, cold_share 1 or less", param="profile"
        )
    if not (math.isfinite(profile.host_s) and profile.host_s >= 0.0):
        raise InvalidRequest(f"{path}: host_s must be 0 or more", param="profile")
    return profile


def profiled_rates(path: str, info: ModelInfo) -> Rates | None:
    """Of the profile at `path`, if there is one; raises `InvalidRequest` if it speaks of another
    model or device."""
    if not path:
        return None
    profile = read_profile(Path(path))
    if (problem := profile.mismatch(info)) is not None:
        raise InvalidRequest(f"the profile {path} is of something else: {problem}", param="profile")
    return profile.rates


def with_cache(profile: Profile, num_blocks: int) -> Profile:
    """The same with another number of KV blocks, for what-if questions."""
    return replace(profile, info=replace(profile.info, num_blocks=num_blocks))
