"""The turns of a conversation in OpenAI's form, with calls of tools and what these returned.

Knows no route. Invariant: what a chat template sees of a turn has a text as its content.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from tandem.api.fields import MESSAGE_REFUSED, check_extra
from tandem.api.tools import ToolCalls
from tandem.core.errors import InvalidRequest

MAX_MESSAGES = 16_384
_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
    "additionalProperties": False,
}
_CONTENT = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": _PART, "minItems": 1},
        {"type": "null"},
    ]
}


def _content(value: object) -> object:
    """Text, or a list of text parts, which are joined; or nothing beside tool calls."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise ValueError("must be a string or a list of parts of type 'text'")
    texts: list[str] = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise ValueError(f"parts of type {str(kind)[:50]!r} are not supported; send text only")
        if not isinstance(part.get("text"), str):
            raise ValueError("a part of type 'text' needs a string 'text'")
        if unknown := sorted(part.keys() - {"type", "text"}):
            raise ValueError(f"a part of type 'text' has no field {unknown[0][:50]!r}")
        texts.append(part["text"])
    return "".join(texts)


class Message(BaseModel):
    """One turn of a conversation; `developer` is OpenAI's newer word for `system`, and `reasoning`
    vLLM's for `reasoning_content`."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | None, BeforeValidator(_content), WithJsonSchema(_CONTENT)] = None
    name: str | None = None
    tool_calls: ToolCalls | None = None
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    @property
    def of_tools(self) -> bool:
        """Whether it calls tools or is what one returned."""
        return bool(self.tool_calls) or self.role == "tool"

    def rendered(self) -> dict[str, Any]:
        """What a chat template sees."""
        role = "system" if self.role == "developer" else self.role
        turn: dict[str, Any] = {"role": role, "content": self.content or ""}
        if self.name is not None:
            turn["name"] = self.name
        if self.tool_calls:
            turn["tool_calls"] = [call.rendered() for call in self.tool_calls]
        if self.tool_call_id is not None:
            turn["tool_call_id"] = self.tool_call_id
        if thought := self.reasoning_content or self.reasoning:
            turn["reasoning_content"] = thought
        return turn

    def check(self, where: str) -> None:
        """Raise `InvalidRequest` for fields that its role does not have, or lacks; `where` is its
        path and a dot."""
        check_extra(self.model_extra or {}, MESSAGE_REFUSED, where)
        missing = None
        if self.content is None and not self.tool_calls:
            missing = f"{where}content"
        elif self.role == "tool" and self.tool_call_id is None:
            missing = f"{where}tool_call_id"
        if missing is not None:
            raise InvalidRequest(f"missing required parameter: '{missing}'", param=missing)
        belongs = (
            ("tool_calls", self.tool_calls, "assistant"),
            ("reasoning_content", self.reasoning_content or self.reasoning, "assistant"),
            ("tool_call_id", self.tool_call_id, "tool"),
        )
        for name, value, role in belongs:
            if value and self.role != role:
                path = f"{where}{name}"
                raise InvalidRequest(f"'{path}': only messages of '{role}' have it", param=path)


Messages = Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
