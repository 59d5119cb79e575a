"""The live servers are those of the run that started this one."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(scope="session")
def url() -> str:
    """A server with the model `smollm2`."""
    return os.environ["TANDEM_CLIENTS_URL"]


@pytest.fixture
def busy_url() -> str:
    """A server that sheds every request."""
    return os.environ["TANDEM_CLIENTS_BUSY_URL"]


@pytest.fixture(scope="session")
def key() -> str:
    """The key of both."""
    return os.environ["TANDEM_CLIENTS_KEY"]
