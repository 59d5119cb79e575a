"""`tandem batch`: answer a file of requests, through a running server or one of its own.

Knows the batch API only. Invariant: leaving never ends a batch on a server that runs on.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tandem.cli.output import check_writable, refusals, with_folder
from tandem.cli.remote import (
    DEFAULT_URL,
    Key,
    Remote,
    RemoteError,
    Unreachable,
    Url,
    connected,
    plain,
    table,
)
from tandem.core.batches import BatchStatus
from tandem.core.errors import InvalidRequest

app = typer.Typer(help="Files of requests that are answered when there is room.")

BatchId = Annotated[str, typer.Argument(help="Id of the batch")]
Out = Annotated[
    Path | None, typer.Option("--out", "-o", help="File for answers", callback=with_folder)
]
Errors = Annotated[
    Path | None,
    typer.Option(help="File for lines without an answer; default: beside it", callback=with_folder),
]
_POLL_S = 0.5
_SERVE_MEANWHILE = "from tandem.cli.batch import serve_meanwhile; serve_meanwhile()"
Answer = TypeVar("Answer")


@app.command("run")
def run_command(
    requests: Annotated[Path, typer.Argument(help="JSONL as of OpenAI's batch API")],
    out: Out = None,
    errors: Errors = None,
    serve: Annotated[
        str, typer.Option(help="Serve this model for the batch alone, instead of asking --url")
    ] = "",
    window: Annotated[str, typer.Option(help="Time until it expires, such as 24h or 90m")] = "24h",
    newest: Annotated[
        bool, typer.Option("--newest", help="Answer with the newest version of an adapter")
    ] = False,
    url: Url = DEFAULT_URL,
    api_key: Key = "",
) -> None:
    """Upload a file of requests, wait for the answers, and write them."""
    console = Console(stderr=True)
    target = out or requests.with_name(f"{requests.stem}.output.jsonl")
    failed = errors or _beside(target)
    with refusals():
        _check_files(requests, target, failed)
    with _server(serve, url, console) as address, connected(address, api_key) as server:
        body: dict[str, Any] = {
            "input_file_id": server.upload(requests, "batch"),
            "endpoint": _endpoint(requests),
            "completion_window": window,
            "adapter_version": "newest" if newest else "pinned",
        }
        batch = server.post("batches", body)
        console.print(plain(batch["id"]), markup=False, highlight=False)
        kept = _again(batch["id"], target, failed, url) if not serve else ""
        raise typer.Exit(_finish(server, batch["id"], target, failed, console, kept))


@app.command("watch")
def watch_command(
    batch_id: BatchId,
    out: Out = None,
    errors: Errors = None,
    url: Url = DEFAULT_URL,
    api_key: Key = "",
) -> None:
    """Show the progress of a batch until it ends, then write its answers."""
    console = Console(stderr=True)
    target = out or Path(f"{batch_id}.output.jsonl")
    failed = errors or _beside(target)
    with refusals():
        _check_targets(target, failed)
    with connected(url, api_key) as server:
        again = _again(batch_id, target, failed, url)
        raise typer.Exit(_finish(server, batch_id, target, failed, console, again))


@app.command("list")
def list_command(url: Url = DEFAULT_URL, api_key: Key = "") -> None:
    """Show the batches of this API key, newest first."""
    with connected(url, api_key) as server:
        found = server.get("batches", limit=100)["data"]
    rows = []
    for batch in found:
        counts = batch["request_counts"]
        done = f"{counts['completed'] + counts['failed']}/{counts['total']}"
        rows.append([batch["id"], batch["status"], done, counts["failed"], batch["model"] or ""])
    Console().print(table(("id", "status", "lines", "failed", "model"), rows))


@app.command("cancel")
def cancel_command(batch_id: BatchId, url: Url = DEFAULT_URL, api_key: Key = "") -> None:
    """Give a batch up; what was answered is kept."""
    with connected(url, api_key) as server:
        batch = server.post(f"batches/{batch_id}/cancel")
    print(plain(f"{batch['id']}: {batch['status']}"))


def _beside(out: Path) -> Path:
    return out.with_name(f"{out.stem}.errors{out.suffix}")


def _again(batch_id: str, out: Path, errors: Path, url: str) -> str:
    """The command that goes on with a batch."""
    words = ["tandem", "batch", "watch", batch_id, "-o", str(out), "--errors", str(errors)]
    return shlex.join([*words, *(["--url", url] if url != DEFAULT_URL else [])])


def _check_files(requests: Path, *targets: Path) -> None:
    """The answers are lost if they cannot be written once a server of its own has ended, so look
    before it starts. Requests are read twice, so they cannot come through a pipe. Raises
    `InvalidRequest`."""
    try:
        if requests.exists() and not requests.is_file():
            raise InvalidRequest(f"cannot read {requests}: it must be a regular file, not a pipe")
        with requests.open("rb"):
            pass
    except OSError as error:
        raise InvalidRequest(f"cannot read {requests}: {error.strerror}") from error
    _check_targets(requests, *targets)
    for target in targets:
        try:
            check_writable(target)
        except OSError as error:
            raise InvalidRequest(f"cannot write {target}: {error.strerror}") from error


def _check_targets(*paths: Path) -> None:
    files = [path.resolve() for path in paths]
    for path in files:
        if files.count(path) > 1 and (path.is_file() or not path.exists()):
            raise InvalidRequest(
                f"{path} is named twice: answers and errors are files of their own"
            )


def _endpoint(requests: Path) -> str:
    """The first line's; the server looks at all of them."""
    try:
        with requests.open(encoding="utf-8-sig", errors="replace") as stream:
            first = stream.readline()
    except OSError as error:
        raise RemoteError(f"cannot read {requests}: {error}") from error
    try:
        return str(json.loads(first)["url"])
    except (ValueError, KeyError, TypeError):
        return "/v1/chat/completions"


