"""Where tests compute: on the CPU always, on a CUDA device where `pytest -m gpu` asks for it."""

from __future__ import annotations

import os

import pytest

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
DEVICES = ["cpu", CUDA]
# Triton's interpreter needs no GPU.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TRITON = "triton" if INTERPRETED else pytest.param("triton", marks=pytest.mark.gpu)
