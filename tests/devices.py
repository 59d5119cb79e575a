"""Where tests compute: on the CPU always, on a CUDA device where `pytest -m gpu` asks for it."""

from __future__ import annotations

import pytest

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
DEVICES = ["cpu", CUDA]
