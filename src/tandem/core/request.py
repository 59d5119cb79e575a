"""A request as the engine knows it: token ids in, `n` sequences of token ids out."""

from __future__ import annotations

from dataclasses import dataclass, field

from tandem.core.sampling import SamplingParams
from tandem.core.slo import Slo, WorkClass


@dataclass(frozen=True, slots=True)
class Request:
    """What a client asks of the engine.

    `adapter` is a name; the engine pins the version that is current when it takes the request.
    `tenant` salts the KV keys: blocks are shared within one tenant only. A lower `priority` is
    more urgent (vLLM's convention). `arrival_s` is when whoever asks accepted it, on the machine's
    monotonic clock (0: not said); the engine replaces it by what it can believe.
    """

    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    n: int = 1
    adapter: str | None = None
    tenant: str = ""
    work_class: WorkClass = WorkClass.ONLINE
    priority: int = 0
    slo: Slo | None = None
    arrival_s: float = 0.0
