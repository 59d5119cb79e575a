"""`tandem feedback`: move feedback between a running server and JSONL files.

What a line says is `feedback_lines`' business. Invariant: both commands can be interrupted and run
again; a line that the server knows is not stored twice, and an export goes on after its last one.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tandem.cli.feedback_lines import LineError, as_body, lines_of, parse_line
from tandem.cli.feedback_sender import Body, Line, Sender
from tandem.cli.prospects import Prospects
from tandem.cli.remote import DEFAULT_URL, Key, RemoteError, Unreachable, Url, connected, plain

app = typer.Typer(help="Feedback of a running server: import and export as JSONL.")

_PAGE = 100
_SHOWN_FAILURES = 10
_BEGIN = b'{"feedback_id"'  # of an exported line

Target = Annotated[str, typer.Option(help="Adapter that learns, for lines that name none")]


@app.command("import")
def import_command(
    file: Annotated[
        Path, typer.Argument(help="JSONL: bodies of POST /v1/feedback, or rows as TRL trains on")
    ],
    adapter: Target = "",
    raw: Annotated[
        bool, typer.Option(help="TRL's prompts that are texts are no messages of a chat")
    ] = False,
    attempt: Annotated[
        int, typer.Option(min=1, help="A higher number sends lines without an id as new feedback")
    ] = 1,
    concurrency: Annotated[int, typer.Option(min=1, max=64, help="Requests at a time")] = 8,
    url: Url = DEFAULT_URL,
    api_key: Key = "",
) -> None:
    """Send each line as feedback; lines that were sent before, by the same attempt, are not stored
    twice.

    Besides our own form, a line may have `prompt`, `chosen` and `rejected`, or `prompt` and
    `completion` (with a `label`: a rating), as texts or as lists of messages. Other columns are
    left out.
    """
    console = Console(stderr=True)
    failures: list[str] = []
    prospects = Prospects()
    unused: Counter[str] = Counter()
    lines = _lines(file, raw, adapter, attempt, unused)

    def tell() -> None:
        Console().print(f"{done - len(failures)} of {done} lines are stored")
        _tell(console, failures, unused)
        for line in prospects.lines(attempt):
            console.print(plain(line), markup=False, highlight=False, soft_wrap=True)

    done = 0
    with connected(url, api_key) as server:
        try:
            with _progress(console) as progress:
                # A pipe can be read only once.
                total = sum(1 for _ in lines_of(file)) if file.is_file() else None
                task = progress.add_task("import", total=total)
                with closing(Sender(server, console).sent(lines, concurrency)) as all_sent:
                    for sent in all_sent:
                        if sent.problem:
                            failures.append(f"line {sent.number}: {sent.problem}")
                        prospects.add(sent.answer)
                        progress.advance(task)
                        done += 1
        except Unreachable:
            if done:
                tell()
            raise
    tell()
    if failures:
        raise typer.Exit(1)


@app.command("export")
def export_command(
    file: Annotated[Path, typer.Argument(help="JSONL to write, or to go on with")],
    adapter: Annotated[str, typer.Option(help="Only feedback that this adapter learns from")] = "",
    user: Annotated[str, typer.Option(help="Only feedback of this user")] = "",
    all_keys: Annotated[bool, typer.Option(help="That of all API keys (administrators)")] = False,
    url: Url = DEFAULT_URL,
    api_key: Key = "",
) -> None:
    """Write feedback, newest first, so that `import` takes it; what later feedback superseded is
    left out.

    Run again with the same file it goes on to older feedback after the last line; what came in
    since the first run is not in it. For that, export into a new file.
    """
    query = {
        "adapter": adapter or None,
        "user": user or None,
        "keys": "all" if all_keys else None,
        "limit": _PAGE,
    }
    with connected(url, api_key) as server:
        number, after = _written(file)
        with file.open("a", encoding="utf-8") as target, _progress(Console(stderr=True)) as bar:
            task = bar.add_task("export", total=None, completed=number)
            more = True
            while more:
                page = server.get("feedback", after=after, **query)
                for said in page["data"]:
                    after = said["id"]
                    if said["superseded_by"] is None:
                        target.write(json.dumps(as_body(said), ensure_ascii=False) + "\n")
                        number += 1
                bar.update(task, completed=number)
                more = page["has_more"]
    # The export itself may go to the standard output.
    told = Console(stderr=not file.is_file())
    told.print(f"{number} lines in {file}", markup=False, highlight=False)


def _tell(console: Console, failures: list[str], unused: Counter[str]) -> None:
    """What of a file is not stored."""
    if unused:
        columns = ", ".join(f"{name} ({count} lines)" for name, count in unused.most_common())
        console.print(plain(f"columns that are left out: {columns}"), markup=False, highlight=False)
    for failure in failures[:_SHOWN_FAILURES]:
        console.print(plain(failure), markup=False, highlight=False, soft_wrap=True)
    if len(failures) > _SHOWN_FAILURES:
        console.print(f"and {len(failures) - _SHOWN_FAILURES} more", highlight=False)


def _lines(
    file: Path, raw: bool, adapter: str, attempt: int, unused: Counter[str]
) -> Iterator[Line]:
    """What to send of a file; `unused` counts the columns that are left out."""
    for number, text, key in _distinct(lines_of(file), raw):
        try:
            line = parse_line(text, raw=raw)
        except LineError as error:
            yield Line(number, {}, problem=str(error))
            continue
        unused.update(line.unused)
        again = key if attempt == 1 else _key_of(f"{attempt} {key}".encode())
        yield _addressed(number, line.body, again, adapter)


def _distinct(lines: Iterator[tuple[int, bytes]], raw: bool) -> Iterator[tuple[int, bytes, str]]:
    """Lines with keys made of their text; equal lines differ by their count."""
    seen: Counter[str] = Counter()
    for number, text in lines:
        key = _key_of(b"raw " + text if raw else text)
        seen[key] += 1
        yield number, text, f"{key}-{seen[key]}"


def _key_of(text: bytes) -> str:
    return f"import-{hashlib.sha256(text).hexdigest()[:32]}"


def _addressed(number: int, body: Body, key: str, adapter: str) -> Line:
    """The line with the adapter that learns from it."""
    if adapter and "adapter" not in body and "model" not in body:
        # Another adapter learns from it as from something new.
        return Line(number, {"adapter": adapter, **body}, _key_of(f"{adapter} {key}".encode()))
    return Line(number, body, key)


def _written(file: Path) -> tuple[int, str | None]:
    """Lines and last id of an export that is to go on; a line that was cut off is removed. A
    pipe or a device, from which nothing can be read back, has none. Raises `RemoteError`."""
    if not file.is_file():
        return 0, None
    content = file.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    lines, rest, last = whole.splitlines(), content[len(whole) :], None
    try:
        if lines:
            last = str(json.loads(lines[-1])["feedback_id"])
        elif rest[: len(_BEGIN)] != _BEGIN[: len(rest)]:
            raise ValueError
    except (ValueError, KeyError, TypeError):
        raise RemoteError(f"{file} does not end as an export does; choose another file") from None
    if rest:
        os.truncate(file, len(whole))
    return len(lines), last


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeRemainingColumn(), console=console)
