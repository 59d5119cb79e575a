"""The services that the routes work with, as one value.

Made by the composition root and handed to every group of routes. Invariant: routes reach the
engine only through these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tandem.api.bodies import Bodies
from tandem.api.entrance import Entrance
from tandem.core.ports import EngineClient, ServingEngine
from tandem.core.slo import Objectives
from tandem.services.answering.generation import Generation
from tandem.services.answering.models import Models
from tandem.services.answering.receipts import Receipts
from tandem.services.auth import ApiKeys
from tandem.services.batches.service import Batches
from tandem.services.feedback.service import FeedbackService
from tandem.services.files import Files
from tandem.services.jobs.service import Jobs
from tandem.services.learning.outlook import Outlooks
from tandem.services.versions.adapters import Adapters
from tandem.services.versions.service import Versions
from tandem.telemetry.metrics import ServerMetrics


@dataclass(frozen=True, slots=True)
class Surface:
    """What is served.

    Without learning, `versions`, `jobs` and `outlooks` are None and their routes refuse. `others`
    are engines that `client` has beside its main one.
    """

    client: EngineClient
    generation: Generation
    models: Models
    adapters: Adapters
    keys: ApiKeys
    entrance: Entrance
    metrics: ServerMetrics
    bodies: Bodies
    receipts: Receipts
    feedback: FeedbackService
    files: Files
    batches: Batches
    objectives: Objectives
    versions: Versions | None = None
    jobs: Jobs | None = None
    outlooks: Outlooks | None = None
    others: Mapping[str, ServingEngine] = field(default_factory=dict)
