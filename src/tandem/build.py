"""The composition root: the only place that constructs parts and joins them.

Heavy parts are imported where they are built, so that a process constructs only what it runs: the
API process holds no model (though its tokenizer loads torch), the engine process no FastAPI. Run as
a module, this is the engine process.
"""

from __future__ import annotations

import gc
import importlib
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tandem.config import Settings
from tandem.core.clock import MonotonicClock
from tandem.core.errors import InvalidRequest
from tandem.engine.client import AsyncEngineClient, Progress
from tandem.engine.host import MakeLoop, serve
from tandem.engine.loop import EngineLoop
from tandem.engine.process import Launch, ProcessTransport
from tandem.engine.thread import ThreadTransport
from tandem.kv.cache import KVCache
from tandem.scheduling.scheduler import Scheduler
from tandem.scheduling.view import Budgets, Policy

if TYPE_CHECKING:
    from fastapi import FastAPI

    from tandem.core.ports import EngineClient, Executor

DEMO_NAME = "demo"
DEMO_PATH = Path(__file__).parent / "demo_model"

# glibc gives large temporaries back to the system after each operation unless told to keep them;
# it reads this when the process starts.
_ENGINE_ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 32),
    "MALLOC_TOP_PAD_": str(64 << 20),
}


def resolve_model(settings: Settings) -> Settings:
    """Replace the name `demo` by the bundled model's path and fill in the served name."""
    model = settings.model
    served = model.served_name or Path(model.model.rstrip("/")).name
    path = str(DEMO_PATH) if model.model == DEMO_NAME else model.model
    return replace(settings, model=replace(model, model=path, served_name=served))


def build_policy(name: str) -> Policy:
    """The policy `name` of `scheduling/policies`, or `package.module:factory` from elsewhere.

    Raises `InvalidRequest` that lists the known ones.
    """
    module, _, factory = name.partition(":")
    if not factory:
        module, factory = f"tandem.scheduling.policies.{name.replace('-', '_')}", "create"
    try:
        policy: Policy = getattr(importlib.import_module(module), factory)()
    except (ImportError, AttributeError) as error:
        raise InvalidRequest(
            f"there is no policy {name!r} ({error}); known: {', '.join(known_policies())}, or "
            "package.module:Class"
        ) from error
    return policy


def known_policies() -> list[str]:
    """Names of the policies that are shipped: one file each."""
    folder = Path(__file__).parent / "scheduling" / "policies"
    return sorted(path.stem for path in folder.glob("*.py") if path.stem != "__init__")


def build_loop(
    settings: Settings,
    progress: Progress = lambda stage, done: None,
    *,
    check_every_step: bool = False,
) -> EngineLoop:
    """Load the model and join an engine loop around it."""
    from tandem.executor.executor import DeviceExecutor
    from tandem.model.load import load_model

    settings = resolve_model(settings)
    build_policy(settings.scheduling.policy)  # a wrong name shall not cost a model load
    model = load_model(settings.model, progress)
    executor = DeviceExecutor(model, settings.cache, settings.scheduling, settings.adapters)
    # What exists now stays for good: without it, a full collection costs a tenth of an iteration.
    gc.collect()
    gc.freeze()
    return join_loop(settings, executor, check_every_step=check_every_step)


def join_loop(
    settings: Settings, executor: Executor, *, check_every_step: bool = False
) -> EngineLoop:
    """An engine loop over a given executor, with the adapters that are loaded at the start."""
    info = executor.info
    cache = KVCache(info.num_blocks, info.block_size, prefix_caching=settings.cache.prefix_caching)
    scheduler = Scheduler(
        build_policy(settings.scheduling.policy),
        cache,
        Budgets(settings.scheduling.max_sequences, settings.scheduling.max_batch_tokens),
        max_model_len=info.max_model_len,
        eos_token_ids=info.eos_token_ids,
    )
    return EngineLoop(
        scheduler,
        executor,
        MonotonicClock(),
        max_loaded_adapters=settings.adapters.max_loaded,
        check_every_step=check_every_step,
    )


def build_engine_client(
    settings: Settings, on_progress: Progress | None = None
) -> AsyncEngineClient:
    """A client of an engine in a supervised process of its own."""
    settings = resolve_model(settings)
    build_policy(settings.scheduling.policy)
    transport = ProcessTransport(
        [sys.executable, "-m", "tandem.build"],
        {name: os.environ.get(name, value) for name, value in _ENGINE_ENVIRONMENT.items()},
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


def build_app(settings: Settings, client: EngineClient) -> FastAPI:
    """The HTTP application over a client, which the caller starts and closes."""
    from prometheus_client import CollectorRegistry

    from tandem.api.app import create_app
    from tandem.api.surface import Surface
    from tandem.services.adapters import Adapters
    from tandem.services.admission import Admission
    from tandem.services.answer import Tools
    from tandem.services.auth import ApiKeys
    from tandem.services.generation import Generation
    from tandem.services.models import Models
    from tandem.services.tokenizer import Tokenizer
    from tandem.telemetry.metrics import ServerMetrics

    settings = resolve_model(settings)
    server, clock = settings.server, MonotonicClock()
    metrics = ServerMetrics(CollectorRegistry())
    models = Models(client, settings.model.served_name, created_s=int(time.time()))
    tools = Tools(
        client=client,
        tokenizer=Tokenizer.load(settings.model.model),
        admission=Admission(server.max_waiting_requests, server.max_waiting_tokens, clock),
        metrics=metrics,
        clock=clock,
    )
    surface = Surface(
        client=client,
        generation=Generation(
            tools, models, max_choices=server.max_n, rng=random.Random(os.urandom(16))
        ),
        models=models,
        adapters=Adapters(client, settings.adapters.roots, settings.adapters.preload),
        keys=ApiKeys.read(server.api_keys, server.api_key_file),
        metrics=metrics,
        max_body_bytes=server.max_body_bytes,
    )
    return create_app(surface)


def run_engine_process() -> None:
    """Main function of the engine process: read a `Launch` from standard input and serve."""
    import signal

    # The server's signals reach the whole terminal group; the engine ends when its client says so.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    launch = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Launch)
    settings = msgspec.msgpack.decode(launch.settings, type=Settings)
    serve(launch.endpoint, launch.incarnation, lambda progress: build_loop(settings, progress))


if __name__ == "__main__":
    run_engine_process()
