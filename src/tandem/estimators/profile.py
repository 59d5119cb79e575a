"""What is known of a model on a device: rates, errors, ceilings; stored as a JSON file.

`tandem profile` measures a profile, `datasheet` computes one. The server starts its time model from
it, and the simulator uses it instead of the device. Invariant: a profile that was read is complete,
and all its numbers are finite.
"""

from __future__ import annotations

import logging
import math
import re
from codecs import BOM_UTF8
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from tandem.core.errors import InvalidRequest
from tandem.core.events import ModelInfo
from tandem.estimators.batching import Batching
from tandem.estimators.latency import Rates
from tandem.estimators.terms import FORWARD_TERMS, SLICE_TERMS

SCHEMA = "tandem-profile-6"
# In `ModelInfo.kernels`: how weights are packed, which profiles of before do not name.
_PACKING = re.compile(r"packed(?::(\w+))?")

logger = logging.getLogger(__name__)


# Shares of a model's layers of which a pass keeps everything, and only the inner part.
KeptShare = tuple[float, float]
NOTHING_KEPT: KeptShare = (0.0, 0.0)


@dataclass(frozen=True, slots=True)
class FitError:
    """Relative errors, (predicted - observed) / observed, on samples held out of the fit."""

    samples: int
    bias: float  # mean
    mape: float  # mean of the absolute value
    p95: float  # 95th percentile of the absolute value

    @staticmethod
    def of(relative: Sequence[float]) -> FitError | None:
        """Statistics of these errors; None if there are none."""
        if not relative:
            return None
        ordered = sorted(map(abs, relative))
        count = len(ordered)
        p95 = ordered[min(count - 1, int(0.95 * count))]
        return FitError(count, sum(relative) / count, sum(ordered) / count, p95)


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Limits of the device: FLOP/s of a large matrix product, and bytes/s of reading memory."""

    flops: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Caches:
    """Effects of caches that rates do not know, since they see only the pass before.

    A pass takes `resume_s` longer after the engine slept. It takes up to `decode_s` less (with rows
    of a prompt `prompt_s`) after passes that did not train, since caches then hold more of the
    weights. After n such passes the share `cold_share` ** n of that saving is still missing. Times
    are seconds.
    """

    resume_s: float = 0.0
    decode_s: float = 0.0
    prompt_s: float = 0.0
    cold_share: float = 0.0

    @property
    def numbers(self) -> tuple[float, ...]:
        """All values; none is below 0."""
        return (self.resume_s, self.decode_s, self.prompt_s, self.cold_share)


NO_CACHES = Caches()


@dataclass(frozen=True, slots=True)
class Profile:
    """A model on a device."""

    info: ModelInfo
    rates: Rates
    ceilings: Ceilings
    source: str  # where the rates come from
    errors: dict[str, FitError] = field(default_factory=dict)  # by kind of work
    # Relative residuals by kind of work; the simulator draws from them (`pass` for a kind without).
    noise: dict[str, tuple[float, ...]] = field(default_factory=dict)
    caches: Caches = NO_CACHES  # effects on top of the rates
    # error of a pass as the prediction of the same pass right after it
    repeat: FitError | None = None
    # Seconds of an iteration beside its work: to decide, to start, to collect and to apply.
    host_s: float = 0.0
    kept_alone: KeptShare = NOTHING_KEPT  # kept by passes of nothing but whole micro-batches
    kept_beside: KeptShare = NOTHING_KEPT  # kept by other passes
    versions: dict[str, str] = field(default_factory=dict)
    threads: int = 0  # of a CPU that computed; 0: no CPU, or not counted
    batching: Batching | None = None  # None: not fitted, as in profiles of before and data sheets

    def mismatch(self, info: ModelInfo) -> str | None:
        """Why this profile is not for the model and device of `info`; None if it is.

        Another packing of the weights is no reason: `doubt` tells it.
        """
        for name in ("weights_hash", "device", "dtype", "kernels"):
            mine, theirs = getattr(self.info, name), getattr(info, name)
            same = mine == theirs
            if name == "kernels":
                same = _PACKING.sub("packed", mine) == _PACKING.sub("packed", theirs)
            if not same:
                return f"{name} is {mine} in the profile and {theirs} here"
        if self.threads and info.threads and self.threads != info.threads:
            return f"threads is {self.threads} in the profile and {info.threads} here"
        return None

    def doubt(self, info: ModelInfo) -> str | None:
        """Why times here may differ from this profile's, though `mismatch` finds nothing."""
        mine, theirs = _packing(self.info), _packing(info)
        if mine == theirs:
            return None
        return (
            f"its weights were packed as {mine or 'unknown'}, here they are packed as "
            f"{theirs or 'unknown'}; `tandem profile` makes it again"
        )


def _packing(info: ModelInfo) -> str | None:
    """How the weights are packed, by name; None if they are not, or if it is not named."""
    found = _PACKING.search(info.kernels)
    return None if found is None else found[1]


def on_share(profile: Profile, share: float) -> Profile:
    """The same on a share of the device, 0 to 1: all its work takes longer in proportion, whether
    bound by memory or not. The loop's own time and the memory stay."""
    rates, caches, ceilings = profile.rates, profile.caches, profile.ceilings
    batching = profile.batching
    return replace(
        profile,
        rates=replace(
            rates,
            forward=tuple([each / share for each in rates.forward]),
            slices=tuple([each / share for each in rates.slices]),
            update_s=rates.update_s / share,
        ),
        caches=replace(
            caches,
            resume_s=caches.resume_s / share,
            decode_s=caches.decode_s / share,
            prompt_s=caches.prompt_s / share,
        ),
        ceilings=Ceilings(ceilings.flops * share, ceilings.bytes_per_s * share),
        source=f"{profile.source}, on {share:.0%} of the device",
        threads=0,
        batching=batching and replace(batching, phi=batching.phi / share, eta=batching.eta / share),
    )


def write_profile(profile: Profile, path: Path) -> None:
    """Write JSON, with coefficients under their names."""
    content = asdict(profile) | {"schema": SCHEMA}
    rates = content["rates"]
    rates["forward"] = dict(zip(FORWARD_TERMS, rates["forward"], strict=True))
    rates["slices"] = dict(zip(SLICE_TERMS, rates["slices"], strict=True))
    path.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n")


def read_profile(path: Path) -> Profile:
    """Read a profile. Raises `InvalidRequest` if it cannot be read or is no profile."""
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


def profile_for(path: str, info: ModelInfo) -> Profile | None:
    """The profile at `path`; None without a path. Warns if the weights were packed in another way.
    Raises `InvalidRequest` if it is for another model or device."""
    if not path:
        return None
    profile = read_profile(Path(path))
    if (problem := profile.mismatch(info)) is not None:
        raise InvalidRequest(f"the profile {path} is of something else: {problem}", param="profile")
    if (doubt := profile.doubt(info)) is not None:
        logger.warning("the profile %s: %s", path, doubt)
    return profile


def with_cache(profile: Profile, num_blocks: int) -> Profile:
    """The same profile with another number of KV blocks, for what-if questions."""
    return replace(profile, info=replace(profile.info, num_blocks=num_blocks))
