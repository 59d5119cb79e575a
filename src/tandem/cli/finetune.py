"""`tandem finetune`: start fine-tuning jobs on a running server and watch them.

Progress comes from the job's own events. Invariant: leaving a watch never ends the job.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from tandem.cli.adapters_watch import line_of
from tandem.cli.remote import DEFAULT_URL, Key, Remote, Unreachable, Url, connected, plain, table

app = typer.Typer(help="Fine-tuning jobs of a running server.")

JobId = Annotated[str, typer.Argument(help="Id of the job")]
_POLL_S = 0.5
_PAGE = 100
_RUNNING = ("validating_files", "queued", "running")


class Method(StrEnum):
    """OpenAI's names of the ways to learn, and ours."""

    SUPERVISED = "supervised"
    DPO = "dpo"
    KTO = "kto"


@app.command("create")
def create_command(
    training_file: Annotated[Path, typer.Argument(help="JSONL with the examples")],
    model: Annotated[str, typer.Option(help="What to train; NAME:ADAPTER goes on with it")],
    method: Annotated[Method, typer.Option(help="How to learn")] = Method.SUPERVISED,
    validation_file: Annotated[Path | None, typer.Option(help="JSONL to measure on")] = None,
    suffix: Annotated[str, typer.Option(help="Begins the new adapter's name")] = "",
    epochs: Annotated[int | None, typer.Option(help="Times over all examples")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Examples of a step")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Of AdamW")] = None,
    beta: Annotated[float | None, typer.Option(help="Of DPO and KTO")] = None,
    seed: Annotated[int | None, typer.Option(help="Decides order and start")] = None,
    watch: Annotated[bool, typer.Option(help="Show the progress until it ends")] = True,
    url: Url = DEFAULT_URL,
    api_key: Key = "",
) -> None:
    """Upload the files and start a job."""
    given = {
        "n_epochs": epochs,
        "batch_size": batch_size,
        "learning_rate": learning_rate,
        "beta": beta,
    }
    chosen = {name: value for name, value in given.items() if value is not None}
    with connected(url, api_key) as server:
        body: dict[str, Any] = {
            "model": model,
            "training_file": server.upload(training_file, "fine-tune"),
            "method": {"type": method.value, method.value: {"hyperparameters": chosen}},
        }
        if validation_file is not None:
            body["validation_file"] = server.upload(validation_file, "fine-tune")
        if suffix:
            body["suffix"] = suffix
        if seed is not None:
            body["seed"] = seed
        job = server.post("fine_tuning/jobs", body)
        print(plain(job["id"]))
        if watch:
            raise typer.Exit(_watch(server, job["id"], Console()))


@app.command("list")
def list_command(url: Url = DEFAULT_URL, api_key: Key = "") -> None:
    """Show the jobs of this API key, newest first."""
    with connected(url, api_key) as server:
        jobs = server.get("fine_tuning/jobs", limit=_PAGE)["data"]
    rows = [
        [
            job["id"],
            job["status"],
            job["method"]["type"],
            job["model"],
            job["fine_tuned_model"] or "",
            (job["error"] or {}).get("message", ""),
        ]
        for job in jobs
    ]
    Console().print(table(("id", "status", "method", "model", "result", "error"), rows))


@app.command("watch")
def watch_command(job_id: JobId, url: Url = DEFAULT_URL, api_key: Key = "") -> None:
    """Show the progress of a job until it ends."""
    with connected(url, api_key) as server:
        raise typer.Exit(_watch(server, job_id, Console()))


@app.command("events")
def events_command(job_id: JobId, url: Url = DEFAULT_URL, api_key: Key = "") -> None:
    """Show what happened, oldest first."""
    with connected(url, api_key) as server:
        for event in _events(server, job_id, None):
            print(plain(line_of(event)))


@app.command("cancel")
def cancel_command(job_id: JobId, url: Url = DEFAULT_URL, api_key: Key = "") -> None:
    """Give a job up."""
    _steer(job_id, "cancel", url, api_key)


@app.command("pause")
def pause_command(job_id: JobId, url: Url = DEFAULT_URL, api_key: Key = "") -> None:
    """Stop a job after its current step."""
    _steer(job_id, "pause", url, api_key)


@app.command("resume")
def resume_command(job_id: JobId, url: Url = DEFAULT_URL, api_key: Key = "") -> None:
    """Go on with a paused job."""
    _steer(job_id, "resume", url, api_key)


def _steer(job_id: str, what: str, url: str, api_key: str) -> None:
    with connected(url, api_key) as server:
        job = server.post(f"fine_tuning/jobs/{job_id}/{what}")
    print(plain(f"{job['id']}: {job['status']}"))


def _watch(server: Remote, job_id: str, console: Console) -> int:
    """A progress bar over the job's steps; the exit code, 0 if it succeeded or is paused.

    A server that does not answer is waited for: the job goes on when it is back.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[steps]}"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[loss]}"),
    )
    seen = ""
    job: dict[str, Any] = {"status": "validating_files"}
    with Progress(*columns, console=console) as progress, _leaving(console, job_id):
        bar = progress.add_task(job["status"], total=None, loss="", steps="")
        away = False
        while job["status"] in _RUNNING:
            try:
                job = server.get(f"fine_tuning/jobs/{job_id}")
                events = _events(server, job_id, seen or None)
            except Unreachable as error:
                if not away:
                    waits = f"{error}; waiting for the server, where the job goes on"
                    progress.console.print(plain(waits), markup=False, highlight=False)
                away = True
                progress.update(bar, description="no answer")
                time.sleep(_POLL_S)
                continue
            away = False
            progress.update(bar, description=job["status"])
            for event in events:
                seen = event["id"]
                if event["type"] == "metrics":
                    done, total = _steps(event)
                    loss = f"loss {event['data']['train_loss']:.4f}"
                    steps = f"{done}/{total}"
                    progress.update(bar, completed=done, total=total, loss=loss, steps=steps)
                else:
                    progress.console.print(plain(event["message"]), markup=False, highlight=False)
            if job["status"] in _RUNNING:
                time.sleep(_POLL_S)
    if job["status"] == "succeeded":
        console.print(plain(f"{job['fine_tuned_model']} is ready"), markup=False, highlight=False)
    elif job["error"]:
        console.print(plain(job["error"]["message"]), markup=False, highlight=False, style="red")
    return 0 if job["status"] in ("succeeded", "paused") else 1


@contextmanager
def _leaving(console: Console, job_id: str) -> Iterator[None]:
    """Ctrl-C says that the job goes on, and how to see it again."""
    try:
        yield
    except KeyboardInterrupt:
        again = f"the job goes on; see it again: tandem finetune watch {job_id}"
        console.print(plain(again), markup=False, highlight=False)
        raise typer.Exit(130) from None


def _events(server: Remote, job_id: str, seen: str | None) -> Iterator[dict[str, Any]]:
    """Events after the one with the id `seen`, oldest first."""
    found: list[dict[str, Any]] = []
    after = None
    while True:
        page = server.get(f"fine_tuning/jobs/{job_id}/events", limit=_PAGE, after=after)
        for event in page["data"]:
            if event["id"] == seen:
                return iter(found[::-1])
            found.append(event)
        if not page["has_more"]:
            return iter(found[::-1])
        after = page["last_id"]


def _steps(event: dict[str, Any]) -> tuple[int, int]:
    """Step and total of a metrics event, whose message begins with `Step 3/20:`."""
    done, _, total = event["message"].removeprefix("Step ").partition(":")[0].partition("/")
    return int(done), int(total)
