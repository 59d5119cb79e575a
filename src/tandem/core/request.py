"""A request as the engine knows it: token ids in, `n` sequences of token ids out."""

from __future__ import annotations

from dataclasses import dataclass, field

from tandem.core.lengths import Forecast
from tandem.core.sampling import SamplingParams
from tandem.core.slo import Slo, WorkClass


@dataclass(frozen=True, slots=True)
class Request:
    """What a client asks of the engine."""

    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    n: int = 1  # number of choices
    adapter: str | None = None  # a name; the engine pins the current version
    tenant: str = ""  # salts the KV keys: blocks are shared within one tenant only
    work_class: WorkClass = WorkClass.ONLINE
    priority: int = 0  # lower is more urgent (vLLM's convention)
    slo: Slo | None = None  # None: the default objective
    length: Forecast | None = None  # of each choice; None: nothing is known of it
    wants_state: bool = False  # choice 0's first token brings the prompt's last hidden state
    or_base: bool = False  # the base answers if the engine has no version of `adapter`
    # When the caller accepted it, on the machine's monotonic clock (0: unknown). The engine
    # replaces a value that is not plausible.
    arrival_s: float = 0.0
