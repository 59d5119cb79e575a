"""What all learning works with, as one value. Made by the composition root."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tandem.core.learning import EventRecord, VersionRecord, VersionState
from tandem.core.ports import EngineClient
from tandem.services.answering.tokenizer import Tokenizer
from tandem.services.learning.encode import Encoder, Limits
from tandem.services.learning.freshness import Freshness
from tandem.services.learning.live import LiveAnswers
from tandem.services.learning.measure import Examiner
from tandem.services.learning.publish import Publisher
from tandem.services.learning.references import References
from tandem.services.learning.settings import LearningSettings, resolve_settings
from tandem.store import Store, adapters, events, jobs
from tandem.telemetry.learning import LearningMetrics


@dataclass(frozen=True, slots=True)
class LearningTools:
    """See the module. `now` is in seconds since the epoch. `trains` is false where the policy never
    lets a training step begin: samples then wait as they are."""

    client: EngineClient
    store: Store
    tokenizer: Tokenizer
    references: References
    examiner: Examiner
    publisher: Publisher
    metrics: LearningMetrics
    freshness: Freshness
    defaults: LearningSettings
    now: Callable[[], float]
    live: LiveAnswers = field(default_factory=LiveAnswers)
    trains: bool = True

    async def rolled_back(self, adapter: str, number: int, version: VersionRecord | None) -> None:
        """Let the engine answer with what a roll back has committed: that version, which is
        `number`, or (None) the base."""
        if version is not None:
            await self.publisher.adopt(version)
        else:
            await self.publisher.withdraw(adapter)
        self.metrics.version.labels(adapter).set(number)
        self.metrics.versions.labels(adapter, "rolled_back").inc()

    async def tell(
        self, subject: str, level: str, message: str, data: Mapping[str, Any] | None = None
    ) -> None:
        """Write into the history of an adapter or a job, and so into the log."""
        event = EventRecord(subject, self.now(), level, message, dict(data or {}))
        await self.store.write(events.add, event)

    async def others_first(self, adapter: str) -> bool:
        """Whether feedback has to wait: a job trains the adapter, whose version knows nothing
        of what is learned meanwhile, or a candidate waits for a decision (gate `manual`)."""
        if await self.store.read(jobs.under_way, adapter):
            return True
        known = await self.store.read(adapters.versions, adapter)
        return any(version.state is VersionState.CANDIDATE for version in known)

    async def encoder_of(self, adapter: str) -> Encoder:
        """Encodes what `adapter` learns from, by its own settings, if it has any."""
        record = await self.store.read(adapters.find, adapter)
        own = {} if record is None else record.settings
        return self.encoder(resolve_settings(self.defaults, own))

    def encoder(self, settings: LearningSettings) -> Encoder:
        """Encodes for the served model. Raises `EngineDead` before it was ready."""
        info = self.client.info
        limits = Limits(settings.max_sample_tokens, info.max_model_len, info.recording_tokens)
        return Encoder(self.tokenizer, info.eos_token_ids, limits)
