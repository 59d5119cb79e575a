"""The composition root of the API process: services, store and routes over an engine's client.

See `build.py` for the engine's side. Invariant: nothing here is imported by the engine process.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from tandem.api.app import create_app
from tandem.api.bodies import Bodies
from tandem.api.entrance import Entrance
from tandem.api.lines import Lines
from tandem.api.surface import Surface
from tandem.build import resolve_model
from tandem.config import Settings
from tandem.core.batches import POOL_TOKENS
from tandem.core.clock import MonotonicClock
from tandem.core.ports import EngineClient
from tandem.core.slo import Objectives, Slo
from tandem.engine.group import EngineGroup
from tandem.scheduling.registry import build_policy
from tandem.scheduling.view import Traits
from tandem.services.answering.admission_control import AdmissionControl
from tandem.services.answering.answer import Tools
from tandem.services.answering.generation import Generation
from tandem.services.answering.models import Models
from tandem.services.answering.receipts import Receipts
from tandem.services.answering.tokenizer import Tokenizer
from tandem.services.auth import ApiKeys
from tandem.services.background import Background
from tandem.services.batches.pool import Pool
from tandem.services.batches.service import Batches
from tandem.services.batches.tools import BatchTools
from tandem.services.feedback.service import FeedbackService, Hooks, Rules, Sources
from tandem.services.files import Files
from tandem.services.jobs.service import Jobs
from tandem.services.jobs.tools import JobTools
from tandem.services.learning.answers import Answers
from tandem.services.learning.canary import Canary, read_canary
from tandem.services.learning.freshness import Freshness
from tandem.services.learning.gate import Bounds
from tandem.services.learning.learner import Learner
from tandem.services.learning.live import LiveAnswers
from tandem.services.learning.measure import Examiner
from tandem.services.learning.outlook import Outlooks
from tandem.services.learning.publish import Publisher
from tandem.services.learning.references import References
from tandem.services.learning.settings import defaults
from tandem.services.learning.tools import LearningTools
from tandem.services.lengths.forecasts import Lengths
from tandem.services.passed import Passed
from tandem.services.versions.adapters import Adapters
from tandem.services.versions.checkpoints import Checkpoints
from tandem.services.versions.retention import Retention
from tandem.services.versions.service import Versions
from tandem.store import Store
from tandem.telemetry.learning import LearningMetrics
from tandem.telemetry.lengths import LengthMetrics
from tandem.telemetry.metrics import ServerMetrics

# Lines of batches that are in the engine: so many times as many as sequences run.
_POOL_TIMES = 2


def build_app(
    settings: Settings, client: EngineClient, tokenizer: Tokenizer | None = None
) -> FastAPI:
    """The HTTP application over a client, which the caller starts and closes.

    Opens the store, which the application's lifespan closes.
    """

    settings = resolve_model(settings)
    server, clock = settings.server, MonotonicClock()
    keys = ApiKeys.read(server.api_keys, server.api_key_file)  # may fail: before the store is open
    registry = CollectorRegistry()
    metrics = ServerMetrics(registry)
    freshness = Freshness(LearningMetrics(registry), time.time)
    store = Store.open(settings.store.directory, settings.store.url)
    receipts = Receipts(store, settings.store.receipt_days, time.time)
    lengths = Lengths(LengthMetrics(registry), store)
    files = Files(store, store.directory / "files", settings.store.max_file_bytes, time.time)
    checkpoints = Checkpoints(client, store)
    learning, name = settings.learning, settings.model.served_name
    makes = learning.enabled and learning.auto_adapters
    models = Models(client, name, int(time.time()), checkpoints, auto_adapters=makes)
    slo = Slo(settings.scheduling.ttft_slo, settings.scheduling.tpot_slo)
    tools = Tools(
        client=client,
        tokenizer=tokenizer or Tokenizer.load(settings.model.model),
        admission=AdmissionControl(server, clock, metrics.shed),
        offline=AdmissionControl(server, clock, metrics.shed),
        metrics=metrics,
        clock=clock,
        receipts=receipts,
        answered=freshness.answered,
        objectives=Objectives.parse(slo, settings.scheduling.adapter_slos),
        live=LiveAnswers(on=settings.learning.enabled and settings.learning.auto_rollback),
        lengths=lengths,
    )
    adapters = Adapters(client, settings.adapters.roots, settings.adapters.preload)
    background = build_background(settings, client, store, tools, models, adapters, freshness)
    generation = Generation(
        tools,
        models,
        max_choices=server.max_n,
        rng=random.Random(os.urandom(16)),
        priorities=_traits(settings).heeds_priority,
    )
    batches = build_batches(settings, store, tools, files, keys, generation, models)
    surface = Surface(
        client=client,
        generation=generation,
        models=models,
        adapters=adapters,
        keys=keys,
        entrance=Entrance(
            server.host, server.allowed_hosts, server.cors_origins, keyless=not keys.required
        ),
        metrics=metrics,
        bodies=Bodies(server.max_body_bytes),
        receipts=receipts,
        feedback=build_feedback(settings, store, receipts, models, background),
        files=files,
        batches=batches,
        objectives=tools.objectives,
        versions=background.versions if settings.learning.enabled else None,
        jobs=background.jobs if settings.learning.enabled else None,
        outlooks=(
            Outlooks(background.tools, background.learner) if settings.learning.enabled else None
        ),
        others=client.others if isinstance(client, EngineGroup) else {},
    )
    return create_app(surface, _running(background, receipts, files, batches, lengths))


@asynccontextmanager
async def _running(
    background: Background, receipts: Receipts, files: Files, batches: Batches, lengths: Lengths
) -> AsyncIterator[None]:
    try:
        await files.start()
        await receipts.start()
        await background.start()
        await lengths.start(background.tools.client.info.weights_hash)
        await batches.start()
        yield
    finally:
        await batches.stop()
        await lengths.stop()
        await receipts.stop()
        await files.stop()
        await background.stop()


def build_batches(
    settings: Settings,
    store: Store,
    tools: Tools,
    files: Files,
    keys: ApiKeys,
    generation: Generation,
    models: Models,
) -> Batches:
    """Batches whose lines are answered as the routes answer."""
    sequences = settings.scheduling.max_sequences
    return Batches(
        BatchTools(
            store=store,
            files=files,
            client=tools.client,
            models=models,
            keys=keys,
            respond=Lines(generation, models, tools.receipts),
            pool=Pool(
                _POOL_TIMES * sequences, min(POOL_TOKENS, settings.server.max_waiting_tokens // 2)
            ),
            most_lines=settings.batches.max_requests,
            most_file_bytes=settings.batches.max_file_bytes,
            most_bytes=settings.server.max_body_bytes,
            now=time.time,
            passed=Passed(store, time.time, time.monotonic),
        )
    )


def build_feedback(
    settings: Settings, store: Store, receipts: Receipts, models: Models, background: Background
) -> FeedbackService:
    """Feedback over an open store; the learner hears of it."""
    learning, tools = settings.learning, background.tools
    return FeedbackService(
        store,
        Sources(receipts, models, tools.encoder_of, time.time),
        Rules(learning.enabled, learning.auto_adapters, learning.held_out),
        Hooks(
            background.learner.notify,
            models.announce,
            background.learner.discard,
            tools.live.rated,
        ),
    )


def build_background(
    settings: Settings,
    client: EngineClient,
    store: Store,
    tools: Tools,
    models: Models,
    loading: Adapters,
    freshness: Freshness,
) -> Background:
    """Learning and fine-tuning jobs over an open store, which they close in the end."""
    directory = store.directory
    references = References(client, store)
    chats = tools.tokenizer.has_chat_template
    canary_set = read_canary(settings.learning.canary_file, chats=chats)
    answers = Answers(client)
    canary = Canary(canary_set, client, references, answers, directory / "canary")
    shared = LearningTools(
        client=client,
        store=store,
        tokenizer=tools.tokenizer,
        references=references,
        examiner=Examiner(client, store, references, canary, answers, Bounds()),
        publisher=Publisher(
            client,
            store,
            directory,
            max_adapters=settings.adapters.max_loaded,
            retention=Retention(settings.store.keep_versions, settings.learning.reference),
        ),
        metrics=freshness.metrics,
        freshness=freshness,
        defaults=defaults(settings.learning),
        now=time.time,
        live=tools.live,
        trains=_traits(settings).trains,
    )
    learner = Learner(shared)
    versions = Versions(shared, learner, models, loading)
    jobs = Jobs(JobTools(shared, learner, directory, models.announce), models)
    learns = settings.learning.enabled
    return Background(shared, learner, versions, jobs, directory, canary=canary, learns=learns)


def _traits(settings: Settings) -> Traits:
    """Of the policy that the engine will have."""
    scheduling = settings.scheduling
    return build_policy(scheduling.policy, scheduling.policy_options).traits
