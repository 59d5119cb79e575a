"""How a host and its client reach each other: queues within a process, ZeroMQ between two.

A channel moves whole commands and messages. It does not know what they mean. Invariant: they arrive
in order, and none is lost while both ends live.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable
from typing import Protocol

import msgspec
import zmq
import zmq.asyncio

from tandem.engine.messages import Command, Message

Context = zmq.Context[zmq.Socket[bytes]]


class HostChannel(Protocol):
    """The host's end; used by one thread."""

    def receive(self, timeout_s: float) -> list[Command]:
        """Commands that arrived. Waits up to `timeout_s` for the first."""
        ...

    def send(self, message: Message) -> None:
        """Pass a message to the client. Never blocks for long."""
        ...

    def close(self) -> None:
        """Close the transport."""
        ...


class QueueChannel:
    """Both ends in one process. `deliver` is called in the host's thread for each message."""

    def __init__(self, deliver: Callable[[Message], None]) -> None:
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._deliver = deliver

    def put(self, command: Command) -> None:
        """The client's side: queue a command."""
        self._commands.put(command)

    def receive(self, timeout_s: float) -> list[Command]:
        """Commands that arrived. Waits up to `timeout_s` for the first."""
        received: list[Command] = []
        try:
            if timeout_s > 0:
                received.append(self._commands.get(timeout=timeout_s))
            while True:
                received.append(self._commands.get_nowait())
        except queue.Empty:
            return received

    def send(self, message: Message) -> None:
        """Deliver a message to the client."""
        self._deliver(message)

    def close(self) -> None:
        """There is nothing to close."""


class ZmqHostChannel:
    """The host's end between processes: PULL for commands, PUSH for messages.

    The client binds both endpoints. `listen=False` makes an end that only sends. The heartbeat
    needs one, since a ZeroMQ socket belongs to one thread.
    """

    def __init__(self, context: Context, endpoint: str, *, listen: bool = True) -> None:
        self._messages = context.socket(zmq.PUSH)
        self._messages.setsockopt(zmq.LINGER, 500)
        self._messages.setsockopt(zmq.SNDHWM, 0)
        self._messages.connect(messages_endpoint(endpoint))
        self._commands: zmq.Socket[bytes] | None = None
        if listen:
            self._commands = context.socket(zmq.PULL)
            self._commands.setsockopt(zmq.RCVHWM, 0)
            self._commands.connect(commands_endpoint(endpoint))
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Command)

    def receive(self, timeout_s: float) -> list[Command]:
        """Commands that arrived. Waits up to `timeout_s` for the first."""
        assert self._commands is not None, "this end only sends"
        received: list[Command] = []
        if timeout_s > 0 and not self._commands.poll(int(timeout_s * 1000)):
            return received
        try:
            while True:
                received.append(self._decoder.decode(self._commands.recv(zmq.NOBLOCK)))
        except zmq.Again:
            return received

    def send(self, message: Message) -> None:
        """Send a message to the client."""
        self._messages.send(self._encoder.encode(message))

    def close(self) -> None:
        """Send queued messages (for at most half a second), then close."""
        self._messages.close()
        if self._commands is not None:
            self._commands.close()


class ZmqClientChannel:
    """The client's end between processes. It belongs to one asyncio event loop."""

    def __init__(self, context: zmq.asyncio.Context, endpoint: str) -> None:
        self._sync: Context = zmq.Context.shadow(context.underlying)
        self._commands = self._sync.socket(zmq.PUSH)
        self._commands.setsockopt(zmq.LINGER, 0)
        self._commands.setsockopt(zmq.SNDHWM, 0)
        try:
            self._commands.bind(commands_endpoint(endpoint))
            self._messages = context.socket(zmq.PULL)
            self._messages.setsockopt(zmq.RCVHWM, 0)
            self._messages.bind(messages_endpoint(endpoint))
        except zmq.ZMQError:  # `context.destroy` waits for it: it is of another object
            self._commands.close()
            raise
        self._unsent: deque[bytes] = deque()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)

    def send(self, command: Command) -> None:
        """Queue a command; never blocks. A host that dies takes unread commands with it."""
        self._unsent.append(self._encoder.encode(command))
        self._flush()

    async def receive(self) -> Message:
        """The next message."""
        message = self._decoder.decode(await self._messages.recv())
        self._flush()
        return message

    def close(self) -> None:
        """Drop queued commands and close."""
        self._commands.close()
        self._messages.close()

    def _flush(self) -> None:
        """Send what can be sent. A host may send messages before its commands socket is connected,
        so each message from it, such as a heartbeat, tries again."""
        try:
            while self._unsent:
                self._commands.send(self._unsent[0], zmq.NOBLOCK)
                self._unsent.popleft()
        except zmq.Again:
            return


def commands_endpoint(endpoint: str) -> str:
    """Where the host reads commands."""
    return f"{endpoint}.commands"


def messages_endpoint(endpoint: str) -> str:
    """Where the host sends messages."""
    return f"{endpoint}.messages"
