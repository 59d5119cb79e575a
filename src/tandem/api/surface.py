"""The services that the routes work with, as one value.

Made by the composition root and handed to every group of routes. Invariant: routes reach the
engine only through these.
"""

from __future__ import annotations

from dataclasses import dataclass

from tandem.core.ports import EngineClient
from tandem.services.adapters import Adapters
from tandem.services.auth import ApiKeys
from tandem.services.generation import Generation
from tandem.services.models import Models
from tandem.telemetry.metrics import ServerMetrics


@dataclass(frozen=True, slots=True)
class Surface:
    """What is served; `max_body_bytes` bounds every request body."""

    client: EngineClient
    generation: Generation
    models: Models
    adapters: Adapters
    keys: ApiKeys
    metrics: ServerMetrics
    max_body_bytes: int
