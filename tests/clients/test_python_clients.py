"""Clients for Python, each in a process of its own: they warn, and leave sockets and loops open.

The checks are tests of pytest's in `python/check_*.py`.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "python"
CLIENTS = {
    "litellm": "litellm",
    "langchain": "langchain_openai",
    "instructor": "instructor",
    "pydantic_ai": "pydantic_ai",
}
OPTIONS = ("-q", "-W", "ignore", "-p", "no:unraisableexception", "-p", "no:cacheprovider")


def test_every_check_is_run() -> None:
    assert {path.stem for path in FOLDER.glob("check_*.py")} == {
        f"check_{name}" for name in CLIENTS
    }


@pytest.mark.full
@pytest.mark.parametrize("client", CLIENTS)
def test_client(client: str, url: str, busy_url: str, key: str) -> None:
    if importlib.util.find_spec(CLIENTS[client]) is None:
        pytest.skip(f"{CLIENTS[client]} is not installed")
    environment = {
        **os.environ,
        "TANDEM_CLIENTS_URL": url,
        "TANDEM_CLIENTS_BUSY_URL": busy_url,
        "TANDEM_CLIENTS_KEY": key,
    }
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *OPTIONS, str(FOLDER / f"check_{client}.py")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-8000:] + ran.stderr[-2000:]
