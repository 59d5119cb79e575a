"""The wheel has all that serving needs, and none of the studies."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).parents[1]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
FLAGS = ["--port", "0", "--accustom", "0", "--kv-memory", "64MiB", "--store-directory"]


@pytest.mark.full
def test_the_demo_model_is_served_from_the_wheel(tmp_path: Path) -> None:
    """Installed alone into an empty folder, away from the sources."""
    wheels, installed = tmp_path / "wheels", tmp_path / "installed"
    subprocess.run(
        [*PIP, "wheel", "--no-deps", "--no-build-isolation", "-w", str(wheels), str(ROOT)],
        check=True,
    )
    [wheel] = wheels.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert any(name.startswith("tandem/demo_model/") for name in names)
    assert {name.partition("/")[0] for name in names if ".dist-info" not in name} == {"tandem"}
    subprocess.run([*PIP, "install", "--no-deps", "-t", str(installed), str(wheel)], check=True)
    code = "import tandem; print(tandem.__file__, flush=True); from tandem.cli import main; main()"
    command = [sys.executable, "-c", code, "serve", "demo", *FLAGS, str(tmp_path / "state")]
    environ = {**os.environ, "PYTHONPATH": str(installed)}
    with subprocess.Popen(
        command, env=environ, cwd=tmp_path, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as server:  # fmt: skip
        assert server.stdout is not None and server.stderr is not None
        try:
            assert server.stdout.readline().startswith(str(installed))
            ready = (re.search(r"ready on (http://\S+)", line) for line in server.stderr)
            found = next(match for match in ready if match)
            body = {"model": "demo", "prompt": "Hello", "max_tokens": 4}
            answer = httpx.post(f"{found[1]}/v1/completions", json=body, timeout=60.0)
            assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] > 0
        finally:
            server.terminate()
            server.communicate(timeout=60)
