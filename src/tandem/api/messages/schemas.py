"""What clients of Anthropic's API may send, and what a chat makes of it.

Content is text, or blocks of text, thinking, tool use and tool results; fields of blocks that say
nothing to a model (`cache_control`, `signature`) are not looked at. Knows no model. Invariant:
blocks of other types and tools that Anthropic runs are refused, never dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from tandem.api.fields import MESSAGES_REFUSED, MESSAGES_UNUSED
from tandem.api.schemas import MAX_INT, STOPS, Body, ChatRequest, stop_list
from tandem.api.tools import MAX_TOOLS, NAME, Function, NamedChoice, Tool, ToolChoice
from tandem.api.turns import MAX_MESSAGES
from tandem.core.errors import InvalidRequest
from tandem.core.sampling import Grammar
from tandem.services.answering.grammars import of_schema

Turn = dict[str, Any]
# Claude Code's first block of a system prompt; it differs from request to request, so nothing after
# it would be found in the cache.
_BILLING = "x-anthropic-billing-header"
_TEXT_OR_BLOCKS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}


class _Block(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")


class TextBlock(_Block):
    """Text."""

    type: Literal["text"]
    text: str


class ThinkingBlock(_Block):
    """Earlier reasoning of the model."""

    type: Literal["thinking"]
    thinking: str


class RedactedBlock(_Block):
    """Reasoning that only Anthropic can read; it is left out."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(_Block):
    """A call of a tool."""

    type: Literal["tool_use"]
    id: Annotated[str, Field(max_length=256)]
    name: str
    input: dict[str, Any]


def _blocks(value: object) -> object:
    """Text is one block of it."""
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


Texts = Annotated[
    list[TextBlock],
    Field(fail_fast=True),
    BeforeValidator(_blocks),
    WithJsonSchema(_TEXT_OR_BLOCKS),
]


class ToolResultBlock(_Block):
    """What a tool returned."""

    type: Literal["tool_result"]
    tool_use_id: Annotated[str, Field(max_length=256)]
    content: Texts | None = None
    is_error: bool | None = None


Block = Annotated[
    TextBlock | ThinkingBlock | RedactedBlock | ToolUseBlock | ToolResultBlock,
    Field(discriminator="type"),
]
Blocks = Annotated[
    list[Block], Field(fail_fast=True), BeforeValidator(_blocks), WithJsonSchema(_TEXT_OR_BLOCKS)
]


class MessageParam(_Block):
    """One turn."""

    role: Literal["user", "assistant", "system"]
    content: Blocks

    def turns(self) -> list[Turn]:
        """As a chat has it: results of tools are turns of their own."""
        if self.role == "assistant":
            return [self._answer()]
        made: list[Turn] = []
        texts: list[str] = []
        for block in self.content:
            if isinstance(block, TextBlock):
                texts.append(block.text)
            elif isinstance(block, ToolResultBlock):
                if texts:
                    made.append({"role": self.role, "content": "\n".join(texts)})
                    texts = []
                text = _text(block.content or ())
                made.append({"role": "tool", "content": text, "tool_call_id": block.tool_use_id})
        if texts or not made:
            made.append({"role": self.role, "content": "\n".join(texts)})
        return made

    def _answer(self) -> Turn:
        turn: Turn = {"role": "assistant", "content": _text(self.content)}
        calls = [
            {
                "id": block.id,
                "type": "function",
                "function": {"name": block.name, "arguments": block.input},
            }
            for block in self.content
            if isinstance(block, ToolUseBlock)
        ]
        thoughts = [block.thinking for block in self.content if isinstance(block, ThinkingBlock)]
        if calls:
            turn["tool_calls"] = calls
        if any(thoughts):
            turn["reasoning_content"] = "\n".join(thoughts)
        return turn


class ToolParam(_Block):
    """A tool of the client's; types of Anthropic's own are refused."""

    type: Literal["custom"] | None = None
    name: Annotated[str, Field(pattern=NAME)]
    description: str | None = None
    input_schema: dict[str, Any]

    def tool(self) -> Tool:
        """In OpenAI's form."""
        function = Function(
            name=self.name, description=self.description, parameters=self.input_schema
        )
        return Tool(type="function", function=function)


class ToolChoiceParam(_Block):
    """Whether tools are called, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    def choice(self) -> ToolChoice:
        """In OpenAI's words. Raises `InvalidRequest`."""
        if self.type == "tool":
            if self.name is None:
                raise InvalidRequest(
                    "missing required parameter: 'tool_choice.name'", param="tool_choice.name"
                )
            named: dict[str, Any] = {"type": "function", "function": {"name": self.name}}
            return NamedChoice.model_validate(named)
        return "required" if self.type == "any" else self.type


class OutputFormat(_Block):
    """JSON that a schema allows."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())
    type: Literal["json_schema"]
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(_Block):
    """What text must be; `effort` has no effect: the model is as it is."""

    effort: str | None = None
    format: OutputFormat | None = None


class CountRequest(Body):
    """Body of /v1/messages/count_tokens."""

    refused = MESSAGES_REFUSED
    unused = MESSAGES_UNUSED
    model: str
    messages: Annotated[
        list[MessageParam], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)
    ]
    system: Texts | None = None
    tools: Annotated[list[ToolParam], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoiceParam | None = None
    output_config: OutputConfig | None = None

    def turns(self) -> list[Turn]:
        """The conversation as a chat has it."""
        made = [turn for message in self.messages for turn in message.turns()]
        system = [block for block in self.system or () if not block.text.startswith(_BILLING)]
        return [{"role": "system", "content": _text(system)}, *made] if system else made

    def chat(self) -> ChatRequest:
        """The body without its messages, as that of a chat. Raises `InvalidRequest`."""
        choice = self.tool_choice
        goes_on = self.messages[-1].role == "assistant"
        return ChatRequest.model_construct(
            model=self.model,
            tools=[tool.tool() for tool in self.tools or ()],
            tool_choice=None if choice is None else choice.choice(),
            parallel_tool_calls=not (choice is not None and choice.disable_parallel_tool_use),
            continue_final_message=goes_on,
        )


class MessagesRequest(CountRequest):
    """Body of /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1, le=MAX_INT)]
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_INT)] | None = None
    stop_sequences: (
        Annotated[list[str], BeforeValidator(stop_list), WithJsonSchema(STOPS)] | None
    ) = None
    stream: bool | None = None

    def grammar(self) -> Grammar | None:
        """What text must match; None: anything. Raises `InvalidRequest`."""
        form = self.output_config.format if self.output_config is not None else None
        if form is None:
            return None
        return of_schema(form.json_schema, "output_config.format.schema")

    def chat(self) -> ChatRequest:
        """With how it is sampled."""
        chat = super().chat()
        chat.max_tokens = self.max_tokens
        chat.temperature = self.temperature
        chat.top_p = self.top_p
        chat.top_k = self.top_k
        chat.stop = self.stop_sequences
        chat.stream = self.stream
        return chat


def _text(blocks: Iterable[BaseModel] | Sequence[TextBlock]) -> str:
    return "\n".join(block.text for block in blocks if isinstance(block, TextBlock))
