"""`tandem serve`: load, listen, answer, drain, end.

Owns the order of a server's life and its signals; what is served is the composition root's.
Invariant: the first SIGTERM or SIGINT lets running requests finish (up to the drain time) and
exits 0; the second exits at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager, suppress

import uvicorn
from fastapi import FastAPI
from rich.console import Console
from rich.markup import escape

from tandem.allocator import give_back_regularly, share_one_arena
from tandem.api.protocol import PatientProtocol
from tandem.build import build_client, resolve_model
from tandem.cli.checks import check, open_to_all, warnings
from tandem.config import ServerConfig, Settings
from tandem.core.errors import InvalidRequest, StoreError
from tandem.core.events import ModelInfo
from tandem.core.ports import EngineClient
from tandem.processor import Watch, usable_cores
from tandem.telemetry.logs import configure

# Longer than clients keep idle connections (openai: 60 s), so that none meets a closing one.
_KEEP_ALIVE_S = 75
# After the drain only the last bytes of finished answers are left to send.
_FLUSH_S = 5
_REFRESH_S = 0.25
_STARTED_POLL_S = 0.01
# How often others' use of the processor is looked at.
_LOOK_S = 30.0

logger = logging.getLogger(__name__)


def serve_forever(
    settings: Settings, console: Console, show: Callable[[str], bool] | None = None
) -> int:
    """Run a server until it is told to stop; the exit code. Raises what makes loading fail.

    `show` is given the server's address once it is ready, and says whether it could be shown.
    """
    configure(settings.server.log_level)
    check(settings)
    for warning in warnings(settings, os.environ):
        logger.warning(warning)
    share_one_arena()
    give_back_regularly()
    progress = _Progress(settings.model.model, console)
    with _reserve(settings.server) as listener:
        # Here, so that one process unpacks or downloads, and a signal ends it at once.
        settings = resolve_model(settings, progress.say)
        return asyncio.run(_serve(settings, listener, progress, console, show))


async def _serve(
    settings: Settings,
    listener: socket.socket,
    progress: _Progress,
    console: Console,
    show: Callable[[str], bool] | None,
) -> int:
    stop = _stop_on_signals()
    client = build_client(settings, progress.report)
    running = AsyncExitStack()
    watching: asyncio.Task[None] | None = None
    try:
        app = await _load(settings, client, stop, progress, console)
        if app is None:
            return 0
        await _begin(app, running)
        server = _Server(http_config(app))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        while not (server.started or serving.done()):
            await asyncio.sleep(_STARTED_POLL_S)
        if server.started:
            url = _url_of(listener)
            _announce(client.info, settings, url, console)
            if show is not None:
                _show(show, url, console)
        # Beside an overflow engine, all cores compute.
        wanted = usable_cores() if settings.scheduling.overflow else client.info.threads
        watching = asyncio.create_task(_watch_processor(wanted))
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
        if serving.done():  # it never ends by itself; its error is the reason
            serving.result()
            return 1
        console.print("draining: waiting for running requests (once more to stop at once)")
        await app.state.batches.stop()  # nobody waits here: the next start goes on with them
        if not await client.drain(settings.server.drain_s):
            console.print("some requests did not finish in time and are cut off")
        server.should_exit = True
        await serving
        return 0
    except OSError as error:
        raise _cannot_listen(settings.server, error) from error
    finally:
        if watching is not None:
            watching.cancel()
        await running.aclose()
        await client.close()


def _show(show: Callable[[str], bool], url: str, console: Console) -> None:
    """Show the address in a thread that nothing waits for: a browser in a terminal may go on."""

    def run() -> None:
        if not show(url):
            console.print("there is no browser here: open the address yourself")

    threading.Thread(target=run, name="show the page", daemon=True).start()


def http_config(app: FastAPI) -> uvicorn.Config:
    """How `app`, which has begun, is served."""
    return uvicorn.Config(
        app,
        http=PatientProtocol,
        access_log=False,
        log_level="warning",
        lifespan="off",
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_FLUSH_S,
    )


async def _begin(app: FastAPI, running: AsyncExitStack) -> None:
    """Start what works beside the requests: here, so that its errors are one line for the user."""
    try:
        await running.enter_async_context(app.router.lifespan_context(app))
    except OSError as error:
        raise StoreError(f"cannot start: {error}") from error


async def _watch_processor(threads: int) -> None:
    """Tell in the log when others begin to use the processor that the engine wants, and when they
    leave it."""
    watch, busy = Watch(threads), False
    while threads:
        await asyncio.sleep(_LOOK_S)
        share = watch.look()
        if share is not None and share.busy != busy:
            busy = share.busy
            if busy:
                logger.warning("the processor is busy: %s, answers take longer", share)
            else:
                logger.info("the processor is free again: %s", share)


def _build_app(settings: Settings, client: EngineClient) -> FastAPI:
    """In a thread while the engine loads: what is imported takes seconds."""
    from tandem.build_app import build_app

    return build_app(settings, client)


class _Server(uvicorn.Server):
    """uvicorn without its own signal handlers: ours drain the engine first."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals alone."""
        yield


