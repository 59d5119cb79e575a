"""A live server over the real engine in its own process, for tests that need a model."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from queue import Queue

import uvicorn

from patience import PATIENCE_S, START_S
from serving import new_directory
from tandem.api.protocol import PatientProtocol
from tandem.build import build_engine_client
from tandem.build_app import build_app
from tandem.config import Settings, StoreConfig


@contextmanager
def live_engine(settings: Settings) -> Iterator[str]:
    """Serve a real engine, started and closed in the server's own event loop; yields the URL.

    Its state goes into a directory of its own unless `settings` name one; it guesses how long its
    passes take.
    """
    settings = replace(settings, scheduling=replace(settings.scheduling, accustom_s=0.0))
    if settings.store == StoreConfig():
        settings = replace(settings, store=StoreConfig(directory=new_directory()))
    ready: Queue[str | BaseException] = Queue()
    stop = threading.Event()

    async def run() -> None:
        client = build_engine_client(settings)
        try:
            await client.start()
            with socket.create_server(("127.0.0.1", 0)) as listener:
                app = await asyncio.to_thread(build_app, settings, client)
                config = uvicorn.Config(
                    app,
                    http=PatientProtocol,
                    log_level="error",
                    access_log=False,
                    lifespan="on",
                )
                server = uvicorn.Server(config)
                serving = asyncio.create_task(server.serve(sockets=[listener]))
                ready.put(f"http://127.0.0.1:{listener.getsockname()[1]}")
                await asyncio.to_thread(stop.wait)
                server.should_exit = True
                await serving
        except BaseException as error:
            ready.put(error)
            raise
        finally:
            await client.close()

    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    first = ready.get(timeout=START_S)
    if isinstance(first, BaseException):
        raise first
    try:
        yield first
    finally:
        stop.set()
        thread.join(timeout=PATIENCE_S)
        assert not thread.is_alive()
