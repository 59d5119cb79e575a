"""What a line of a JSONL file, or a stored feedback, says, as a body of POST /v1/feedback.

Knows three forms: ours, TRL's (`prompt`, `chosen`, `rejected`; `prompt`, `completion`; with
`label`; texts or lists of messages) and OpenAI's for preferences and plain `messages`. Sends
nothing. Invariant: a line that cannot be used raises one `LineError` with the reason.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from tandem.cli.remote import RemoteError
from tandem.services.feedback.signals import EXPLICIT, Signal, SignalType, interpret, reading_s

_SAYS = ("rating", "preference", "demonstration", "signal", "comment")
_ABOUT = ("completion_id", "choice", "messages", "prompt", "completion", "model")
_KEPT = ("adapter", "weight", "user", "conversation")
_OURS = frozenset((*_SAYS, *_ABOUT, *_KEPT, "feedback_id", "metadata"))
# A line with one of these is a row of a training file, whatever else it has.
_MARKS = ("chosen", "preferred_output", "label")
_FOREIGN = frozenset(
    (*_MARKS, "prompt", "rejected", "completion", "messages", "input", "non_preferred_output")
) | frozenset(_KEPT)

Messages = list[dict[str, Any]]


class LineError(Exception):
    """The line cannot be used; the message says why."""


@dataclass(frozen=True, slots=True)
class Line:
    """A body to send, and the columns of the line that are not in it."""

    body: dict[str, Any]
    unused: tuple[str, ...] = ()


def lines_of(file: Path) -> Iterator[tuple[int, bytes]]:
    """Lines that are not empty, with their numbers; a byte order mark is skipped.

    Raises `RemoteError` if the file cannot be read.
    """
    try:
        with file.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                text = (line.removeprefix(codecs.BOM_UTF8) if number == 1 else line).strip()
                if text:
                    yield number, text
    except OSError as error:
        raise RemoteError(f"cannot read {file}: {error.strerror}") from error


def parse_line(line: bytes, *, raw: bool) -> Line:
    """The feedback of a line. A text `prompt` of TRL's form becomes a user message; with `raw` it
    stays text. Raises `LineError`."""
    try:
        row = json.loads(line.decode(), parse_constant=_no_number)
    except UnicodeDecodeError as error:
        raise LineError(f"not UTF-8: {error.reason} at byte {error.start + 1}") from None
    except RecursionError:
        raise LineError("not JSON: nested too deeply") from None
    except ValueError as error:
        raise LineError(f"not JSON: {error}") from None
    if not isinstance(row, dict):
        raise LineError("not a JSON object")
    ours = not any(name in row for name in _MARKS) and any(
        row.get(name) is not None for name in _SAYS
    )
    if ours:
        body = {name: value for name, value in row.items() if name in _OURS}
    else:
        kept = {name: row[name] for name in _KEPT if row.get(name) is not None}
        body = kept | _foreign(row, raw)
    try:
        json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise LineError(f"half of a surrogate pair: {error.object[error.start]!a}") from None
    used = _OURS if ours else _FOREIGN
    return Line(body, tuple(name for name in row if name not in used))


def as_body(said: Mapping[str, Any]) -> dict[str, Any]:
    """A body of POST /v1/feedback that says the same as what the server tells of a feedback."""
    body: dict[str, Any] = {"feedback_id": said["id"], "adapter": said["adapter"]}
    if said["messages"]:
        body["messages"] = said["messages"]
    else:
        body["prompt"] = said["prompt"]
    weight = said["weight"]
    if said["signal"] != EXPLICIT:
        signal, answer = _signal(said)
        body |= {"completion": answer, "signal": asdict(signal)}
        counts = interpret(signal, answer).weight
        weight = weight / counts if counts else None
    elif said["kind"] == "rating":
        body |= {"completion": said["chosen"], "rating": said["rating"]}
    elif said["kind"] == "preference":
        body["preference"] = {"chosen": said["chosen"], "rejected": said["rejected"]}
    elif said["kind"] == "demonstration":
        body |= {"demonstration": said["chosen"], "completion": said["rejected"]}
    else:
        body["completion"] = said["chosen"]
    body |= {name: said[name] for name in ("comment", "user", "conversation", "metadata")}
    body["weight"] = weight or None
    return {name: value for name, value in body.items() if value not in (None, {})}


def _signal(said: Mapping[str, Any]) -> tuple[Signal, str]:
    """An implicit signal that is interpreted as `said` was, and the answer that it is about."""
    kind, rating = SignalType(said["signal"]), said["rating"]
    answer = (said["chosen"] if rating is not None else said["rejected"]) or ""
    text = said["chosen"] if rating is None or kind is SignalType.EDIT else None
    # Whoever liked it has read all of it.
    dwelt = kind is SignalType.DWELL_TIME
    return Signal(kind, text, rating * reading_s(answer) if dwelt else None), answer


def _foreign(row: Mapping[str, Any], raw: bool) -> dict[str, Any]:
    """The feedback body of a row in TRL's or OpenAI's form."""
    if "preferred_output" in row:
        given = row.get("input")
        messages = given.get("messages") if isinstance(given, dict) else None
        chosen, rejected = row["preferred_output"], row.get("non_preferred_output")
        return _preference(messages, chosen, rejected, raw)
    if "chosen" in row:
        return _preference(row.get("prompt"), row["chosen"], row.get("rejected"), raw)
    if "completion" in row:
        about, completion = _split(row.get("prompt"), row["completion"], "completion", raw)
        label = row.get("label")
        if label is None:
            return about | {"demonstration": completion}
        if not isinstance(label, bool | int | float):
            raise LineError("'label' must be true or false")
        return about | {"completion": completion, "rating": label}
    if "messages" in row:
        about, completion = _split(None, row["messages"], "messages", raw)
        return about | {"demonstration": completion}
    raise LineError(
        f"says nothing: there is none of {', '.join(_SAYS)}, chosen and rejected, completion"
    )


def _preference(prompt: object, chosen: object, rejected: object, raw: bool) -> dict[str, Any]:
    about, better = _split(prompt, chosen, "chosen", raw)
    beside, worse = _split(prompt, rejected, "rejected", raw)
    if about != beside:
        raise LineError("'chosen' and 'rejected' answer different prompts")
    return about | {"preference": {"chosen": better, "rejected": worse}}


def _split(prompt: object, answer: object, name: str, raw: bool) -> tuple[dict[str, Any], str]:
    """What is answered, as fields of a body, and the answer's text."""
    before: Messages = []
    if isinstance(prompt, list):
        before = list(prompt)
    elif isinstance(prompt, str) and (isinstance(answer, list) or not raw):
        before = [{"role": "user", "content": prompt}]
    elif prompt is not None and not isinstance(prompt, str):
        raise LineError("'prompt' must be a text or a list of messages")
    if isinstance(answer, str):
        if prompt is None:
            raise LineError(f"'{name}' needs a 'prompt'")
        return ({"messages": before} if before else {"prompt": prompt}), answer
    if not isinstance(answer, list) or not answer:
        raise LineError(f"'{name}' must be a text or a list of messages")
    *turns, last = answer
    content = last.get("content") if isinstance(last, dict) else None
    if not isinstance(content, str) or last.get("role", "assistant") != "assistant":
        raise LineError(f"'{name}' must end with an assistant's message that is a text")
    if not (before or turns):
        raise LineError(f"'{name}' needs a 'prompt'")
    return {"messages": [*before, *turns]}, content


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