def _finish(
    server: Remote, batch_id: str, out: Path, errors: Path, console: Console, again: str
) -> int:
    """Wait, write, say what came of it; the exit code, 0 if every line has an answer. `again` is
    the command that goes on with it (empty: the server ends with this command, so an interrupt
    cancels the batch and what was answered is written)."""
    ended_by = 0
    try:
        batch = _written(server, batch_id, out, errors, console, again)
    except (KeyboardInterrupt, SystemExit) as reason:
        ended_by = int(reason.code or 1) if isinstance(reason, SystemExit) else 130
        if again:
            told = f"go on with the batch: {again}"
            console.print(plain(told), markup=False, highlight=False, soft_wrap=True)
            raise typer.Exit(ended_by) from None
        console.print(
            "the batch is being cancelled; then what was answered is written", highlight=False
        )
        with suppress(RemoteError):  # it has ended just now
            server.post(f"batches/{batch_id}/cancel")
        batch = _written(server, batch_id, out, errors, console, again)
    counts = batch["request_counts"]
    told = f"{batch['status']}: {counts['completed']} of {counts['total']} lines have an answer"
    console.print(plain(told), markup=False, highlight=False)
    whole = batch["status"] == "completed" and not counts["failed"]
    return ended_by or (0 if whole else 1)


def _written(
    server: Remote, batch_id: str, out: Path, errors: Path, console: Console, again: str
) -> dict[str, Any]:
    """A batch that has ended, once its files are written."""
    batch = _wait(server, batch_id, console, again)
    for problem in (batch["errors"] or {"data": []})["data"]:
        where = f"line {problem['line']}: " if problem["line"] else ""
        console.print(plain(f"{where}{problem['message']}"), markup=False, style="red")
    for file_id, path in ((batch["output_file_id"], out), (batch["error_file_id"], errors)):
        if file_id:
            ask = partial(server.download, f"files/{file_id}/content", path)
            with console.status("writing") as shown:
                _patient(ask, again, partial(shown.update, "no answer"))
            console.print(plain(f"written to {path}"), markup=False, highlight=False)
        elif batch["request_counts"]["total"] and path.is_file():
            path.unlink()  # of a run before, and wrong beside the files of this one
    return batch


def _patient(ask: Callable[[], Answer], again: str, away: Callable[[], object]) -> Answer:
    """What is asked for. A server that is `away` is waited for if it may come back."""
    while True:
        try:
            return ask()
        except Unreachable:
            if not again:
                raise
        away()
        time.sleep(_POLL_S)


def _wait(server: Remote, batch_id: str, console: Console, again: str) -> dict[str, Any]:
    """A progress bar until the batch has ended."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        bar = progress.add_task("validating", total=None)
        while True:
            ask = partial(server.get, f"batches/{batch_id}")
            batch = _patient(ask, again, partial(progress.update, bar, description="no answer"))
            counts = batch["request_counts"]
            done, total = counts["completed"] + counts["failed"], counts["total"] or None
            progress.update(bar, description=batch["status"], completed=done, total=total)
            if BatchStatus(batch["status"]).ended:
                return batch
            time.sleep(_POLL_S)


@contextmanager
def _server(model: str, url: str, console: Console) -> Iterator[str]:
    """The address of a server: the one at `url`, or one that serves `model` meanwhile."""
    if not model:
        yield url
        return
    with _signals_exit(), tempfile.TemporaryDirectory(prefix="tandem-batch-") as state:
        flags = ["--port", "0", "--store-directory", state, "--no-learning"]
        command = [sys.executable, "-c", _SERVE_MEANWHILE, "serve", model, *flags]
        # An interrupt from the terminal is for this command, which ends the server.
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            yield _address(process, console)
        finally:
            process.terminate()
            process.wait()
            for stream in (process.stdin, process.stderr):
                if stream is not None:
                    stream.close()


@contextmanager
def _signals_exit() -> Iterator[None]:
    """SIGTERM and SIGHUP become `SystemExit`, so that what was made is removed. A signal that is
    ignored, as under nohup, stays ignored."""

    def leave(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    taken = {n: handler for n, handler in before.items() if handler is not signal.SIG_IGN}
    if threading.current_thread() is not threading.main_thread():
        taken = {}  # Python sets handlers in the main thread only
    for number in taken:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in taken.items():
            signal.signal(number, handler)


def serve_meanwhile() -> None:
    """The server's process. Its standard input ends when the command that started it is gone,
    however that ended; then the server ends, too."""
    from tandem.cli import main

    def end() -> None:
        os.read(0, 1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end, daemon=True).start()
    main()


def _address(process: subprocess.Popen[str], console: Console) -> str:
    """Once the server is ready; what it says until then is shown, later it is not. If it ends
    instead, it has said why, unless a signal ended it; then so does the command."""
    assert process.stderr is not None
    for line in process.stderr:
        if match := re.search(r"ready on (http://\S+)", line):
            threading.Thread(target=_drain, args=(process,), daemon=True).start()
            return match[1]
        console.print(plain(line.rstrip()), markup=False, highlight=False)
    status = process.wait()
    if status < 0:
        name = signal.Signals(-status).name
        console.print(f"error: the server was ended by {name}", style="red", highlight=False)
    raise typer.Exit(status if status > 0 else 1)


def _drain(process: subprocess.Popen[str]) -> None:
    assert process.stderr is not None
    for _ in process.stderr:
        pass
