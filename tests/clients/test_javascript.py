"""OpenAI's client for JavaScript, run by node: the checks are in `js/openai.js`."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "js"


@pytest.mark.full
def test_openais_client_for_javascript(url: str, busy_url: str, key: str) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    if not (FOLDER / "node_modules" / "openai").is_dir():
        pytest.skip(f"the client is not installed: npm ci --prefix {FOLDER}")
    ran = subprocess.run(
        [node, "openai.js", url, busy_url, key],
        cwd=FOLDER,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0 and ran.stdout.splitlines()[-1:] == ["all held"], ran.stderr[-4000:]
