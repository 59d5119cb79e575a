"""`tandem adapters watch`: what an adapter learns, line by line, while it happens.

Polls the server; nothing is changed. Invariant: a line is shown when something has changed, and an
event is shown once, also across a server's restart.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import Any

from tandem.cli.remote import Remote, RemoteError, Unreachable, when

_POLL_S = 1.0
_MOST_EVENTS = 100
_FIRST_EVENTS = 5
_METRIC = re.compile(r"tandem_learning_(steps_total|loss)\{(.*)\} (\S+)")


def trained(adapter: dict[str, Any]) -> dict[str, int]:
    """Training samples by state."""
    found: dict[str, int] = (adapter["learning"] or {"samples": {}})["samples"].get("train", {})
    return found


def held_out(adapter: dict[str, Any]) -> int:
    """Samples that versions are measured on."""
    samples = (adapter["learning"] or {"samples": {}})["samples"]
    count: int = samples.get("held_out", {}).get("accepted", 0)
    return count


def summary(adapter: dict[str, Any]) -> str:
    """The version that answers, and the number of samples in each state."""
    samples = trained(adapter)
    parts = [f"{samples.get('accepted', 0)} new", f"{samples.get('assigned', 0)} in training"]
    rest = [state for state in samples if state not in ("accepted", "assigned")]
    parts += [f"{samples[state]} {state}" for state in rest if samples[state]]
    parts.append(f"{held_out(adapter)} held out")
    return f"{adapter['label']} answers; samples: {', '.join(parts)}"


def line_of(event: dict[str, Any]) -> str:
    """An event as a line."""
    level = "" if event["level"] == "info" else f"{event['level']}: "
    return f"{when(event['created_at'])} {level}{event['message']}"


def follow(
    server: Remote,
    name: str,
    pause: Callable[[float], None] = time.sleep,
    now: Callable[[], float] = time.time,
) -> Iterator[str]:
    """Lines as they come, without end. Raises `RemoteError` if there is no such adapter."""
    seen: int | None = None
    before: dict[str, str] = {}
    away = False
    while True:
        try:
            found = server.get(f"adapters/{name}")
            events = _news(server, name, seen)
            steps = _steps(server, name)
        except Unreachable as error:
            if not away:
                yield f"{when(now())} {error}; trying again"
            away = True
        else:
            away = False
            seen = events[-1]["id"] if events else seen or 0
            yield from map(line_of, events)
            for what, line in {"steps": steps, "state": summary(found)}.items():
                if line and before.get(what) != line:
                    yield f"{when(now())} {line}"
                before[what] = line
        pause(_POLL_S)


def _news(server: Remote, name: str, seen: int | None) -> list[dict[str, Any]]:
    """Events after number `seen`, oldest first; None: the last few."""
    path, found = f"adapters/{name}/events", list[dict[str, Any]]()
    if seen is None:
        return list(reversed(server.get(path, limit=_FIRST_EVENTS)["data"]))
    page = server.get(path, limit=_MOST_EVENTS)
    while True:
        news = [event for event in page["data"] if event["id"] > seen]
        found += news
        if len(news) < len(page["data"]) or not page["has_more"]:
            return found[::-1]
        page = server.get(path, limit=_MOST_EVENTS, before=news[-1]["id"])


def _steps(server: Remote, name: str) -> str:
    """How many steps were applied since the server started; empty if it does not tell."""
    try:
        text = server.metrics()
    except Unreachable:
        raise
    except RemoteError:  # not for this key
        return ""
    values = {
        what: float(value)
        for what, labels, value in _METRIC.findall(text)
        if f'adapter="{name}"' in labels and (what == "loss" or 'outcome="applied"' in labels)
    }
    if not values.get("steps_total"):
        return ""
    return f"{values['steps_total']:.0f} steps, loss {values.get('loss', float('nan')):.4f}"
