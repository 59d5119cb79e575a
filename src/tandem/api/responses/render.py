"""Answers in the shape of OpenAI's Responses API: a list of items, or its server-sent events.

Both are made by one list of items, so that a stream adds up to the whole response. Invariant: the
sequence numbers of a stream's events count up from 0, and each item is done before the next begins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tandem.api.errors import Failure
from tandem.api.parts import Parts
from tandem.api.render import Header, Json
from tandem.api.responses.schemas import ResponsesRequest, full_name
from tandem.core.sequence import FinishReason
from tandem.services.answering.answer import Usage
from tandem.services.answering.choice import Delta

_ID = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_PART = {"message": "output_text", "reasoning": "reasoning_text"}
_DELTA = {
    "message": "response.output_text",
    "reasoning": "response.reasoning_text",
    "function_call": "response.function_call_arguments",
}


@dataclass(slots=True)
class _Item:
    """One item of the output; `parts` are texts that join to its text or arguments."""

    kind: str
    id: str
    call_id: str = ""
    name: str = ""
    namespace: str | None = None
    parts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self.parts)

    def json(self, status: str) -> Json:
        """It, with nothing in it while it is in progress."""
        begun = status == "in_progress"
        made: Json = {"id": self.id, "type": self.kind, "status": status}
        if self.kind == "function_call":
            if self.namespace is not None:
                made["namespace"] = self.namespace
            arguments = "" if begun else self.text
            return {**made, "call_id": self.call_id, "name": self.name, "arguments": arguments}
        content = [] if begun else [self.part(self.text)]
        if self.kind == "reasoning":
            return {**made, "summary": [], "content": content}
        return {**made, "role": "assistant", "content": content}

    def part(self, text: str) -> Json:
        """The one part of a message or of reasoning."""
        made: Json = {"type": _PART[self.kind], "text": text}
        return {**made, "annotations": [], "logprobs": []} if self.kind == "message" else made


class _Output:
    """The items of one response while its deltas come."""

    def __init__(self, asked: ResponsesRequest, header: Header) -> None:
        response = header.id.partition("_")[2]
        names = _names(asked)

        def make(place: int, kind: str, call_id: str, called: str) -> _Item:
            name, namespace = names.get(called, (called, None))
            return _Item(kind, f"{_ID[kind]}_{response}_{place}", call_id, name, namespace)

        self._parts = Parts(("message", "reasoning", "function_call"), make)
        self.items = self._parts.all
        self.cut = False
        self.reasoning_tokens = 0
        self._waiting_tokens = 0  # what they say is not told yet

    def take(self, delta: Delta) -> tuple[bool, str]:
        """See `Parts`."""
        self.cut = delta.finish_reason is FinishReason.LENGTH
        self._waiting_tokens += len(delta.token_ids)
        if delta.text or delta.call or delta.reasoning:
            self.reasoning_tokens += self._waiting_tokens if delta.reasoning else 0
            self._waiting_tokens = 0
        return self._parts.take(delta)

    def json(self) -> list[Json]:
        """All items; the last one is incomplete if the answer is."""
        made = [item.json("completed") for item in self.items]
        if made and self.cut:
            made[-1]["status"] = "incomplete"
        return made


class WholeResponse:
    """Gathers deltas into one response."""

    def __init__(self, asked: ResponsesRequest) -> None:
        self._asked = asked
        self._deltas: list[Delta] = []

    def add(self, delta: Delta) -> None:
        """Add what it gained."""
        self._deltas.append(delta)

    def encode(self, header: Header, usage: Usage) -> bytes:
        """The body of the answer."""
        output = _Output(self._asked, header)
        for delta in self._deltas:
            output.take(delta)
        return msgspec.json.encode(_ended(self._asked, header, output, usage))


class ResponseEvents:
    """Writes deltas as events of the Responses API."""

    def __init__(self, asked: ResponsesRequest) -> None:
        self._asked = asked
        self._output: _Output
        self._header: Header | None = None
        self._number = -1
        self._open = False

    def delta(self, header: Header, delta: Delta, usage: Usage) -> bytes:
        """The events of one delta."""
        events = b""
        if self._header is None:
            self._header, self._output = header, _Output(self._asked, header)
            begun = _response(self._asked, header, "in_progress")
            events += self._event("response.created", response=begun)
            events += self._event("response.in_progress", response=begun)
        was_open = self._output.items[-1] if self._open else None
        begins, gained = self._output.take(delta)
        if begins:
            if was_open is not None:
                events += self._close(was_open, len(self._output.items) - 2)
            events += self._begin(self._output.items[-1])
        if gained:
            item = self._output.items[-1]
            events += self._of(item, f"{_DELTA[item.kind]}.delta", delta=gained)
        if delta.finish_reason is not None and self._open:
            self._open = False
            events += self._close(self._output.items[-1], len(self._output.items) - 1)
        return events

    def end(self, header: Header, usage: Usage) -> bytes:
        """The response as a whole."""
        response = _ended(self._asked, header, self._output, usage)
        return self._event(f"response.{response['status']}", response=response)

    def failed(self, told: Failure) -> bytes:
        """The response as failed; the error alone if there is none yet."""
        error = told.body["error"]
        said = {name: error[name] for name in ("code", "message", "param")}
        if self._header is None:
            return self._event("error", **said)
        code = "rate_limit_exceeded" if told.status == 429 else "server_error"
        response = _response(self._asked, self._header, "failed")
        response["error"] = {"code": code, "message": error["message"]}
        return self._event("response.failed", response=response)

    def _begin(self, item: _Item) -> bytes:
        self._open = True
        place = len(self._output.items) - 1
        begun = item.json("in_progress")
        events = self._event("response.output_item.added", output_index=place, item=begun)
        if item.kind != "function_call":
            events += self._of(item, "response.content_part.added", part=item.part(""))
        return events

    def _close(self, item: _Item, place: int) -> bytes:
        last = place == len(self._output.items) - 1
        status = "incomplete" if last and self._output.cut else "completed"
        if item.kind == "function_call":
            events = self._of(
                item, f"{_DELTA[item.kind]}.done", place, arguments=item.text, name=item.name
            )
        else:
            events = self._of(item, f"{_DELTA[item.kind]}.done", place, text=item.text)
            events += self._of(item, "response.content_part.done", place, part=item.part(item.text))
        done = item.json(status)
        return events + self._event("response.output_item.done", output_index=place, item=done)

    def _of(self, item: _Item, kind: str, place: int | None = None, **body: Any) -> bytes:
        """An event about an item, the last one if no `place` is given."""
        about: Json = {
            "item_id": item.id,
            "output_index": len(self._output.items) - 1 if place is None else place,
        }
        if item.kind != "function_call":
            about["content_index"] = 0
        if kind.startswith("response.output_text."):
            about["logprobs"] = []
        return self._event(kind, **about, **body)

    def _event(self, kind: str, **body: Any) -> bytes:
        self._number += 1
        told: Mapping[str, Any] = {"type": kind, "sequence_number": self._number, **body}
        return b"event: " + kind.encode() + b"\ndata: " + msgspec.json.encode(told) + b"\n\n"


@dataclass(frozen=True, slots=True)
class ResponsesDialect:
    """/v1/responses, for what was asked."""

    asked: ResponsesRequest

    def whole(self) -> WholeResponse:
        """For one answer."""
        return WholeResponse(self.asked)

    def stream(self) -> ResponseEvents:
        """For one answer."""
        return ResponseEvents(self.asked)


def _ended(asked: ResponsesRequest, header: Header, output: _Output, usage: Usage) -> Json:
    """The response when nothing is missing any more."""
    made = _response(asked, header, "incomplete" if output.cut else "completed")
    made["incomplete_details"] = {"reason": "max_output_tokens"} if output.cut else None
    made["output"] = output.json()
    made["usage"] = {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": output.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
    return made


def _names(asked: ResponsesRequest) -> dict[str, tuple[str, str | None]]:
    """What the model calls each function -> its name and its namespace."""
    return {
        full_name(namespace, function.name): (function.name, namespace)
        for namespace, function in asked.functions
    }


def _response(asked: ResponsesRequest, header: Header, status: str) -> Json:
    """A response without output, with what was asked for."""
    choice = asked.tool_choice
    if isinstance(choice, str) or choice is None:
        chosen: str | dict[str, str] = choice or "auto"
    else:
        name, namespace = _names(asked)[choice.function.name]
        chosen = {"type": "function", "name": name}
        if namespace is not None:
            chosen["namespace"] = namespace
    form: Json = {"type": "text"}
    if asked.text is not None and asked.text.format is not None:
        form = asked.text.format.model_dump(by_alias=True, exclude_none=True)
    return {
        "id": header.id,
        "object": "response",
        "created_at": header.created_s,
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "metadata": asked.metadata or {},
        "model": header.model,
        "output": [],
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "service_tier": header.tier or "default",
        "store": False,
        "temperature": 1.0 if asked.temperature is None else asked.temperature,
        "text": {"format": form},
        "tool_choice": chosen,
        "tools": [tool.told() for tool in asked.tools or () if tool is not None],
        "top_p": 1.0 if asked.top_p is None else asked.top_p,
        "truncation": "disabled",
        "usage": None,
    }
