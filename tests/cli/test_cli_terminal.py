"""The terminal client in a real terminal, behind a pipe, and with an editor."""

from __future__ import annotations

import io
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from chatting import prompts
from fake_engine import FakeEngine
from tandem.cli import app
from tandem.cli.terminal import Terminal


def test_lines_are_edited_and_pasted_text_is_one_turn(engine: FakeEngine, url: str) -> None:
    """In a real terminal."""
    here, there = pty.openpty()
    command = [sys.executable, "-c", "from tandem.cli import main; main()", "chat", "--url", url]
    environ = {
        **os.environ,
        "TERM": "xterm",
        "TANDEM_API_KEY": "sk-test",
        "EDITOR": "",
        "VISUAL": "",
    }
    with subprocess.Popen(
        command, stdin=there, stdout=there, stderr=there, env=environ, start_new_session=True
    ) as process:
        seen = b""

        def expect(text: bytes) -> None:
            nonlocal seen
            deadline = time.monotonic() + 60
            while text not in seen:
                assert time.monotonic() < deadline, seen
                if select.select([here], [], [], 1.0)[0]:
                    seen += os.read(here, 4096)
            seen = seen.partition(text)[2]

        try:
            expect(b"/exit leaves")
            expect(b"> ")
            os.write(here, b"helo\x1b[Dl\r")  # left, and the letter that was missing
            expect(b"[base]")
            expect(b"> ")
            os.write(here, b"\x1b[200~one\ntwo\nthree\x1b[201~")
            time.sleep(0.2)
            os.write(here, b"\r")
            expect(b"[base]")
            expect(b"> ")
            os.write(here, b"/edit\r")
            expect(b"answer> ")
            os.write(here, b"\x04")
            expect(b"nothing was changed")
            expect(b"> ")
            os.write(here, b"\x04")
            assert process.wait(timeout=30) == 0
        finally:
            process.kill()
            os.close(there)
            os.close(here)
    turns = [prompt.rpartition("user\n")[2] for prompt in prompts(engine)]
    assert turns == ["hello\nassistant\n", "one\ntwo\nthree\nassistant\n"]


def test_of_a_pipe_each_line_is_a_turn(engine: FakeEngine, url: str) -> None:
    words = ["chat", "--url", url, "--api-key", "sk-test"]
    done = CliRunner().invoke(app, words, input="Hi\nMore\n")
    assert done.exit_code == 0, done.output
    assert len(engine.requests) == 2


@pytest.mark.parametrize(
    ("script", "text"),
    [
        ('sed -i s/cat/dog/ "$1"', "a dog"),
        (r"printf '\357\273\277a dog' > " + '"$1"', "a dog"),
        ("exit 3", ""),
        (None, ""),
    ],
)
def test_an_editor_shows_the_answer_and_gives_what_was_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str | None, text: str
) -> None:
    editor = tmp_path / "editor"
    if script is not None:
        editor.write_text(f"#!/bin/sh\n{script}\n")
        editor.chmod(0o700)
    monkeypatch.delenv("VISUAL", raising=False)
    monkeypatch.setenv("EDITOR", f"{editor}")
    console = Console(file=io.StringIO(), width=200)
    assert Terminal(console).edit("a cat") == text
    assert isinstance(console.file, io.StringIO)
    assert bool(console.file.getvalue()) == (not text)
