"""`tandem adapters`: see and manage the adapters of a running server."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from tandem.cli.adapters_watch import follow, held_out, line_of, summary, trained
from tandem.cli.curves import write_curves
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
    when,
)

app = typer.Typer(help="Adapters of a running server: what they learned, versions, roll back.")

Name = Annotated[str, typer.Argument(help="Name of the adapter")]
Version = Annotated[int, typer.Argument(help="Number of the version")]
VersionOption = Annotated[int | None, typer.Option("--version", help="The same as VERSION")]


@app.command("list")
def list_command(url: Url = DEFAULT_URL, api_key: Key = "") -> None:
    """Show all adapters: what answers, and how much waits to be learned."""
    with connected(url, api_key) as server:
        listed = server.get("adapters")["data"]
    states = [*_STATES, *sorted({state for each in listed for state in trained(each)} - {*_STATES})]
    rows = [
        [
            adapter["model"],
            adapter["label"],
            (adapter["learning"] or {"settings": {}})["settings"].get("gate", ""),
            *(trained(adapter).get(state, 0) for state in states),
            held_out(adapter),
        ]
        for adapter in listed
    ]
    shown = [_STATES.get(state, state) for state in states]
    Console().print(table(("model", "answers", "gate", *shown, "held out"), rows))
    if not listed:
        print("no adapters yet; the first feedback for a name makes one (tandem adapters create)")


# Samples that are trained on, by their state: one that a server knows besides has its own name.
_STATES = {
    "accepted": "new",
    "assigned": "in training",
    "consumed": "consumed",
    "refused": "refused",
    "invalid": "invalid",
}


@app.command("versions")
def versions_command(name: Name, url: Url = DEFAULT_URL, api_key: Key = "") -> None:
    """Show the versions of an adapter with what the gate measured; `curves` writes all of it."""
    with connected(url, api_key) as server:
        listed = server.get(f"adapters/{name}/versions")["data"]
        if not listed:
            print(plain(f"no versions yet: {summary(server.get(f'adapters/{name}'))}"))
            return
    rows = [
        [
            f"{version['version']}{' *' if version['current'] else ''}",
            version["state"],
            when(version["created_at"]),
            version["parent"] or "base",
            version["origin"],
        ]
        for version in listed
    ]
    Console().print(table(("version", "state", "made", "from", "by"), rows))
    for version in listed:
        known = {name: version["metrics"].get(metric) for metric, name in _METRICS.items()}
        said = [f"{name} {number(value)}" for name, value in known.items() if value is not None]
        if said:
            print(f"version {version['version']}: {', '.join(said)}")
        if version["reason"]:
            print(plain(f"version {version['version']} {version['state']}: {version['reason']}"))
    if any(version["state"] == "refused" for version in listed):
        print(_NEXT_STEP)


_NEXT_STEP = (
    "refused: docs/troubleshooting.md says what each reason means; `tandem adapters publish NAME "
    "VERSION` lets a version answer all the same"
)


_METRICS = {
    "win_rate_before": "win rate before",
    "win_rate": "win rate",
    "win_rate_per_token": "win rate a token",
    "clpd": "CLPD",
    "answers_read": "answers read",
    "broken_answers": "broken answers",
    "kept": "kept",
    "chosen_gain": "chosen gain",
    "canary_quality_drop": "quality drop",
    "canary_divergence": "divergence",
}


@app.command("events")
def events_command(
    name: Name,
    limit: Annotated[int, typer.Option(min=1, max=100, help="How many")] = 20,
    url: Url = DEFAULT_URL,
    api_key: Key = "",
) -> None:
    """Show the history of an adapter, newest first."""
    with connected(url, api_key) as server:
        listed = server.get(f"adapters/{name}/events", limit=limit)["data"]
    for event in listed:
        print(plain(line_of(event)))
    if not listed:
        print("nothing has happened yet; `tandem adapters watch` shows what comes")


@app.command("watch")
def watch_command(name: Name, url: Url = DEFAULT_URL, api_key: Key = "") -> None:
    """Follow what an adapter learns: samples, steps, versions, verdicts; Ctrl-C leaves."""
    with connected(url, api_key) as server:
        for line in follow(server, name):
            print(plain(line), flush=True)


@app.command("curves")
def curves_command(
    name: Name,
    out: Annotated[Path, typer.Option(help="Folder to write into")] = Path("curves"),
    url: Url = DEFAULT_URL,
    api_key: Key = "",
) -> None:
    """Write what the versions were measured at: JSON Lines, and a TensorBoard event file."""
    with connected(url, api_key) as server:
        versions = server.get(f"adapters/{name}/versions")["data"]
        if not versions:
            raise RemoteError(f"'{name}' has no versions yet")
        lines, events, points = write_curves(name, versions, out)
    print(plain(f"wrote {lines} ({len(versions)} versions) and {events} ({points} points)"))
    print(plain(f"see them with: tensorboard --logdir {out}"))


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
        int | None, typer.Argument(help="To this version; 0: the base; default: one step back")
    ] = None,
    option: VersionOption = None,
    url: Url = DEFAULT_URL,
    api_key: Key = "",
) -> None:
    """Go back to an earlier version."""
    to = _one_of(version, option)
    body = {} if to is None else {"version": to}
    with connected(url, api_key) as server:
        answers = server.post(f"adapters/{name}/rollback", body)["version"]
    print(plain(f"{name}@{answers} answers now" if answers else f"{name} answers as the base does"))


@app.command("export")
def export_command(
    name: Name,
    version: Annotated[
        int | None, typer.Argument(help="Number of the version; default: the current one")
    ] = None,
    option: VersionOption = None,
    out: Annotated[Path | None, typer.Option(help="Where to; default: NAME-VERSION.zip")] = None,
    url: Url = DEFAULT_URL,
    api_key: Key = "",
) -> None:
    """Download a version as a zip of PEFT files."""
    version = _one_of(version, option)
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
        int | None, typer.Argument(help="This version only, not the one that answers")
    ] = None,
    option: VersionOption = None,
    url: Url = DEFAULT_URL,
    api_key: Key = "",
) -> None:
    """Forget an adapter with all its versions, or one version."""
    one = _one_of(version, option)
    route = f"adapters/{name}" if one is None else f"adapters/{name}/versions/{one}"
    with connected(url, api_key) as server:
        gone = server.delete(route)["id"]
    print(plain(f"{gone} is gone"))


def _one_of(argument: int | None, option: int | None) -> int | None:
    """The version that was named in one of two ways. Raises `typer.BadParameter`."""
    if argument is not None and option is not None and argument != option:
        raise typer.BadParameter(f"{option} and {argument} are two versions", param_hint="VERSION")
    return option if argument is None else argument


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
