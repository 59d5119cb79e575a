"""Serves an engine loop over a channel: commands in, events out, and a heartbeat.

Runs in the engine's own process (see `process`) or in a thread (see `thread`). Knows the loop's
methods and the messages only. Invariant: every command is answered or takes effect, in order,
between two iterations. Exceptions are work with files and grammars, which runs beside the
iterations, and training steps and scores: these are answered when they end.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial

import zmq

from tandem.core.errors import NoMemory, OutOfMemory, TandemError, TrainingCancelled
from tandem.core.plan import NO_MEMORY
from tandem.core.ports import TrainerSnapshot
from tandem.core.request import Request
from tandem.core.slo import WorkClass
from tandem.core.training import Score, StepOutcome, TrainerSpec, TrainerState
from tandem.engine.beside import Beside, Conclude, write_snapshot
from tandem.engine.channel import Context, HostChannel, ZmqHostChannel
from tandem.engine.loop import EngineLoop
from tandem.engine.messages import (
    Abort,
    AddRequest,
    AddScore,
    Broken,
    Call,
    CallResult,
    CancelSteps,
    CloseTrainer,
    Command,
    Foresee,
    GetStats,
    Heartbeat,
    LoadAdapter,
    Loading,
    OpenTrainer,
    PublishAdapter,
    Ready,
    Refused,
    StageTrainer,
    Stop,
    Tokens,
    Train,
    UnloadAdapter,
    failure_of,
)
from tandem.scheduling.scores import ScoreFailed

logger = logging.getLogger(__name__)

HEARTBEAT_S = 0.25
_SET_PARENT_DEATH_SIGNAL = 1  # of prctl(2)
_IDLE_WAIT_S = 0.5  # for a command
_BESIDE_WAIT_S = 0.01  # the same while a thread reads, writes or compiles
_BRIEF_S = 0.25  # longer than a device computes slices for: it is idle
_IDLE_CHECK_S = 10.0  # between two checks of the block accounting

MakeLoop = Callable[[Callable[[str, float], None]], EngineLoop]


class Host:
    """One engine loop behind one channel.

    `_steps`, `_scores`: the call of each unfinished step or score. `_opening`: the call of each
    trainer whose files are being read. `_compiling`: requests whose grammar is being compiled.
    """

    def __init__(self, loop: EngineLoop, channel: HostChannel, incarnation: int) -> None:
        self._loop = loop
        self._channel = channel
        self._incarnation = incarnation
        self._stopped = False
        self._ahead: list[Command] = []  # read during an iteration
        self._broken: Exception | None = None
        # Threads of their own, so that a candidate does not wait for a large adapter.
        self._writing: Beside[int] = Beside("write snapshots")
        self._reading: Beside[int] = Beside("read adapters")
        self._grammars: Beside[str] = Beside("compile grammars")
        self._compiling: set[str] = set()
        self._steps: dict[str, int] = {}
        self._scores: dict[str, int] = {}
        self._opening: dict[str, int] = {}
        self._checked_s = time.monotonic()
        self.busy_since_s: float | None = None

    def run(self) -> None:
        """Serve until a `Stop` arrives."""
        self._channel.send(Ready(self._incarnation, self._loop.info))
        try:
            while not self._stopped:
                for command in self._commands():
                    self._handle(command)
                self._conclude()
                if self._loop.has_work:
                    self._iterate()
                elif self._loop.pause_s > _BRIEF_S and (
                    time.monotonic() - self._checked_s > _IDLE_CHECK_S
                ):
                    self._loop.check()
                    self._checked_s = time.monotonic()
        finally:
            self._writing.close()  # whoever hears of the end may remove what it writes
            for beside in (self._reading, self._grammars):
                beside.close(wait=self._stopped)  # after a failure the next engine has to wait

    def _commands(self) -> list[Command]:
        """All commands that have come, in order. Waits for the first if there is nothing to do."""
        if self._broken is not None:
            raise self._broken
        ahead, self._ahead = self._ahead, []
        return ahead + self._channel.receive(0.0 if ahead else self._wait_s())

    def _urgent(self) -> bool:
        """Whether an online request has come since the iteration began. A channel error also
        returns True; `_commands` raises it after the iteration."""
        try:
            self._ahead += self._channel.receive(0.0)
        except Exception as error:
            self._broken = error
        return self._broken is not None or any(
            isinstance(command, AddRequest) and command.request.work_class is WorkClass.ONLINE
            for command in self._ahead
        )

    def _wait_s(self) -> float:
        """How long to wait for a command when the loop is idle."""
        busy = any(each.busy for each in (self._writing, self._reading, self._grammars))
        return min(self._loop.pause_s, _BESIDE_WAIT_S if busy else _IDLE_WAIT_S)

    def _iterate(self) -> None:
        self.busy_since_s = time.monotonic()
        events = self._loop.step(self._urgent)
        self.busy_since_s = None
        if events:
            self._channel.send(Tokens(self._incarnation, events))
        self._deliver_learned()
        if self._loop.exhausted:
            raise OutOfMemory("the engine is out of memory and will restart")

    def _deliver_learned(self) -> None:
        for learned in self._loop.teaching.take_learned():
            match learned:
                case StepOutcome():
                    self._send(self._steps.pop(learned.step_id), learned)
                case Score():
                    self._send(self._scores.pop(learned.request_id), learned)
                case ScoreFailed(request_id, reason):
                    kind = NoMemory if reason == NO_MEMORY else TandemError
                    self._fail(self._scores.pop(request_id), kind(reason))

    def _handle(self, command: Command) -> None:
        match command:
            case AddRequest(request) if request.sampling.grammar is not None:
                self._compiling.add(request.request_id)
                self._grammars.begin(request.request_id, partial(self._compile, request))
            case AddRequest(request):
                self._add(request.request_id, partial(self._loop.add, request))
            case Abort(request_id, index):
                self._compiling.discard(request_id)
                self._loop.abort(request_id, index)
                self._scores.pop(request_id, None)
            case GetStats(call, last, after):
                self._send(call, self._loop.stats(last, after))
            case Foresee(request_id, length):
                self._loop.scheduler.foresee(request_id, length)
            case Stop():
                self._stopped = True
            case _:
                try:
                    self._call(command)
                except Exception as error:
                    self._fail(command.call, error)

    def _compile(self, request: Request) -> Conclude:
        """Runs beside the loop. A request that was aborted meanwhile is skipped."""
        if request.request_id not in self._compiling:
            return lambda: None
        return self._loop.read_request(request)

    def _add(self, request_id: str, add: Callable[[], object]) -> None:
        try:
            add()
        except TandemError as error:
            self._channel.send(Refused(self._incarnation, request_id, failure_of(error)))

    def _call(self, command: Call) -> None:  # noqa: C901
        """Do a command that is answered by `CallResult`, now or later."""
        match command:
            case LoadAdapter(call, name, path, None):
                self._reading.begin(call, partial(self._loop.adapters.read, name, path))
            case LoadAdapter(call, name, path, restore):  # requests for it follow
                self._send(call, self._loop.adapters.load(name, path, restore))
            case UnloadAdapter(call, name):
                self._loop.adapters.unload(name)
                self._send(call)
            case PublishAdapter(call, version) if self._loop.adapters.is_loaded(version):
                self._send(call, self._loop.adapters.publish(version))
            case PublishAdapter(call, version):
                self._reading.begin(call, partial(self._loop.adapters.read_version, version))
            case OpenTrainer(call, spec):
                self._close_trainer(spec.name)
                if spec.source:
                    self._opening[spec.name] = call
                    self._reading.begin(call, partial(self._read_trainer, call, spec))
                else:
                    self._send(call, self._loop.teaching.open_trainer(spec))
            case CloseTrainer(call, name):
                self._close_trainer(name)
                self._send(call)
            case Train(call, step):
                self._loop.teaching.add_step(step)
                self._steps[step.step_id] = call
            case CancelSteps(call, trainer):
                self._cancelled(self._loop.teaching.cancel_steps(trainer))
                self._send(call)
            case StageTrainer(call, trainer, name, path):
                snapshot = self._loop.teaching.snapshot_trainer(trainer)
                self._writing.begin(call, partial(self._write, snapshot, name, path))
            case AddScore(call, request):
                self._loop.teaching.add_score(request)
                self._scores[request.request_id] = call

    def _read_trainer(self, call: int, spec: TrainerSpec) -> Conclude:
        """Runs beside the loop. The loop then opens the trainer, unless it was closed meanwhile."""
        opened = self._loop.teaching.read_trainer(spec)

        def conclude() -> TrainerState:
            if self._opening.get(spec.name) != call:
                raise TrainingCancelled(f"trainer {spec.name} was closed before it was open")
            del self._opening[spec.name]
            return opened()

        return conclude

    def _close_trainer(self, name: str) -> None:
        self._opening.pop(name, None)
        self._cancelled(self._loop.teaching.close_trainer(name))
        self._deliver_learned()

    def _cancelled(self, step_ids: Iterable[str]) -> None:
        for step_id in step_ids:
            error = TrainingCancelled(f"step {step_id} was cancelled")
            self._fail(self._steps.pop(step_id), error)

    def _write(self, snapshot: TrainerSnapshot, name: str, path: str) -> Conclude:
        """Runs beside the loop, which then loads the copy in memory as an adapter."""
        where, content_hash = write_snapshot(snapshot, path)
        return partial(self._loop.adapters.adopt, snapshot, name, where, content_hash)

    def _conclude(self) -> None:
        """Conclude what was read, written or compiled beside the iterations."""
        for request_id, add in self._grammars.finished():
            if request_id in self._compiling:  # else it was aborted meanwhile
                self._compiling.remove(request_id)
                self._add(request_id, add)
        for call, conclude in (*self._writing.finished(), *self._reading.finished()):
            try:
                made = conclude()
            except Exception as error:
                self._fail(call, error)
                continue
            self._send(call, made)

    def _send(self, call: int, result: object = None) -> None:
        self._channel.send(CallResult(self._incarnation, call, result=result))

    def _fail(self, call: int, error: Exception) -> None:
        self._channel.send(CallResult(self._incarnation, call, failure_of(error)))


def start_loop(make_loop: MakeLoop, channel: HostChannel, incarnation: int) -> EngineLoop:
    """Make the loop. Tells the client about the progress, or why the loop cannot be made."""
    try:
        return make_loop(lambda stage, done: channel.send(Loading(incarnation, stage, done)))
    except Exception as error:
        channel.send(Broken(incarnation, failure_of(error)))
        raise


def serve(endpoint: str, incarnation: int, make_loop: MakeLoop, parent: int | None = None) -> None:
    """The main function of an engine process: load, then serve until a `Stop`.

    Ends with the process `parent` (None: the current parent). An orphaned engine would keep the
    device, and write files beside its successor.
    """
    parent = os.getppid() if parent is None else parent
    end_with(parent)
    context: Context = zmq.Context()
    channel = ZmqHostChannel(context, endpoint)
    pulse = _Heart(context, endpoint, incarnation, parent)
    pulse.start()
    try:
        try:
            loop = start_loop(make_loop, channel, incarnation)
        except TandemError:
            raise SystemExit(1) from None  # the client knows why
        pulse.host = Host(loop, channel, incarnation)
        try:
            pulse.host.run()  # an error ends the process, and its watcher notices
        except OutOfMemory as error:
            logger.error("%s", error)
            raise SystemExit(1) from None
    finally:
        pulse.stop()
        channel.close()
        context.term()


def end_with(parent: int) -> None:
    """End this process when its parent ends, or at once if the parent is already gone.

    Linux does this even while this process is paused or busy in native code. Elsewhere the
    heartbeat thread checks.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


class _Heart(threading.Thread):
    """Sends heartbeats from its own thread and socket, and watches the parent."""

    def __init__(self, context: Context, endpoint: str, incarnation: int, parent: int) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self.host: Host | None = None
        self._context = context
        self._endpoint = endpoint
        self._incarnation = incarnation
        self._parent = parent
        self._ended = threading.Event()

    def run(self) -> None:
        """Send heartbeats until `stop`. Ends the process if the parent is gone."""
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
