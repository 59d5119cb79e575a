"""The composition root: the only place that constructs parts and joins them.

Heavy parts are imported where they are built, so that a process constructs only what it runs: the
API process holds no model (though its tokenizer loads torch), the engine process no FastAPI. Run as
a module, this is the engine process.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from tandem.config import Settings
from tandem.core.clock import Clock, MonotonicClock, VirtualClock
from tandem.core.slo import Objectives, Slo
from tandem.engine.client import AsyncEngineClient, Progress
from tandem.engine.host import MakeLoop, serve
from tandem.engine.loop import EngineLoop
from tandem.engine.process import Launch, ProcessTransport
from tandem.engine.thread import ThreadTransport
from tandem.estimators.latency import Rates
from tandem.estimators.profile import Profile, profiled_rates
from tandem.kv.cache import KVCache
from tandem.model.names import locate, served_name
from tandem.processor import spin_briefly
from tandem.scheduling.registry import build_policy
from tandem.scheduling.scheduler import Scheduler
from tandem.scheduling.view import Budgets, Traits

if TYPE_CHECKING:
    from fastapi import FastAPI

    from tandem.core.plan import LanePlan, StepResult
    from tandem.core.ports import EngineClient, Executor
    from tandem.executor.executor import DeviceExecutor
    from tandem.services.adapters import Adapters
    from tandem.services.answer import Tools
    from tandem.services.background import Background
    from tandem.services.feedback import FeedbackService
    from tandem.services.files import Files
    from tandem.services.learning.freshness import Freshness
    from tandem.services.learning.outlook import Outlooks
    from tandem.services.models import Models
    from tandem.services.receipts import Receipts
    from tandem.services.tokenizer import Tokenizer
    from tandem.sim.curves import Curve
    from tandem.sim.executor import SimExecutor
    from tandem.store import Store

# An iteration makes hundreds of short-lived objects, nearly none of them in cycles.
_GC_YOUNG_OBJECTS = 20_000


def resolve_model(settings: Settings, progress: Progress = lambda stage, done: None) -> Settings:
    """Replace the model's name by the directory that holds it, and fill in the served name.

    The first call may unpack a GGUF file or download; what it returns is resolved at once.
    """
    model = settings.model
    served = model.served_name or served_name(model.model)
    path = str(locate(model.model, progress))
    return replace(settings, model=replace(model, model=path, served_name=served))


def build_loop(
    settings: Settings,
    progress: Progress = lambda stage, done: None,
    *,
    check_every_step: bool = False,
) -> EngineLoop:
    """Load the model and join an engine loop around it."""
    from tandem.allocator import give_back

    settings = resolve_model(settings)
    # A wrong name shall not cost a model load.
    build_policy(settings.scheduling.policy, settings.scheduling.policy_options)
    executor, rates = build_executor(settings, progress), None
    if settings.scheduling.accustom_s and not settings.scheduling.profile:
        from tandem.executor.profile import rough_rates

        progress("measuring", 1.0)
        rates = rough_rates(executor, settings.scheduling)
    # What exists now stays for good: without it, a full collection costs a tenth of an iteration.
    gc.collect()
    give_back()  # loading and measuring needed much that serving does not
    gc.freeze()
    gc.set_threshold(_GC_YOUNG_OBJECTS)
    return join_loop(settings, executor, rates=rates, check_every_step=check_every_step)


def build_executor(
    settings: Settings, progress: Progress = lambda stage, done: None
) -> DeviceExecutor:
    """Load the model onto its device, with room for KV and recordings."""
    spin_briefly()
    from tandem.allocator import keep_large_blocks
    from tandem.executor.executor import DeviceExecutor
    from tandem.model.linear import keep_kernels
    from tandem.model.load import load_model

    keep_large_blocks()
    settings = resolve_model(settings)
    if settings.model.kernels == "auto":  # else rows come in any number
        keep_kernels()
    model = load_model(settings.model, progress)
    return DeviceExecutor(
        model,
        settings.cache,
        settings.scheduling,
        settings.adapters,
        settings.learning,
        share_cores=not settings.model.threads,  # a number that the user chose is kept
    )


def join_loop(
    settings: Settings,
    executor: Executor,
    *,
    clock: Clock | None = None,
    rates: Rates | None = None,
    check_every_step: bool = False,
) -> EngineLoop:
    """An engine loop over a given executor; `rates` were measured (none: the configured profile's,
    else guesses)."""
    info, scheduling = executor.info, settings.scheduling
    cache = KVCache(info.num_blocks, info.block_size, prefix_caching=settings.cache.prefix_caching)
    scheduler = Scheduler(
        build_policy(scheduling.policy, scheduling.policy_options),
        cache,
        Budgets(scheduling.max_sequences, scheduling.max_batch_tokens),
        info,
        default_slo=Slo(scheduling.ttft_slo, scheduling.tpot_slo),
        rates=rates or profiled_rates(scheduling.profile, info),
    )
    return EngineLoop(
        scheduler,
        executor,
        clock or MonotonicClock(),
        max_loaded_adapters=settings.adapters.max_loaded,
        switch=settings.adapters.switch,
        check_every_step=check_every_step,
    )


def build_simulation(
    settings: Settings,
    profile: Profile,
    clock: VirtualClock,
    *,
    curve: Curve | None = None,
    noise: bool = True,
    seed: int = 0,
    on_plan: Callable[[LanePlan, StepResult], None] | None = None,
    check_every_step: bool = False,
) -> tuple[EngineLoop, SimExecutor]:
    """The engine of a simulation: all parts but the device and the clock are the real ones.

    See `sim.executor.SimExecutor` for the options.
    """
    from tandem.sim.curves import Saturating
    from tandem.sim.executor import SimExecutor

    executor = SimExecutor(
        profile,
        clock,
        curve=curve or Saturating(),
        beta=settings.learning.beta,
        noise=noise,
        seed=seed,
        on_plan=on_plan,
    )
    loop = join_loop(
        settings, executor, clock=clock, rates=profile.rates, check_every_step=check_every_step
    )
    return loop, executor


def build_engine_client(
    settings: Settings, on_progress: Progress | None = None
) -> AsyncEngineClient:
    """A client of an engine in a supervised process of its own."""
    settings = resolve_model(settings)
    build_policy(settings.scheduling.policy, settings.scheduling.policy_options)
    transport = ProcessTransport(
        [sys.executable, "-m", "tandem.build"],
        msgspec.msgpack.encode(settings),
        MonotonicClock(),
    )
    return AsyncEngineClient(transport, preload=settings.adapters.preload, on_progress=on_progress)


def build_thread_client(
    settings: Settings, make_loop: Callable[[Settings], EngineLoop] | None = None
) -> AsyncEngineClient:
    """A client of an engine in a thread of this process, for tests and notebooks."""
    settings = resolve_model(settings)
    make: MakeLoop = lambda progress: (  # noqa: E731
        make_loop(settings) if make_loop is not None else build_loop(settings, progress)
    )
    return AsyncEngineClient(ThreadTransport(make), preload=settings.adapters.preload)


def build_app(
    settings: Settings, client: EngineClient, tokenizer: Tokenizer | None = None
) -> FastAPI:
    """The HTTP application over a client, which the caller starts and closes.

    Opens the store, which the application's lifespan closes.
    """
    from prometheus_client import CollectorRegistry

    from tandem.api.app import create_app
    from tandem.api.bodies import Bodies
    from tandem.api.entrance import Entrance
    from tandem.api.surface import Surface
    from tandem.services.adapters import Adapters
    from tandem.services.admission import Admission
    from tandem.services.answer import Tools
    from tandem.services.auth import ApiKeys
    from tandem.services.checkpoints import Checkpoints
    from tandem.services.files import Files
    from tandem.services.generation import Generation
    from tandem.services.learning.freshness import Freshness
    from tandem.services.learning.live import LiveAnswers
    from tandem.services.models import Models
    from tandem.services.receipts import Receipts
    from tandem.services.tokenizer import Tokenizer
    from tandem.store import Store
    from tandem.telemetry.learning import LearningMetrics
    from tandem.telemetry.metrics import ServerMetrics

    settings = resolve_model(settings)
    server, clock = settings.server, MonotonicClock()
    keys = ApiKeys.read(server.api_keys, server.api_key_file)  # may fail: before the store is open
    registry = CollectorRegistry()
    metrics = ServerMetrics(registry)
    freshness = Freshness(LearningMetrics(registry), time.time)
    store = Store.open(settings.store.directory, settings.store.url)
    receipts = Receipts(store, settings.store.receipt_days, time.time)
    files = Files(store, store.directory / "files", settings.store.max_file_bytes, time.time)
    checkpoints = Checkpoints(client, store)
    learning, name = settings.learning, settings.model.served_name
    makes = learning.enabled and learning.auto_adapters
    models = Models(client, name, int(time.time()), checkpoints, auto_adapters=makes)
    slo = Slo(settings.scheduling.ttft_slo, settings.scheduling.tpot_slo)
    tools = Tools(
        client=client,
        tokenizer=tokenizer or Tokenizer.load(settings.model.model),
        admission=Admission(server, clock, metrics.shed),
        metrics=metrics,
        clock=clock,
        receipts=receipts,
        answered=freshness.answered,
        objectives=Objectives.parse(slo, settings.scheduling.adapter_slos),
        live=LiveAnswers(on=settings.learning.enabled and settings.learning.auto_rollback),
    )
    adapters = Adapters(client, settings.adapters.roots, settings.adapters.preload)
    background = build_background(settings, client, store, tools, models, adapters, freshness)
    surface = Surface(
        client=client,
        generation=Generation(
            tools,
            models,
            max_choices=server.max_n,
            rng=random.Random(os.urandom(16)),
            priorities=_traits(settings).heeds_priority,
        ),
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
        versions=background.versions if settings.learning.enabled else None,
        jobs=background.jobs if settings.learning.enabled else None,
        outlooks=build_outlooks(settings, background) if settings.learning.enabled else None,
    )
    return create_app(surface, _running(background, receipts, files))


@asynccontextmanager
async def _running(background: Background, receipts: Receipts, files: Files) -> AsyncIterator[None]:
    await files.start()
    await receipts.start()
    try:
        await background.start()
        yield
    finally:
        await receipts.stop()
        await files.stop()
        await background.stop()


def build_feedback(
    settings: Settings, store: Store, receipts: Receipts, models: Models, background: Background
) -> FeedbackService:
    """Feedback over an open store; the learner hears of it."""
    from tandem.services.feedback import FeedbackService, Hooks, Rules, Sources

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


def build_outlooks(settings: Settings, background: Background) -> Outlooks:
    """Says what becomes of feedback."""
    from tandem.services.learning.outlook import Outlooks

    trains = _traits(settings).trains
    return Outlooks(background.tools, background.learner, trains=trains)


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
    from tandem.services.background import Background
    from tandem.services.jobs.service import Jobs
    from tandem.services.jobs.tools import JobTools
    from tandem.services.learning.answers import Answers
    from tandem.services.learning.canary import Canary, read_canary
    from tandem.services.learning.gate import Bounds
    from tandem.services.learning.learner import Learner
    from tandem.services.learning.measure import Examiner
    from tandem.services.learning.publish import Publisher
    from tandem.services.learning.references import References
    from tandem.services.learning.settings import defaults
    from tandem.services.learning.tools import LearningTools
    from tandem.services.retention import Retention
    from tandem.services.versions import Versions

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
    )
    learner = Learner(shared)
    versions = Versions(shared, learner, models, loading)
    trains = _traits(settings).trains
    jobs = Jobs(JobTools(shared, learner, directory, models.announce, trains=trains), models)
    learns = settings.learning.enabled
    return Background(shared, learner, versions, jobs, directory, canary=canary, learns=learns)


def _traits(settings: Settings) -> Traits:
    """Of the policy that the engine will have."""
    scheduling = settings.scheduling
    return build_policy(scheduling.policy, scheduling.policy_options).traits


def run_engine_process() -> None:
    """Main function of the engine process: read a `Launch` from standard input and serve."""
    # The server's signals reach the whole process group; the engine ends when its client says so.
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    launch = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Launch)
    settings = msgspec.msgpack.decode(launch.settings, type=Settings)
    serve(
        launch.endpoint,
        launch.incarnation,
        lambda progress: build_loop(settings, progress),
        launch.parent,
    )


if __name__ == "__main__":
    run_engine_process()
