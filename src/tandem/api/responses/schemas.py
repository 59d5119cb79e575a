"""What clients of OpenAI's Responses API may send, and what a chat makes of it.

Every request has the whole conversation: messages, calls of functions and what these returned, and
the words of earlier reasoning. Tools that OpenAI runs are left out; the functions of a namespace
are named with it for the model, and without it for the client. Knows no model. Invariant: items of
other types are refused, never dropped.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    WithJsonSchema,
    model_validator,
)

from tandem.api.fields import RESPONSES_REFUSED, RESPONSES_UNUSED
from tandem.api.schemas import MAX_INT, PERSON, Body, ChatRequest
from tandem.api.tools import (
    MAX_TOOLS,
    NAME,
    Function,
    Tool,
    ToolChoice,
    arguments_of,
)
from tandem.api.turns import MAX_MESSAGES
from tandem.core.errors import InvalidRequest
from tandem.core.sampling import Grammar
from tandem.services.answering.grammars import ANY_OBJECT, of_schema

Turn = dict[str, Any]
_TEXT_OR_LIST = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}


class _Part(BaseModel):
    """A part of an item; what it has beside these fields says nothing to a model."""

    model_config = ConfigDict(strict=True, extra="ignore")


class TextPart(_Part):
    """Text of a message or of what a function returned."""

    type: Literal["input_text", "output_text", "text"]
    text: str


def _parts(value: object) -> object:
    """Text is one part of it."""
    return [{"type": "input_text", "text": value}] if isinstance(value, str) else value


Parts = Annotated[
    list[TextPart],
    Field(fail_fast=True),
    BeforeValidator(_parts),
    WithJsonSchema(_TEXT_OR_LIST),
]


class MessageItem(_Part):
    """A turn."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Parts


class CallItem(_Part):
    """A call of a function."""

    type: Literal["function_call"]
    call_id: Annotated[str, Field(max_length=256)]
    namespace: str | None = None
    name: str
    arguments: str


class OutputItem(_Part):
    """What a function returned."""

    type: Literal["function_call_output"]
    call_id: Annotated[str, Field(max_length=256)]
    output: Parts


class ReasoningPart(_Part):
    """Words of reasoning."""

    type: Literal["reasoning_text", "text"]
    text: str


class ReasoningItem(_Part):
    """Reasoning of an earlier answer; a summary, and what only OpenAI can read, are left out."""

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningPart], Field(fail_fast=True)] | None = None

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(part.text for part in self.content or ())


def _type_of(value: Any) -> str:
    """A message needs no type."""
    kind = value.get("type", "message") if isinstance(value, dict) else "message"
    return str(kind)


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[OutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_type_of),
]


