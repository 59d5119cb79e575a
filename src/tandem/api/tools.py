"""Tools in OpenAI's form: what a chat offers, what may be called, and calls in its history.

Knows shapes only. Invariant: what a chat template sees of a call's arguments is decoded once, and a
string only if it is no JSON object.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import from_json

from tandem.core.errors import InvalidRequest
from tandem.services.answering.answer_parts import Calling

MAX_TOOLS = 512
MAX_CALLS = 512
NAME = r"^[a-zA-Z0-9_.:/-]{1,256}$"
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}
AUTO, NONE, REQUIRED = "auto", "none", "required"


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class Function(_Strict):
    """A function that may be called; `strict` says nothing here that a grammar does not."""

    name: Annotated[str, Field(pattern=NAME)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Strict):
    """One of `tools`."""

    type: Literal["function"]
    function: Function

    def rendered(self) -> dict[str, Any]:
        """What a chat template sees."""
        function = {
            "name": self.function.name,
            "description": self.function.description or "",
            "parameters": self.function.parameters or _NO_PARAMETERS,
        }
        return {"type": "function", "function": function}


class _Named(_Strict):
    name: str


class NamedChoice(_Strict):
    """`tool_choice` that names a function."""

    type: Literal["function"]
    function: _Named


Tools = Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)]
ToolChoice = Literal["auto", "none", "required"] | NamedChoice


class CalledFunction(_Strict):
    """Name and arguments of a call; `arguments` as JSON text, which may be empty or null."""

    name: str
    arguments: str | None = None


class ToolCall(_Strict):
    """A call in an assistant's message; `index` is what streams have and some clients send back."""

    id: Annotated[str, Field(max_length=256)]
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None

    def rendered(self) -> dict[str, Any]:
        """What a chat template sees."""
        function = {
            "name": self.function.name,
            "arguments": arguments_of(self.function.arguments),
        }
        return {"id": self.id, "type": "function", "function": function}


ToolCalls = Annotated[list[ToolCall], Field(fail_fast=True, max_length=MAX_CALLS)]


def arguments_of(text: str | None) -> Any:
    """The arguments of an earlier call: an object, or the text if it is none (a call may have been
    cut)."""
    if text is None or not text.strip():
        return {}
    try:
        arguments = from_json(text, allow_inf_nan=False)
    except ValueError:
        return text
    return arguments if isinstance(arguments, dict) else text


def calling_of(
    tools: Sequence[Tool] | None, choice: ToolChoice | None, parallel: bool | None
) -> Calling:
    """What an answer may call. Raises `InvalidRequest` for what contradicts itself."""
    if not tools:
        if choice not in (None, AUTO, NONE):
            raise InvalidRequest("'tool_choice' needs 'tools' to choose from", param="tool_choice")
        return Calling()
    names: set[str] = set()
    for place, name in enumerate(tool.function.name for tool in tools):
        if name in names:
            path = f"tools[{place}].function.name"
            raise InvalidRequest(f"'{path}': '{name}' is there twice", param=path)
        names.add(name)
    if isinstance(choice, NamedChoice) and choice.function.name not in names:
        raise InvalidRequest(
            f"'tool_choice' names '{choice.function.name[:64]}', which is not among 'tools'",
            param="tool_choice",
        )
    if choice == NONE:
        return Calling()
    offered = tuple(tool.rendered() for tool in tools)
    if isinstance(choice, NamedChoice):
        return Calling(offered, parallel=False, forced=(choice.function.name,))
    return Calling(offered, parallel is not False, tuple(names) if choice == REQUIRED else ())
