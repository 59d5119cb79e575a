"""What a person types: lines that can be edited, pasted text as one turn, and texts in an editor.

The standard library's `readline` edits and keeps the session's history, where it is there. Of what
is typed nothing stays on a disk. Invariant: of a pipe, each line is a turn.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console

# A terminal delivers the lines of pasted text at once; nobody types that fast.
_PASTE_S = 0.02


class Terminal:
    """The user's side of a conversation."""

    def __init__(self, console: Console) -> None:
        self.console = console
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="replace")  # a wrong byte does not end the conversation
        with contextlib.suppress(ImportError):  # not on every platform
            import readline

            # Pasted text comes as one line with line ends in it, which Enter sends.
            readline.parse_and_bind("set enable-bracketed-paste on")

    @property
    def interactive(self) -> bool:
        """Whether a person types, and can react to what goes wrong."""
        return sys.stdin.isatty()

    def read(self, prompt: str) -> str:
        """What the user says next; several lines if they were pasted. Raises `EOFError`."""
        lines = [input(prompt)]
        while sys.stdin.isatty() and select.select([sys.stdin], [], [], _PASTE_S)[0]:
            lines.append(input())
        return "\n".join(lines)

    def edit(self, text: str) -> str:
        """`text` as the user changed it; empty if not. In an editor where one is configured."""
        if editor := os.environ.get("VISUAL") or os.environ.get("EDITOR"):
            return self._in_editor(editor, text)
        self.console.print("the answer that you wanted (or set $EDITOR):", style="dim")
        try:
            return self.read("answer> ")
        except (EOFError, KeyboardInterrupt):
            return ""

    def _in_editor(self, editor: str, text: str) -> str:
        with tempfile.TemporaryDirectory(prefix="tandem-") as folder:
            file = Path(folder) / "answer.txt"
            file.write_text(text, encoding="utf-8")
            try:
                subprocess.run([*shlex.split(editor), str(file)], check=True)
                return file.read_text(encoding="utf-8-sig")
            except (OSError, ValueError, subprocess.CalledProcessError) as error:
                self.console.print(f"{editor}: {error}", style="red", markup=False)
                return ""
