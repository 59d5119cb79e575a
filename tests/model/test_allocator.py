"""Large temporaries come from memory that the process keeps."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

CHILD = """
import resource, sys
import torch
from tandem.model.allocator import keep_large_blocks
if sys.argv[1] == "keep":
    assert keep_large_blocks()
torch.set_num_threads(1)
def temporaries():
    for _ in range(3):
        torch.ones(48 << 20, dtype=torch.uint8)
temporaries()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
temporaries()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str) -> int:
    found = subprocess.run(
        [sys.executable, "-c", CHILD, how], capture_output=True, text=True, check=True
    )
    return int(found.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator")
def test_large_temporaries_are_not_mapped_anew():
    assert faults("keep") < 1000 < faults("leave")
