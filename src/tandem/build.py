"""The composition root of the engine: constructs its parts and joins them, or a client of it.

Heavy parts are imported where they are built, so that a process constructs only what it runs: the
API process (`build_app.py`) holds no model (though its tokenizer loads torch), the engine process
no FastAPI. Run as a module, this is the engine process.
"""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from tandem.allocator import give_back_regularly
from tandem.config import Settings
from tandem.core.clock import Clock, MonotonicClock, VirtualClock
from tandem.core.errors import InvalidRequest
from tandem.core.ports import EngineClient
from tandem.core.slo import Slo
from tandem.engine.client import AsyncEngineClient, Progress
from tandem.engine.division import Division, divide
from tandem.engine.group import EngineGroup
from tandem.engine.host import MakeLoop, serve
from tandem.engine.loop import EngineLoop
from tandem.engine.placement import overflow
from tandem.engine.process import Launch, ProcessTransport
from tandem.engine.thread import ThreadTransport
from tandem.estimators.latency import Rates
from tandem.estimators.profile import Profile, profile_for
from tandem.kv.cache import KVCache
from tandem.model.names import locate, served_name
from tandem.processor import core_numbers, keep_to, spin_briefly
from tandem.scheduling.registry import build_policy
from tandem.scheduling.scheduler import Scheduler
from tandem.scheduling.view import Budgets

if TYPE_CHECKING:
    from tandem.core.plan import LanePlan, StepResult
    from tandem.core.ports import Executor
    from tandem.executor.executor import DeviceExecutor
    from tandem.model.load import LoadedModel
    from tandem.sim.curves import Curve
    from tandem.sim.executor import SimExecutor

OVERFLOW = "overflow"
"""The name of the second engine, in messages and metrics."""

# An iteration makes hundreds of short-lived objects, nearly none of them in cycles.
_GC_YOUNG_OBJECTS = 20_000
# Seconds in which passes are captured before the first request. Others are when they are needed.
_CAPTURE_S = 8.0
# Free memory that the engine process keeps for its temporaries.
_FREE_BYTES = 256 << 20


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
    settings = resolve_model(settings)
    # A wrong name shall not cost a model load.
    build_policy(settings.scheduling.policy, settings.scheduling.policy_options)
    shares = not settings.model.threads  # a number that the user chose is kept
    executor = build_executor(settings, progress, share_cores=shares)
    return ready_loop(settings, executor, progress, check_every_step=check_every_step)


def ready_loop(
    settings: Settings,
    executor: DeviceExecutor,
    progress: Progress = lambda stage, done: None,
    *,
    check_every_step: bool = False,
) -> EngineLoop:
    """An engine loop over a loaded model that is measured first, for a process that serves."""
    from tandem.allocator import give_back

    rates = None
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
    settings: Settings,
    progress: Progress = lambda stage, done: None,
    *,
    share_cores: bool = False,
) -> DeviceExecutor:
    """Load the model onto its device, with room for KV and recordings. What is measured on it is
    that of one number of threads, unless it may `share_cores`."""
    spin_briefly()
    from tandem.allocator import keep_large_blocks
    from tandem.model.linear import keep_kernels
    from tandem.model.load import load_model

    keep_large_blocks()
    settings = resolve_model(settings)
    if settings.model.kernels == "auto":  # else rows come in any number
        keep_kernels()
    model = load_model(settings.model, progress)
    return executor_of(model, settings, progress, share_cores=share_cores)


def executor_of(
    model: LoadedModel,
    settings: Settings,
    progress: Progress = lambda stage, done: None,
    *,
    share_cores: bool = False,
) -> DeviceExecutor:
    """The executor of a model in memory; see `build_executor`."""
    from tandem.executor.capture import CudaCapture
    from tandem.executor.executor import DeviceExecutor

    executor = DeviceExecutor(
        model,
        settings.cache,
        settings.scheduling,
        settings.adapters,
        settings.learning,
        share_cores=share_cores,
    )
    if model.device.type == "cuda":
        progress("capturing passes", 1.0)
        executor.capture_passes(CudaCapture(model.device), _CAPTURE_S)
    return executor