class _Progress:
    """Shows what the engine does while it loads: one line that changes, or one line a stage."""

    def __init__(self, model: str, console: Console) -> None:
        self._model = model
        self._console = console
        self._stage = ""
        self.line = f"loading {model}"
        self._show()

    def report(self, stage: str, done: float) -> None:
        """Called by the engine client; `done` is the share of the stage, 0 to 1."""
        self.line = f"loading {self._model}: {stage}, {done:.0%}"
        if stage != self._stage:
            self._stage = stage
            self._show()

    def say(self, stage: str, done: float) -> None:
        """What happens before there is an engine, a line a stage."""
        self._print(f"{self._model}: {stage}")

    def _show(self) -> None:
        if not self._console.is_terminal:
            self._print(self.line)

    def _print(self, line: str) -> None:
        # The disk of a log may be full, or its reader gone: rich then wants the program to end.
        with suppress(OSError, SystemExit):
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)


async def _load(
    settings: Settings,
    client: EngineClient,
    stop: asyncio.Event,
    progress: _Progress,
    console: Console,
) -> FastAPI | None:
    """Start the engine and make the application beside it; None if a signal came first."""
    loop = asyncio.get_running_loop()
    begun_s = loop.time()
    loading = asyncio.gather(asyncio.to_thread(_build_app, settings, client), client.start())
    stopping = asyncio.create_task(stop.wait())
    with console.status("") as status:
        while not (loading.done() or stopping.done()):
            status.update(f"{escape(progress.line)} ({loop.time() - begun_s:.0f} s)")
            await asyncio.wait(
                (loading, stopping), timeout=_REFRESH_S, return_when=asyncio.FIRST_COMPLETED
            )
    if stopping.done():
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
        return None
    stopping.cancel()
    app, _ = await loading
    console.print(f"loaded in {loop.time() - begun_s:.1f} s", highlight=False)
    return app


def _stop_on_signals() -> asyncio.Event:
    """An event that the first signal sets; the second ends the process (and its engine)."""
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            os._exit(1)
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    return stop


def _reserve(server: ServerConfig) -> socket.socket:
    """Take the port before the model is loaded, so that a taken one is known at once.

    Nobody can connect before uvicorn listens, which is when there is somebody to answer.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in server.host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((server.host, server.port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise _cannot_listen(server, error) from error
    return listener


def _cannot_listen(server: ServerConfig, error: Exception) -> InvalidRequest:
    where = f"{server.host} port {server.port}"
    return InvalidRequest(f"cannot listen on {where}: {error}; choose another --host or --port")


def _url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    shown = "127.0.0.1" if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}"


def _announce(info: ModelInfo, settings: Settings, url: str, console: Console) -> None:
    needs_key = settings.server.api_keys or settings.server.api_key_file
    key = " -H 'Authorization: Bearer KEY'" if needs_key else ""
    model = settings.model.served_name
    body = f'{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
    capped = (
        f": all that {settings.scheduling.max_sequences} sequences can use (--max-sequences), "
        "less than --kv-memory"
        if settings.cache.memory_bytes and info.num_blocks == _useful_blocks(info, settings)
        else ""
    )
    lines = (
        f"{info.architecture}, {info.num_parameters / 1e6:.1f}M parameters, {info.dtype} on "
        f"{info.device}, kernels: {info.kernels}",
        f"KV cache: {info.num_blocks * info.block_size} tokens{capped}; context: "
        f"{info.max_model_len}",
        f"ready on {url} - open it in a browser, or try: tandem chat --url {url}/v1",
        f"or: curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'",
    )
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if opened := open_to_all(settings):
        console.print(
            f"WARNING: {opened}", style="bold red", markup=False, highlight=False, soft_wrap=True
        )


def _useful_blocks(info: ModelInfo, settings: Settings) -> int:
    """Blocks that all sequences fill at their full length: the engine takes no more."""
    return settings.scheduling.max_sequences * -(-info.max_model_len // info.block_size)
