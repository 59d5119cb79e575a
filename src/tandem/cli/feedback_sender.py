"""Sends many feedbacks to a server, several at a time, and waits for a server that goes away.

Reads no file. Invariant: ratings and signals about the same answer are sent in their order, and a
feedback that is sent again is stored once.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from threading import Event, Lock
from typing import Any
from urllib.parse import quote

from rich.console import Console

from tandem.cli.feedback_lines import as_body
from tandem.cli.remote import Busy, Remote, RemoteError, Unreachable, plain

Body = dict[str, Any]

_ABOUT = ("messages", "prompt", "completion")
# Seconds between tries while the server is away; after the last one, sending ends.
_PAUSES_S = (1, 2, 4, 8, 15, 30)


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a file, by its number: the body to send under an idempotency key, or a problem."""

    number: int
    body: Body
    key: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Sent:
    """What became of a line: the server's answer, or a problem."""

    number: int
    answer: Body
    problem: str = ""


class Sender:
    """Sends to one server. The console is told once that the server is away."""

    def __init__(self, server: Remote, console: Console) -> None:
        self._server = server
        self._console = console
        self._lock = Lock()
        self._leaving = Event()
        self._answered = False
        self._told = False

    def sent(self, lines: Iterator[Line], concurrency: int) -> Generator[Sent, None, None]:
        """Send all; what became of each, as they end. Raises `Unreachable` of a server that has
        answered nothing, or was away for a minute."""
        running: dict[Future[Sent], str] = {}
        upcoming = next(lines, None)
        with ThreadPoolExecutor(concurrency) as pool:
            try:
                while upcoming is not None or running:
                    while upcoming is not None and len(running) < concurrency:
                        subject = _subject(upcoming.body)
                        if subject and subject in running.values():
                            break
                        running[pool.submit(self._send, upcoming)] = subject
                        upcoming = next(lines, None)
                    done, _ = wait(running, return_when=FIRST_COMPLETED)
                    for ended in done:
                        del running[ended]
                        yield ended.result()
            finally:
                self._leaving.set()

    def _send(self, line: Line) -> Sent:
        if line.problem:
            return Sent(line.number, {}, line.problem)
        try:
            return Sent(line.number, self._posted(line))
        except Busy as error:  # a quota, most likely: others of the lines may not need it
            return Sent(line.number, {}, str(error))
        except Unreachable:
            raise
        except RemoteError as error:
            known = self._known(line.body)
            return Sent(line.number, known, "" if known else str(error))

    def _known(self, body: Body) -> Body:
        """What is stored under the body's id, if it says the same; what an export says has not
        the form in which it was sent."""
        try:
            said = self._server.get(f"feedback/{quote(str(body['feedback_id']), safe='')}")
        except (KeyError, RemoteError):
            return {}
        return said if as_body(said) == body else {}

    def _posted(self, line: Line) -> Body:
        """The answer to a line, which is sent again while the server is away."""
        # An id of the line's own says already what it is.
        key = "" if line.body.get("feedback_id") else line.key
        for pause_s in (*_PAUSES_S, None):
            try:
                answer = self._server.post("feedback", line.body, idempotency_key=key)
            except Busy:
                raise
            except Unreachable as error:
                if not self._answered or self._leaving.is_set() or pause_s is None:
                    again = "; the same command goes on from here" if self._answered else ""
                    raise Unreachable(f"{error}{again}") from error
                self._tell(str(error))
                self._leaving.wait(pause_s)
            else:
                self._answered = True
                break
        return answer

    def _tell(self, problem: str) -> None:
        with self._lock:
            told, self._told = self._told, True
        if not told:
            line = plain(f"{problem}; trying again for a minute")
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def _subject(body: Body) -> str:
    """What must be sent in the order of the lines, since the later one counts; empty: any order."""
    if not ("rating" in body or "signal" in body):
        return ""
    about = body.get("completion_id") or [body.get(name) for name in _ABOUT]
    return json.dumps(about, sort_keys=True)
