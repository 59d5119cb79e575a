"""Loaded before any test."""

import os
from pathlib import Path

import httpx
import hypothesis
import pytest

import devices  # noqa: F401  how Triton runs is settled before anything imports it
from patience import PATIENCE_S

# Tests speak plain HTTP. Reading the certificates of the world costs every new client 25 ms; this
# folder has none.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = str(Path(__file__).parent)

# A busy machine is no reason to fail: not in a request's time, nor in that of an example.
for _kind in ("connect", "read", "write", "pool"):
    setattr(httpx._config.DEFAULT_TIMEOUT_CONFIG, _kind, PATIENCE_S)
hypothesis.settings.register_profile("patient", deadline=None)
hypothesis.settings.load_profile("patient")

LONG = (
    "tests/crash/",
    "tests/services/learning/test_live_",
    "tests/test_survival.py",
    "tests/engine/test_equality.py",
    "tests/engine/test_beside_training.py",
    "tests/cli/test_cli_serve.py",
    "tests/sim/",
)
"""Files that take longest."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """They come first, so that no process has to wait long for the last file of another."""
    items.sort(key=lambda item: not item.nodeid.startswith(LONG))
