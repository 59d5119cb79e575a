"""RT-LM's constants of a model on a device (IV-B, IV-C, V-A): phi, eta and the batch size C.

`tandem profile` fits them to what it measured and stores them; policies have options of the same
names that take them (`MEASURED`). Knows the time model, no policy. Invariant: all constants are
above 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from types import MappingProxyType

from tandem.estimators.latency import LatencyModel, Rates
from tandem.estimators.work import PassWork

Answers = Sequence[tuple[int, int]]
"""Input and output tokens of each."""

MEASURED = MappingProxyType({"measured": True})
"""Metadata of a policy's option of the same name as a constant: a profile gives its default."""

USUAL: Answers = ((160, 256),)
"""What answers are taken for of which nothing is known: 1.6 times as long as their prompts, as the
paper's phi / eta says in the median over its five models."""

# Full use of a device: twice the batch brings less than this times the tokens a second.
_WORTH = 1.1
_MOST = 256


@dataclass(frozen=True, slots=True)
class Batching:
    """`alpha` and `gather` (the paper's b) are None until `tandem profile --tune` searches them."""

    phi: float  # seconds from arrival to the priority point, for each input token
    eta: float  # seconds of an output token in a batch of `batch`
    batch: int  # C: the smallest batch at full use of the device
    alpha: float | None = None
    gather: float | None = None

    def __post_init__(self) -> None:
        if min(self.phi, self.eta, self.batch) <= 0:
            raise ValueError("phi, eta and batch must be above 0")

    @property
    def options(self) -> dict[str, str]:
        """As options of a policy."""
        return {name: str(value) for name, value in asdict(self).items() if value is not None}


def fit_batching(
    rates: Rates, host_s: float = 0.0, answers: Answers = USUAL, batch: int | None = None
) -> Batching:
    """Constants for answers like these, and for `batch`: by default the batch at full use. `host_s`
    are seconds of an iteration beside its pass.

    phi is such that the mean answer, alone in a full batch, ends at the mean priority point.
    """
    latency = LatencyModel(rates)
    context = round(fmean(taken + made / 2 for taken, made in answers))
    batch = batch or batch_at_full_use(latency, context)
    eta = _step_s(latency, batch, context) + host_s
    seconds = fmean(_prompt_s(latency, taken) + eta * made for taken, made in answers)
    return Batching(seconds / fmean(taken for taken, _ in answers), eta, batch)


def batch_at_full_use(latency: LatencyModel, context: int) -> int:
    """The paper's C, for decodes that read `context` tokens each."""

    def rate(size: int) -> float:
        return size / _step_s(latency, size, context)

    return next((size for size in range(1, _MOST) if rate(2 * size) < _WORTH * rate(size)), _MOST)


def _step_s(latency: LatencyModel, batch: int, context: int) -> float:
    work = PassWork()
    work.decode_all([context] * batch)
    return latency.forward_s(work)


def _prompt_s(latency: LatencyModel, tokens: int) -> float:
    work = PassWork()
    work.span(0, tokens, draws=1)
    return latency.forward_s(work)
