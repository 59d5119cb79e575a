"""`tandem adapters`: see and manage the adapters of a running server."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from tandem.cli.remote import (
    DEFAULT_URL,
    Key,
    Remote,
    RemoteError,
    Url,
    connected,
    number,
    plain,
    table,
)

app = typer.Typer(help="Adapters of a running server: what they learned, versions, roll back.")

Name = Annotated[str, typer.Argument(help="Name of the adapter")]
Version = Annotated[int, typer.Argument(help="Number of the version")]


@app.command("list")
def list_command(url: Url = DEFAULT_URL, api_key: Key = "") -> None:
    """Show all adapters: what answers, and how much waits to be learned."""
    with connected(url, api_key) as server:
        listed = server.get("adapters")["data"]
    rows = []
    for adapter in listed:
        learning = adapter["learning"] or {"samples": {}, "settings": {}}
        train = learning["samples"].get("train", {})
        held_out = sum(learning["samples"].get("held_out", {}).values())
        gate = learning["settings"].get("gate", "")
        states = [train.get(state, 0) for state in ("accepted", "consumed", "refused", "invalid")]
        rows.append([adapter["model"], adapter["label"], gate, *states, held_out])
    columns = ("model", "answers", "gate", "new", "consumed", "refused", "invalid", "held out")
    Console().print(table(columns, rows))


@app.command("versions")
def versions_command(name: Name, url: Url = DEFAULT_URL, api_key: Key = "") -> None:
    """Show the versions of an adapter with what the gate measured."""
    with connected(url, api_key) as server:
        listed = server.get(f"adapters/{name}/versions")["data"]
    rows = [
        [
            f"{version['version']}{' *' if version['current'] else ''}",
            version["state"],
            version["parent"],
            version["origin"],
            *(number(version["metrics"].get(metric)) for metric in _METRICS),
            version["reason"] or "",
        ]
        for version in listed
    ]
    columns = ("version", "state", "from", "by", *_METRICS.values(), "reason")
    Console().print(table(columns, rows))


_METRICS = {
    "win_rate_before": "win rate before",
    "win_rate": "win rate",
    "clpd": "CLPD",
    "canary_quality_drop": "quality drop",
    "canary_divergence": "divergence",
}


@app.command("events")
def events_command(
    name: Name,
    limit: Annotated[int, typer.Option(help="How many")] = 20,
    url: Url = DEFAULT_URL,
    api_key: Key = "",
) -> None:
    """Show the history of an adapter, newest first."""
    with connected(url, api_key) as server:
        for event in server.get(f"adapters/{name}/events", limit=limit)["data"]:
            print(plain(f"{event['created_at']} {event['level']}: {event['message']}"))


@app.command("create")
def create_command(
    name: Name,
    setting: Annotated[
        list[str] | None, typer.Option("--set", help="NAME=VALUE, as in TOML; repeatable")
    ] = None,
    url: Url = DEFAULT_URL,
    api_key: Key = "",
) -> None:
    """Make an adapter that learns, or replace its settings."""
    with connected(url, api_key) as server:
        made = server.post(f"adapters/{name}", {"settings": _settings(setting or [])})
    print(plain(f"{made['model']}: {made['learning']['own_settings'] or 'default settings'}"))


@app.command("publish")
def publish_command(
    name: Name, version: Version, url: Url = DEFAULT_URL, api_key: Key = ""
) -> None:
    """Let a version answer: approve a candidate, or pin a published version."""
    with connected(url, api_key) as server:
        published = server.post(f"adapters/{name}/versions/{version}/publish")
    print(plain(f"{published['label']} answers now"))


@app.command("refuse")
def refuse_command(name: Name, version: Version, url: Url = DEFAULT_URL, api_key: Key = "") -> None:
    """Give up a candidate that waits for a decision."""
    with connected(url, api_key) as server:
        refused = server.post(f"adapters/{name}/versions/{version}/refuse")
    print(plain(f"{refused['label']} is refused"))


@app.command("rollback")
def rollback_command(
    name: Name,
    version: Annotated[
        int | None, typer.Option(help="To this version; 0: the base; default: one step back")
    ] = None,
    url: Url = DEFAULT_URL,
    api_key: Key = "",
) -> None:
    """Go back to an earlier version."""
    body = {} if version is None else {"version": version}
    with connected(url, api_key) as server:
        answers = server.post(f"adapters/{name}/rollback", body)["version"]
    print(plain(f"{name}@{answers} answers now" if answers else f"{name} answers as the base does"))


@app.command("export")
def export_command(
    name: Name,
    version: Annotated[
        int | None, typer.Argument(help="Number of the version; default: the current one")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Where to; default: NAME-VERSION.zip")] = None,
    url: Url = DEFAULT_URL,
    api_key: Key = "",
) -> None:
    """Download a version as a zip of PEFT files."""
    with connected(url, api_key) as server:
        if version is None:
            version = _current(server, name)
        target = out or Path(f"{name}-{version}.zip")
        size = server.download(f"adapters/{name}/versions/{version}/export", target)
    print(f"wrote {target} ({size} bytes)")


@app.command("import")
def import_command(
    name: Name,
    source: Annotated[str, typer.Argument(help="A zip here, or a directory on the server")],
    url: Url = DEFAULT_URL,
    api_key: Key = "",
) -> None:
    """Publish PEFT files as the next version of an adapter."""
    with connected(url, api_key) as server:
        if Path(source).is_file():
            body = {"file_id": server.upload(Path(source), "user_data")}
        else:
            body = {"path": source}
        imported = server.post(f"adapters/{name}/import", body)
    print(plain(f"{imported['label']} answers now"))


@app.command("delete")
def delete_command(
    name: Name,
    version: Annotated[
        int | None, typer.Option(help="This version only, not the one that answers")
    ] = None,
    url: Url = DEFAULT_URL,
    api_key: Key = "",
) -> None:
    """Forget an adapter with all its versions, or one version."""
    route = f"adapters/{name}" if version is None else f"adapters/{name}/versions/{version}"
    with connected(url, api_key) as server:
        gone = server.delete(route)["id"]
    print(plain(f"{gone} is gone"))


def _current(server: Remote, name: str) -> int:
    """The version that answers. Raises `RemoteError` where that is the base."""
    version: int = server.get(f"adapters/{name}")["version"]
    if not version:
        raise RemoteError(f"'{name}' has no current version; name one, or wait until it learned")
    return version


def _settings(given: list[str]) -> dict[str, Any]:
    """`rank=8` as TOML has it; a bare word is a text."""
    settings: dict[str, Any] = {}
    for item in given:
        name, separator, value = item.partition("=")
        if not separator:
            raise typer.BadParameter(f"{item!r}: write NAME=VALUE", param_hint="--set")
        try:
            settings[name] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            settings[name] = value
    return settings
