"""The sockets between the server and its engine."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from patience import PATIENCE_S
from tandem.engine.channel import ZmqClientChannel


async def test_a_channel_that_cannot_be_made_is_closed(tmp_path: Path) -> None:
    """Else the end of its context would wait for it, and the server with it."""
    context = zmq.asyncio.Context()
    with pytest.raises(zmq.ZMQError):
        ZmqClientChannel(context, f"ipc://{tmp_path}/{'long' * 50}")
    closing = threading.Thread(target=context.destroy, kwargs={"linger": 0}, daemon=True)
    closing.start()
    await asyncio.to_thread(closing.join, PATIENCE_S)
    assert not closing.is_alive()