def join_loop(
    settings: Settings,
    executor: Executor,
    *,
    clock: Clock | None = None,
    rates: Rates | None = None,
    profile: Profile | None = None,
    check_every_step: bool = False,
) -> EngineLoop:
    """An engine loop over a given executor; `rates` were measured (none: those of `profile`, or of
    the configured one, else guesses)."""
    info, scheduling = executor.info, settings.scheduling
    if rates is None and (profile := profile or profile_for(scheduling.profile, info)) is not None:
        rates = profile.rates
    batching = profile.batching if profile is not None else None
    measured = batching.options if batching is not None else None
    policy = build_policy(scheduling.policy, scheduling.policy_options, measured)
    cache = KVCache(
        info.num_blocks,
        info.block_size,
        prefix_caching=settings.cache.prefix_caching,
        eviction=policy.traits.eviction,
    )
    scheduler = Scheduler(
        policy,
        cache,
        Budgets(scheduling.max_sequences, scheduling.max_batch_tokens),
        info,
        default_slo=Slo(scheduling.ttft_slo, scheduling.tpot_slo),
        rates=rates,
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
        settings, executor, clock=clock, profile=profile, check_every_step=check_every_step
    )
    return loop, executor


def build_client(settings: Settings, on_progress: Progress | None = None) -> EngineClient:
    """A client of the engine or, with an overflow engine, of both."""
    division = division_of(settings)
    if division is None:
        return build_engine_client(settings, on_progress)
    report = on_progress or (lambda stage, done: None)
    settings = resolve_model(settings)
    return EngineGroup(
        build_engine_client(settings, on_progress, cores=division.main),
        {
            OVERFLOW: build_engine_client(
                overflow_settings(settings, division),
                lambda stage, done: report(f"{OVERFLOW} engine: {stage}", done),
                cores=division.overflow,
                name=f"{OVERFLOW} engine",
            )
        },
        overflow(settings.scheduling.overflow_quantile, settings.scheduling.overflow_tokens),
        settings.scheduling.max_sequences,
    )


def division_of(settings: Settings) -> Division | None:
    """Which cores are the overflow engine's, if there is one. Raises `InvalidRequest`."""
    wanted = settings.scheduling.overflow
    if not wanted:
        return None
    if sys.platform != "linux":
        problem = "--overflow needs Linux, which keeps an engine to its cores"
        raise InvalidRequest(problem, param="scheduling.overflow")
    from tandem.model.load import choose_device

    gpu = choose_device(settings.model.device).type != "cpu"
    return divide(wanted, core_numbers(), gpu=gpu, threads=settings.model.threads)


def overflow_settings(settings: Settings, division: Division) -> Settings:
    """The overflow engine's: on the CPU, with a time model of its own, and it does not learn."""
    model, cache = settings.model, settings.cache
    if division.gpu:  # what was said of the GPU is not meant for the CPU
        model, cache = replace(model, dtype="auto"), replace(cache, memory_bytes=0)
    return replace(
        settings,
        model=replace(model, device="cpu", threads=0),
        cache=cache,
        scheduling=replace(settings.scheduling, profile=""),
        adapters=replace(settings.adapters, preload={}),
        learning=replace(settings.learning, enabled=False),
    )


def build_engine_client(
    settings: Settings,
    on_progress: Progress | None = None,
    *,
    cores: Sequence[int] = (),
    name: str = "engine",
) -> AsyncEngineClient:
    """A client of one engine in a supervised process of its own, on `cores` (empty: on all)."""
    settings = resolve_model(settings)
    build_policy(settings.scheduling.policy, settings.scheduling.policy_options)
    transport = ProcessTransport(
        [sys.executable, "-m", "tandem.build", *map(str, cores)],
        msgspec.msgpack.encode(settings),
        MonotonicClock(),
        name=name,
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


def run_engine_process(cores: Sequence[int]) -> None:
    """Main function of the engine process: read a `Launch` from standard input and serve, on these
    cores (none: on all)."""
    keep_to(cores)
    # The server's signals reach the whole process group; the engine ends when its client says so.
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    launch = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Launch)
    settings = msgspec.msgpack.decode(launch.settings, type=Settings)
    give_back_regularly(kept_bytes=_FREE_BYTES)
    serve(
        launch.endpoint,
        launch.incarnation,
        lambda progress: build_loop(settings, progress),
        launch.parent,
    )


if __name__ == "__main__":
    run_engine_process([int(core) for core in sys.argv[1:]])
