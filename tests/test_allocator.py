"""Memory of the process: kept for large temporaries, one heap for all threads."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator")

# How many pages are mapped anew by large temporaries.
TEMPORARIES = """
import resource, sys
from tandem.allocator import keep_large_blocks
if sys.argv[1] == "set":
    assert keep_large_blocks()
def temporaries():
    for _ in range(3):
        b"x" * (48 << 20)
temporaries()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
temporaries()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
# How many heaps of 64 MiB are reserved when threads allocate.
HEAPS = """
import sys, threading
from tandem.allocator import share_one_arena
if sys.argv[1] == "set":
    assert share_one_arena()
barrier = threading.Barrier(4)
def allocate():
    kept = bytes(1000)
    barrier.wait()
threads = [threading.Thread(target=allocate) for _ in range(3)]
for thread in threads:
    thread.start()
with open("/proc/self/maps") as maps:
    starts = [int(line.split("-")[0], 16) for line in maps]
print(sum(start % (64 << 20) == 0 for start in starts))
barrier.wait()
"""
# Resident MiB after nearly all of many small blocks were freed; what is left lies between them.
SCATTERED = """
import sys, time
from tandem.allocator import give_back_regularly
def resident():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096 >> 20
blocks = [bytes(2000) for _ in range(50_000)]
full = resident()
blocks = blocks[::50]
if sys.argv[1] == "set":
    assert give_back_regularly(0.05).daemon
    deadline = time.monotonic() + 60
    while full - resident() < 60 and time.monotonic() < deadline:
        time.sleep(0.05)
print(full - resident())
"""

# Resident MiB that come back when as much is free as argv says may be kept, and a little more.
FREE = """
import sys, time
from tandem.allocator import free_bytes, give_back_regularly, keep_large_blocks
def resident():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096 >> 20
keep_large_blocks()
give_back_regularly(0.05, int(sys.argv[1]) << 20)
pairs = [(b"x" * (8 << 20), bytes(9000)) for _ in range(12)]
full = resident()
pairs = [kept for _, kept in pairs]
deadline = time.monotonic() + (60 if sys.argv[1] == "80" else 0.5)
while full - resident() < 80 and time.monotonic() < deadline:
    time.sleep(0.05)
print(full - resident())
"""


def measured(code: str, how: str) -> int:
    found = subprocess.run(
        [sys.executable, "-c", code, how], capture_output=True, text=True, check=True
    )
    return int(found.stdout)


def test_large_temporaries_are_not_mapped_anew():
    assert measured(TEMPORARIES, "set") < 1000 < measured(TEMPORARIES, "leave")


def test_threads_share_one_heap():
    # A library may be mapped at such an address by chance.
    assert measured(HEAPS, "set") + 2 <= measured(HEAPS, "leave")


def test_pages_between_blocks_that_live_longer_are_given_back():
    assert measured(SCATTERED, "set") >= 60 > 20 > measured(SCATTERED, "leave")


def test_some_free_memory_may_be_kept():
    assert measured(FREE, "80") >= 80
    assert measured(FREE, "300") < 8
