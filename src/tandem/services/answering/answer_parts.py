"""The text of an answer becomes reasoning, content and tool calls, while it comes.

transformers' parser cuts the text at the markers of the model's format; tool calls inside are read
here piece by piece where they are JSON, else when they are complete. What looks like calls and has
none (no JSON, no function that was offered) is content, and so is a call that a limit or a stop of
the client's cut off and whose arguments cannot be told before its end. Invariant: the parts depend
on the text, not on how it was cut into deltas, so a stream and a whole answer say the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from transformers.utils.chat_parsing import ResponseParser, parse_response
from transformers.utils.chat_parsing.response_templates import load_response_template

from tandem.core.errors import InvalidRequest
from tandem.core.sequence import FinishReason
from tandem.services.answering.calls import CallScanner, Piece, call_of
from tandem.services.answering.choice import CallPiece, Delta
from tandem.services.answering.formats import (
    CALLS,
    CLOSE,
    CONTENT,
    OPEN,
    REASONING_FIELDS,
    AnswerFormat,
    Calls,
)


@dataclass(frozen=True, slots=True)
class Calling:
    """The tools that an answer may call, in OpenAI's form; one call only unless `parallel`. With
    `forced`, it must be calls, of functions of these names, and nothing else."""

    tools: tuple[dict[str, Any], ...] = ()
    parallel: bool = True
    forced: tuple[str, ...] = ()

    @property
    def names(self) -> frozenset[str]:
        """Names of the functions."""
        return frozenset(tool["function"]["name"] for tool in self.tools)


NO_TOOLS = Calling()
_BROKEN = (ValueError, KeyError, TypeError)
"""What transformers raises for text that a response template cannot parse."""
_TAIL_CHARS = 256
"""The end of an answer, in which the marker after its calls stands if there is one."""


class AnswerReader:
    """Reads one choice, whose answer follows `prefix`; `new_id` makes ids of calls."""

    def __init__(
        self, form: AnswerFormat, calling: Calling, prefix: str, new_id: Callable[[], str]
    ) -> None:
        template = form.template(tools=bool(calling.tools))
        assert template is not None
        spec = load_response_template(template)
        self._closes = spec.fields[CALLS].close_re if CALLS in spec.fields else None
        self._tail = ""  # of the text so far
        self._cut = self._half = False
        self._broken = False
        try:
            self._parser = ResponseParser(template, prefix=prefix, tools=list(calling.tools))
        except _BROKEN:  # what there is of the answer already
            self._broken = True
        self._prompt_chars = 0 if self._broken else _held(template, prefix)
        self._led = 0  # of those, how many belong to the marker of calls that follows
        self._shipped = form.shipped is not None
        self._calls = form.calls
        self._calling = calling
        self._new_id = new_id
        self._names = calling.names
        self._streams = form.calls is not None and form.calls.inner is None
        self._scanner = CallScanner(self._names)
        self._body = ""  # of the stretch of calls that is open
        self._index = -1
        self._silent = False

    def read(self, delta: Delta) -> list[Delta]:
        """`delta` as one delta a part, in order; log-probabilities and ids are with the first."""
        cut = delta.finish_reason is FinishReason.LENGTH or delta.stop_reason is not None
        parts = self._parts(delta.text, ends=delta.finish_reason is not None, cut=cut)
        made = [Delta(delta.index, "")]
        for part in parts:
            if _same_kind(made[-1], part):
                part = replace(
                    part,
                    text=made[-1].text + part.text,
                    reasoning=made[-1].reasoning + part.reasoning,
                )
                made[-1] = replace(part, index=delta.index)
            else:
                made.append(replace(part, index=delta.index))
        made[0] = replace(made[0], tokens=delta.tokens, token_ids=delta.token_ids)
        stopped = delta.finish_reason is FinishReason.STOP and not self._half
        called = stopped and self._index >= 0
        made[-1] = replace(
            made[-1],
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            called=called,
        )
        return made

    def _parts(self, text: str, *, ends: bool, cut: bool) -> list[Delta]:
        if self._broken:
            return [Delta(0, text)] if text else []
        last: list[Mapping[str, Any]] = []
        try:
            events = self._parser.feed(text)
            if ends:
                last = self._parser.finalize()[1]
        except _BROKEN:
            self._broken, self._half = True, cut
            return [Delta(0, self._body + text)]
        self._tail = (self._tail + text)[-_TAIL_CHARS:]
        made = [part for event in events for part in self._part(event)]
        # The parser also closes what was open at the end.
        self._cut = ends and cut and not _ends_with(self._closes, self._tail)
        return made + [part for event in last for part in self._part(event)]

    def _own(self, event: Mapping[str, Any]) -> str:
        """Text of a chunk without that of the prompt, which comes first where it was no marker."""
        kind, name = event["type"], event["field"]
        if kind != "region_chunk":
            if self._prompt_chars and (kind == "region_close" or name != CONTENT):
                self._led, self._prompt_chars = self._prompt_chars, 0
            if kind == "region_open" and name != CALLS:
                self._led = 0
            return ""
        text = str(event["text"])
        cut = min(self._prompt_chars, len(text))
        self._prompt_chars -= cut
        return text[cut:]

    def _part(self, event: Mapping[str, Any]) -> list[Delta]:
        kind, name, text = event["type"], event["field"], self._own(event)
        if kind == "region_chunk" and name == CONTENT:
            return [Delta(0, text)]
        if kind == "region_chunk" and name in REASONING_FIELDS:
            return [Delta(0, "", reasoning=text)]
        if name != CALLS:
            return []
        if kind == "region_open":
            self._scanner, self._body = CallScanner(self._names), ""
            return []
        if kind == "region_chunk":
            self._body += text
            return self._told(self._scanner.push(text)) if self._streams else []
        return self._closed(event["value"])

    def _closed(self, value: Any) -> list[Delta]:
        """A stretch of calls is over."""
        body, self._body = self._body, ""
        led, self._led = self._led, 0
        # Without an end marker, JSON that is whole is what the model wrote to its end.
        cut = self._cut and not (self._closes is None and _is_whole(body))
        self._half = self._cut and self._scanner.open if self._streams else cut
        if self._shipped:
            called = [] if cut else _calls_in(value, self._names)
            return self._told(called) if called else [Delta(0, body)]
        assert self._calls is not None
        if not self._streams and not cut:
            called = _calls_in(_inside(body, self._calls, self._calling), self._names)
            if called:
                return self._told(called)
        elif self._streams and (self._scanner.found or "".join(body.split()) == "[]"):
            return []  # no calls is what an empty list says
        return [Delta(0, f"{value[OPEN]}{body}{value[CLOSE]}"[led:])]

    def _told(self, pieces: Sequence[Piece]) -> list[Delta]:
        made: list[Delta] = []
        for piece in pieces:
            if piece.name:
                self._silent = self._index >= 0 and not self._calling.parallel
                if not self._silent:
                    self._index += 1
                    call = CallPiece(self._index, self._new_id(), piece.name)
                    made.append(Delta(0, "", call=call))
            elif not self._silent:
                made.append(Delta(0, "", call=CallPiece(self._index, arguments=piece.arguments)))
        return made


def reader_of(
    form: AnswerFormat, calling: Calling, prefix: str, new_id: Callable[[], str]
) -> Callable[[], AnswerReader] | None:
    """What makes a reader for each choice of an answer; None if all of it is text. Raises
    `InvalidRequest` for tools that this model cannot call."""
    if calling.tools and not form.takes_tools:
        raise InvalidRequest(
            "this model's way of writing tool calls is not known to this server; describe the "
            "tools in a message and parse the answer",
            param="tools",
            code="unsupported_parameter",
        )
    if form.template(tools=bool(calling.tools)) is None:
        return None
    return partial(AnswerReader, form, calling, prefix, new_id)


def _ends_with(pattern: re.Pattern[str] | None, text: str) -> bool:
    return pattern is not None and any(m.end() == len(text) for m in pattern.finditer(text))


def _is_whole(body: str) -> bool:
    """Whether a stretch of calls is JSON to its end."""
    try:
        json.loads(body)
    except ValueError:
        return False
    return True


def _same_kind(one: Delta, other: Delta) -> bool:
    """Whether two parts are one: both text, or both reasoning, or the first is nothing yet."""
    if one.call or other.call:
        return not (one.call or one.text or one.reasoning)
    return not (one.text and other.reasoning) and not (one.reasoning and other.text)


def _inside(body: str, calls: Calls, calling: Calling) -> Any:
    """What transformers finds in a stretch of calls; None if it finds nothing."""
    try:
        found = parse_response(body, calls.inner, prefix="", tools=list(calling.tools))
    except _BROKEN:
        return None
    return found.get(CALLS)


def _calls_in(value: Any, names: Collection[str]) -> list[Piece]:
    """The calls in what transformers made of them: one, or a list."""
    made: list[Piece] = []
    for item in value if isinstance(value, list) else [value]:
        called = item.get("function", item) if isinstance(item, dict) else None
        if isinstance(called, dict) and (found := call_of(called, names)) is not None:
            made += [Piece(found[0]), Piece(arguments=found[1])]
    return made


def _held(template: Any, prefix: str) -> int:
    """How many of its last characters a parser holds back, since a marker might begin there."""
    try:
        events = ResponseParser(template, prefix=prefix).finalize()[1]
    except _BROKEN:
        return 0
    return sum(len(event["text"]) for event in events if event["type"] == "region_chunk")
