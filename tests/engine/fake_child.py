"""An engine process over the fake executor; started by `test_process` as a child."""

import sys
import time
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).parents[1]))

from fake_executor import FakeExecutor, FakeSnapshot
from patience import PATIENCE_S
from tandem.build import join_loop
from tandem.config import SchedulingConfig, Settings
from tandem.core.errors import OutOfMemory, UnsupportedModel
from tandem.core.plan import NO_MEMORY
from tandem.engine.host import serve
from tandem.engine.process import Launch

launch = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Launch)
behaviour = msgspec.msgpack.decode(launch.settings, type=dict)


steps = 0


def wait_for(hold):
    """A test holds things up as long as its file is there, and not for ever."""
    deadline_s = time.monotonic() + PATIENCE_S
    while hold in behaviour and Path(behaviour[hold]).exists() and time.monotonic() < deadline_s:
        time.sleep(0.005)


def on_submit(plan):
    """Wait or sleep, and make the scheduler's own bookkeeping fail at a given step."""
    global steps
    steps += 1
    if launch.incarnation == 0:
        wait_for("hold_step")
    time.sleep(behaviour.get("step_s", 0.0))
    if launch.incarnation < behaviour.get("short_incarnations", 0):
        raise OutOfMemory(NO_MEMORY)
    if steps == behaviour.get("bug_at_step"):
        loop._scheduler.flight.plans.clear()


def slow_write(self, path, write=FakeSnapshot.write):
    """A disk that takes its time."""
    wait_for("hold_write")
    write(self, path)


def slow_read(self, version, read=FakeExecutor.read_adapter):
    """An adapter that is large."""
    wait_for("hold_read")
    time.sleep(behaviour.get("read_s", 0.0))
    return read(self, version)


def slow_source(self, spec, read=FakeExecutor.read_trainer):
    """A trainer whose source is large."""
    wait_for("hold_read")
    return read(self, spec)


FakeSnapshot.write = slow_write
FakeExecutor.read_adapter = slow_read
FakeExecutor.read_trainer = slow_source


def make_loop(progress):
    global loop

    progress("making it up", 0.5)
    if behaviour.get("broken"):
        raise UnsupportedModel("no such model")
    executor = FakeExecutor(
        num_blocks=200,
        max_model_len=behaviour.get("max_model_len", 400),
        on_submit=on_submit,
    )
    executor.failing = set(behaviour.get("fail", ()))
    scheduling = SchedulingConfig(policy=behaviour.get("policy", "unified"), max_sequences=64)
    loop = join_loop(Settings(scheduling=scheduling), executor)
    return loop


serve(launch.endpoint, launch.incarnation, make_loop, launch.parent)