def _items(value: object) -> object:
    """Text is one message of the user."""
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class FunctionTool(_Part):
    """A function of the client's."""

    type: Literal["function"]
    name: Annotated[str, Field(pattern=NAME)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def tool(self, namespace: str | None = None) -> Tool:
        """As a chat has it."""
        function = Function(
            name=full_name(namespace, self.name),
            description=self.description,
            parameters=self.parameters,
            strict=self.strict,
        )
        return Tool(type="function", function=function)

    def told(self) -> dict[str, Any]:
        """As the answer repeats it."""
        return self.model_dump()


def full_name(namespace: str | None, name: str) -> str:
    """What the model calls a function of a namespace."""
    return name if namespace is None else f"{namespace}.{name}"


def _only(*kinds: str) -> BeforeValidator:
    """Tools of other types become None."""

    def check(value: object) -> object:
        if not isinstance(value, list):
            return value
        types = [item.get("type") if isinstance(item, dict) else None for item in value]
        return [
            None if isinstance(kind, str) and kind not in kinds else item
            for kind, item in zip(types, value, strict=True)
        ]

    return BeforeValidator(check)


_NAME_CHARS = 256  # of a function, with its namespace


class NamespaceTool(_Part):
    """Functions of the client's under a name that they share."""

    type: Literal["namespace"]
    name: Annotated[str, Field(pattern=NAME, max_length=128)]
    description: str | None = None
    tools: Annotated[
        list[FunctionTool | None],
        Field(fail_fast=True, max_length=MAX_TOOLS),
        _only("function"),
    ]

    @model_validator(mode="after")
    def _short(self) -> NamespaceTool:
        for inner in self.tools:
            if inner is not None and len(full_name(self.name, inner.name)) > _NAME_CHARS:
                raise ValueError(
                    f"'{inner.name[:64]}' has more than {_NAME_CHARS} characters with its namespace"
                )
        return self

    def told(self) -> dict[str, Any]:
        """As the answer repeats it."""
        functions = [inner.told() for inner in self.tools if inner is not None]
        return {**self.model_dump(), "tools": functions}


def _tool_type(value: Any) -> str:
    """What is no namespace must be a function."""
    kind = value.get("type") if isinstance(value, dict) else None
    return "namespace" if kind == "namespace" else "function"


AnyTool = Annotated[
    Annotated[FunctionTool, Tag("function")] | Annotated[NamespaceTool, Tag("namespace")],
    Discriminator(_tool_type),
]


def _few(tools: list[FunctionTool | NamespaceTool | None]) -> list[Any]:
    """The bound holds for all functions together."""
    if sum(len(each.tools) if isinstance(each, NamespaceTool) else 1 for each in tools) > MAX_TOOLS:
        raise ValueError(f"there are more than {MAX_TOOLS} functions in all namespaces together")
    return tools


def _choice(value: object) -> object:
    """A function's name lies a level deeper in a chat, and has its namespace in front."""
    if isinstance(value, dict) and value.get("type") == "function" and "name" in value:
        namespace, name = value.get("namespace"), value["name"]
        if isinstance(namespace, str) and isinstance(name, str):
            name = full_name(namespace, name)
        return {"type": "function", "function": {"name": name}}
    return value


class TextFormat(_Part):
    """What text must be; `name` and `description` are for people."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    json_schema: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextOptions(_Part):
    """How text is to be; `verbosity` has no effect."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponsesRequest(Body):
    """Body of /v1/responses."""

    refused = RESPONSES_REFUSED
    unused = RESPONSES_UNUSED
    model: str
    input: Annotated[
        list[Item],
        Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES),
        BeforeValidator(_items),
        WithJsonSchema(_TEXT_OR_LIST),
    ]
    instructions: str | None = None
    tools: (
        Annotated[
            list[AnyTool | None],
            Field(fail_fast=True, max_length=MAX_TOOLS),
            _only("function", "namespace"),
            AfterValidator(_few),
            WithJsonSchema({"type": "array", "items": {"type": "object"}}),
        ]
        | None
    ) = None
    tool_choice: Annotated[ToolChoice, BeforeValidator(_choice)] | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=MAX_INT)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    text: TextOptions | None = None
    stream: bool | None = None
    store: bool | None = None
    service_tier: Literal["auto", "default", "flex"] | None = None
    user: Annotated[str, Field(pattern=PERSON)] | None = None
    safety_identifier: Annotated[str, Field(pattern=PERSON)] | None = None
    metadata: dict[str, Any] | None = None

    @property
    def functions(self) -> list[tuple[str | None, FunctionTool]]:
        """The functions that count, each with its namespace."""
        made: list[tuple[str | None, FunctionTool]] = []
        for tool in self.tools or ():
            if isinstance(tool, NamespaceTool):
                made += [(tool.name, inner) for inner in tool.tools if inner is not None]
            elif tool is not None:
                made.append((None, tool))
        return made

    def turns(self) -> list[Turn]:
        """The conversation as a chat has it. Raises `InvalidRequest` if nobody says anything."""
        made: list[Turn] = []
        thoughts: list[str] = []
        if self.instructions:
            made.append({"role": "system", "content": self.instructions})
        for item in self.input:
            if isinstance(item, ReasoningItem):
                thoughts.append(item.text)
                continue
            if isinstance(item, MessageItem):
                _add_message(made, item)
            elif isinstance(item, CallItem):
                _add_call(made, item)
            else:
                text = _text(item.output)
                made.append({"role": "tool", "content": text, "tool_call_id": item.call_id})
            if any(thoughts) and made[-1]["role"] == "assistant":
                earlier = made[-1].get("reasoning_content", "")
                made[-1]["reasoning_content"] = earlier + "".join(thoughts)
            thoughts = []
        if not made:
            raise InvalidRequest("'input' has no message", param="input")
        return made

    def grammar(self) -> Grammar | None:
        """What text must match; None: anything. Raises `InvalidRequest`."""
        form = self.text.format if self.text is not None else None
        if form is None or form.type == "text":
            return None
        if form.type == "json_object":
            return of_schema(ANY_OBJECT, "text.format")
        return of_schema(form.json_schema, "text.format.schema", strict=bool(form.strict))

    def chat(self) -> ChatRequest:
        """The body without its conversation, as that of a chat."""
        return ChatRequest.model_construct(
            model=self.model,
            tools=[function.tool(namespace) for namespace, function in self.functions],
            tool_choice=self.tool_choice,
            parallel_tool_calls=self.parallel_tool_calls,
            max_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            stream=self.stream,
            store=False if self.store is False else None,
            service_tier=self.service_tier,
            user=self.user,
            safety_identifier=self.safety_identifier,
        )


def _add_message(made: list[Turn], item: MessageItem) -> None:
    """What comes from the developer before anybody has spoken is one turn: templates know one."""
    role = "system" if item.role == "developer" else item.role
    text = _text(item.content)
    if role == "system" and len(made) == 1 and made[0]["role"] == "system":
        made[0]["content"] += f"\n\n{text}"
    else:
        made.append({"role": role, "content": text})


def _add_call(made: list[Turn], item: CallItem) -> None:
    """Calls belong to the assistant's turn in which they were made."""
    if not made or made[-1]["role"] != "assistant":
        made.append({"role": "assistant", "content": ""})
    name = full_name(item.namespace, item.name)
    function = {"name": name, "arguments": arguments_of(item.arguments)}
    call = {"id": item.call_id, "type": "function", "function": function}
    made[-1].setdefault("tool_calls", []).append(call)


def _text(parts: list[TextPart]) -> str:
    return "".join(part.text for part in parts)
