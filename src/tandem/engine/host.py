"""Serves an engine loop over a channel: commands in, events out, a heartbeat beside it.

Runs in the engine's own process (see `process`) or in a thread (see `thread`). Knows the
loop's methods and the messages, nothing else. Invariant: every command is answered or takes effect,
in order, between two iterations.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import zmq

from tandem.core.errors import TandemError
from tandem.core.version import AdapterVersion
from tandem.engine.channel import Context, HostChannel, ZmqHostChannel
from tandem.engine.loop import EngineLoop
from tandem.engine.messages import (
    Abort,
    AddRequest,
    Answer,
    Broken,
    Command,
    GetStats,
    Heartbeat,
    LoadAdapter,
    Loading,
    Ready,
    Refused,
    Stop,
    Tokens,
    UnloadAdapter,
    failure_of,
)

HEARTBEAT_S = 0.25
_IDLE_WAIT_S = 0.5
_IDLE_CHECK_S = 10.0

MakeLoop = Callable[[Callable[[str, float], None]], EngineLoop]


class Host:
    """One engine loop behind one channel."""

    def __init__(self, loop: EngineLoop, channel: HostChannel, incarnation: int) -> None:
        self._loop = loop
        self._channel = channel
        self._incarnation = incarnation
        self._stopped = False
        self._checked_s = time.monotonic()
        self.busy_since_s: float | None = None

    def run(self) -> None:
        """Serve until a `Stop` arrives."""
        self._channel.send(Ready(self._incarnation, self._loop.info))
        while not self._stopped:
            wait_s = 0.0 if self._loop.has_work else _IDLE_WAIT_S
            for command in self._channel.receive(wait_s):
                self._handle(command)
            if self._loop.has_work:
                self._iterate()
            elif time.monotonic() - self._checked_s > _IDLE_CHECK_S:
                self._loop.check()
                self._checked_s = time.monotonic()

    def _iterate(self) -> None:
        self.busy_since_s = time.monotonic()
        events = self._loop.step()
        self.busy_since_s = None
        if events:
            self._channel.send(Tokens(self._incarnation, events))

    def _handle(self, command: Command) -> None:
        match command:
            case AddRequest(request):
                try:
                    self._loop.add(request)
                except TandemError as error:
                    refusal = Refused(self._incarnation, request.request_id, failure_of(error))
                    self._channel.send(refusal)
            case Abort(request_id, index):
                self._loop.abort(request_id, index)
            case LoadAdapter(call, name, path, restore):
                self._answer(call, lambda: self._loop.load_adapter(name, path, restore))
            case UnloadAdapter(call, name):
                self._answer(call, lambda: self._loop.unload_adapter(name))
            case GetStats(call):
                answer = Answer(self._incarnation, call, stats=self._loop.stats())
                self._channel.send(answer)
            case Stop():
                self._stopped = True

    def _answer(self, call: int, act: Callable[[], AdapterVersion | None]) -> None:
        failure, version = None, None
        try:
            version = act()
        except Exception as error:
            failure = failure_of(error)
        self._channel.send(Answer(self._incarnation, call, failure, version))


def start_loop(make_loop: MakeLoop, channel: HostChannel, incarnation: int) -> EngineLoop:
    """Make the loop, telling the client of the progress, or why it cannot be made."""
    try:
        return make_loop(lambda stage, done: channel.send(Loading(incarnation, stage, done)))
    except Exception as error:
        channel.send(Broken(incarnation, failure_of(error)))
        raise


def serve(endpoint: str, incarnation: int, make_loop: MakeLoop) -> None:
    """The main function of an engine process: load, then serve until told to stop.

    Ends with its parent: an orphaned engine would hold the device for ever.
    """
    context: Context = zmq.Context()
    channel = ZmqHostChannel(context, endpoint)
    pulse = _Heart(context, endpoint, incarnation)
    pulse.start()
    try:
        loop = start_loop(make_loop, channel, incarnation)
        pulse.host = Host(loop, channel, incarnation)
        pulse.host.run()  # an error in here ends the process, which its watcher notices
    finally:
        pulse.stop()
        channel.close()
        context.term()


class _Heart(threading.Thread):
    """Sends heartbeats from a thread (and socket) of its own, and watches the parent."""

    def __init__(self, context: Context, endpoint: str, incarnation: int) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self.host: Host | None = None
        self._context = context
        self._endpoint = endpoint
        self._incarnation = incarnation
        self._parent = os.getppid()
        self._ended = threading.Event()

    def run(self) -> None:
        """Beat until `stop`; ends the process if the parent is gone."""
        channel = ZmqHostChannel(self._context, self._endpoint, listen=False)
        while not self._ended.wait(HEARTBEAT_S):
            if os.getppid() != self._parent:
                os._exit(1)
            since = self.host.busy_since_s if self.host is not None else None
            busy_s = time.monotonic() - since if since is not None else 0.0
            channel.send(Heartbeat(self._incarnation, busy_s))
        channel.close()

    def stop(self) -> None:
        """End the thread."""
        self._ended.set()
        self.join(timeout=2.0)
