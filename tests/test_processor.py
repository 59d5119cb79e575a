"""How threads wait, and what others take of the processor."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import namedtuple

import psutil
import pytest

from patience import START_S, eventually
from tandem.processor import FreeCores, Share, Watch, spin_briefly

Times = namedtuple("Times", "user nice system idle iowait steal guest")


def test_threads_spin_briefly_unless_the_environment_says_how_they_wait() -> None:
    environ: dict[str, str] = {}
    spin_briefly(environ)
    assert 0 < int(environ["GOMP_SPINCOUNT"]) < 10_000
    for name, text in (("OMP_WAIT_POLICY", "ACTIVE"), ("GOMP_SPINCOUNT", "7")):
        environ = {name: text}
        spin_briefly(environ)
        assert environ == {name: text}


@pytest.mark.skipif(sys.platform != "linux", reason="cores of processes")
def test_a_process_keeps_to_its_cores_with_the_threads_that_it_has() -> None:
    code = """
import os, threading
from tandem.processor import core_numbers, keep_to, usable_cores
last = core_numbers()[-1]
keep_to(())
assert core_numbers()[-1] == last
done = threading.Event()
before = threading.Thread(target=done.wait)
before.start()
keep_to([last])
assert core_numbers() == (last,) and usable_cores() == 1
assert os.sched_getaffinity(before.native_id) == {last}
done.set()
import torch
assert torch.get_num_threads() == 1
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=START_S)


def test_the_engine_says_so_before_torch_is_there() -> None:
    code = """
import builtins, os, sys
usual = builtins.__import__
def spy(name, *rest, **more):
    if name == "torch":
        print(os.environ.get("GOMP_SPINCOUNT"), flush=True)
        os._exit(0)
    return usual(name, *rest, **more)
builtins.__import__ = spy
from tandem.build import build_executor
from tandem.config import Settings
build_executor(Settings())
"""
    environ = {name: text for name, text in os.environ.items() if not name.startswith("GOMP")}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environ, timeout=START_S
    )
    assert done.stdout.strip().isdecimal(), (done.stdout, done.stderr)


@pytest.mark.parametrize(
    ("share", "busy"),
    [
        (Share(2, 2, 0.1, 0.0), False),
        (Share(2, 2, 0.2, 0.2), True),
        (Share(2, 1, 1.0, 0.0), False),
        (Share(2, 1, 1.5, 0.0), True),
        (Share(64, 8, 30.0, 0.0), False),
        (Share(2, 64, 0.5, 0.0), True),
    ],
)
def test_busy_is_who_lacks_cores(share: Share, busy: bool) -> None:
    assert share.busy is busy


def test_own_work_is_not_that_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    second = [Times(0, 0, 0, 0, 0, 0, 0)] * 4
    monkeypatch.setattr(psutil, "cpu_times", lambda percpu: second)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 3}, raising=False)
    own = [0.0]
    monkeypatch.setattr(Watch, "_own_s", lambda _: own[0])
    watch = Watch()
    assert watch.look() is None  # no time has passed
    busy, rest = Times(60, 10, 20, 0, 0, 10, 60), Times(0, 0, 0, 90, 10, 0, 0)
    second[:] = [busy, busy, busy, rest]
    own[0] = 70.0
    share = watch.look()
    assert share is not None
    # Cores 1 and 3 are ours. On one of them 90 of 100 s were used, 70 of those by us.
    assert (share.cores, share.wanted) == (2, 2)
    assert share.others == pytest.approx(0.2) and share.stolen == pytest.approx(0.1)
    assert str(share) == "other processes take 0.2 of 2 cores, the machine below 0.1"
    assert share.busy


def test_a_child_is_a_part_of_us() -> None:
    code = "while True: pass"
    with subprocess.Popen([sys.executable, "-c", code]) as child:
        try:
            watch = Watch()
            used, process = watch._own_s(), psutil.Process(child.pid)
            before = process.cpu_times().user
            eventually(lambda: process.cpu_times().user >= before + 0.3)
            assert watch._own_s() >= used + 0.2
        finally:
            child.kill()


def test_an_engine_counts_its_server_as_its_own_and_no_children(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parent = psutil.Process().parent()
    assert parent is not None
    watch = Watch(beneath=True)
    used = psutil.Process().cpu_times()
    mine = used.user + used.system
    assert watch._own_s() >= mine + parent.cpu_times().user
    monkeypatch.setattr(watch, "_parent", None)  # gone
    assert watch._own_s() < mine + 1.0


def test_threads_are_as_many_as_others_leave_cores() -> None:
    now, found = [0.0], Share(4, 4, 0.0, 0.0)
    cores = FreeCores(4, lambda: found, lambda: now[0])
    now[0] += 0.3  # the first look
    for others, stolen, threads in (
        (0.0, 0.0, 4),
        (0.4, 0.0, 4),
        (1.0, 0.0, 3),
        (0.4, 0.4, 3),
        (9.0, 0.0, 1),
        (0.1, 0.0, 4),
    ):
        before = cores.count()
        found = Share(4, 4, others, stolen)
        now[0] += 1.9  # nothing is looked at meanwhile
        assert cores.count() == before
        now[0] += 0.2
        assert cores.count() == threads


def test_what_others_took_while_the_engine_slept_does_not_count() -> None:
    now, found = [0.0], Share(2, 2, 2.0, 0.0)
    cores = FreeCores(2, lambda: found, lambda: now[0])
    now[0] += 60.0
    assert cores.count() == 2
    now[0] += 0.3
    assert cores.count() == 1
    found = Share(64, 2, 30.0, 0.0)
    now[0] += 2.1
    assert cores.count() == 2
