"""How a model writes tool calls and reasoning, found in its chat template and vocabulary.

A tokenizer that ships a response template of transformers' is read by that template. For other
models there are templates of ours, one a way of writing. A chat template that knows no tools gets
them in the system message, as SmolLM2's model card documents it. Knows no request. Invariant: a
model whose way of writing tools is not known has no `calls`; it is not guessed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.response_templates import load_response_template

Template = dict[str, Any]
Turn = dict[str, Any]

CALLS, REASONING, CONTENT = "tool_calls", "reasoning_content", "content"
REASONING_FIELDS = frozenset((REASONING, "reasoning", "thinking"))
"""What templates call reasoning."""
OPEN, CLOSE = "open", "close"
"""What our templates tell of a stretch of calls: the texts around it."""
_NOWHERE = "\0"  # the prefix that a parser of ours gets holds nothing before the answer
_MISTRAL_ID_CHARS = 9

# The prompt with which SmolLM2's model card (HuggingFaceTB/SmolLM2-1.7B-Instruct) offers tools.
_OFFER = """\
You are an expert in composing functions. You are given a question and a set of possible functions.
Based on the question, you will need to make one or more function/tool calls to achieve the purpose.
If none of the functions can be used, point it out and refuse to answer.
If the given question lacks the parameters required by the function, also point it out.

You have access to the following tools:
<tools>{tools}</tools>

The output MUST strictly adhere to the following format, and NO other text MUST be included.
The example format is as follows. Please make sure the parameter type is correct. If no function \
call is needed, please make the tool calls an empty list '[]'.
<tool_call>[
{{"name": "func_name1", "arguments": {{"argument1": "value1", "argument2": "value2"}}}},
... (more tool calls as required)
]</tool_call>"""


@dataclass(frozen=True, slots=True)
class Spelling:
    """How calls are written, piece by piece, for an answer that must be calls: `before` all of
    them, each `call` with `NAME` and `ARGUMENTS` in it, `joint` between two, `after` all."""

    call: tuple[str, ...]
    before: tuple[str, ...] = ()
    joint: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Calls:
    """One way of writing tool calls.

    `opens` and `closes` are patterns around them (`closes` None: they go on to the end). Inside is
    JSON, or what `inner`, a template of transformers', reads. Without a `spelling`, calls cannot be
    forced.
    """

    opens: str
    closes: str | None
    inner: Template | None = None
    spelling: Spelling | None = None


NAME, ARGUMENTS = "{name}", "{arguments}"
_OBJECT = ('{"name": "', NAME, '", "arguments": ', ARGUMENTS, "}")
HERMES = Calls(
    r"\s{0,32}<tool_call>\s*",
    r"\s{0,32}</tool_call>\s*",
    spelling=Spelling(("<tool_call>", "\n", *_OBJECT, "\n", "</tool_call>"), joint=("\n",)),
)
"""Qwen's and Hermes': one JSON object, or, as SmolLM2 writes it, a list of them."""
LISTED = Calls(
    HERMES.opens,
    HERMES.closes,
    spelling=Spelling(_OBJECT, ("<tool_call>", "["), (", ",), ("]", "</tool_call>")),
)
MISTRAL = Calls(
    r"\s{0,32}\[TOOL_CALLS\]\s*",
    r"\s{0,32}(?=\[TOOL_CALLS\])",
    spelling=Spelling(_OBJECT, ("[TOOL_CALLS]", " ["), (", ",), ("]",)),
)
"""A list of JSON objects after the marker."""
MISTRAL_NAMED = replace(MISTRAL, spelling=Spelling(("[TOOL_CALLS]", NAME, "[ARGS]", ARGUMENTS)))
"""Newer: a name and its arguments, each call after a marker of its own. Both are read alike."""
LLAMA = Calls(
    r'(?:\A\s*|<\|python_tag\|>\s*)(?=\{\s*"(?:name|type|function|parameters)"\s*:)',
    None,
    spelling=Spelling(('{"name": "', NAME, '", "parameters": ', ARGUMENTS, "}"), joint=("; ",)),
)
"""Llama 3's: the whole answer is JSON objects, with or without a marker before them."""
TAGGED = Calls(
    HERMES.opens,
    HERMES.closes,
    inner={
        "start_anchor": _NOWHERE,
        "fields": {
            CALLS: {
                "open_pattern": r"\s{0,32}<function=(?P<name>[^>\n]+)>\s*",
                "close_pattern": r"\s{0,32}</function>\s*",
                "repeats": True,
                "content": "xml-inline",
                "content_args": {
                    "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"
                },
                "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
            }
        },
    },
)
"""Qwen3-Coder's: a tag a parameter."""


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How the answers of one model are read.

    `shipped` is the tokenizer's own template, which then reads everything. `native` tells whether
    the chat template writes tools itself. `markers` holds all texts that the reading looks for, so
    that special tokens among them are shown to it.
    """

    calls: Calls | None = None
    reasons: bool = False
    native: bool = False
    shipped: Template | None = None
    short_ids: bool = False
    markers: str = field(default="", repr=False)

    @property
    def takes_tools(self) -> bool:
        """Whether answers may call tools at all."""
        return self.calls is not None or self.shipped is not None

    def template(self, *, tools: bool) -> Template | None:
        """The response template for an answer with or without `tools`; None: it is plain text."""
        if self.shipped is not None:
            fields = dict(self.shipped["fields"])
            if not tools:
                fields.pop(CALLS, None)
            return {**self.shipped, "fields": fields} if fields.keys() != {CONTENT} else None
        calls = self.calls if tools else None
        if calls is None and not self.reasons:
            return None
        # Text inside is passed on as it comes, so nothing of it can be wrong for transformers.
        fields = {CONTENT: {"content": "text"}}
        if calls is not None:
            fields[CALLS] = {
                "open_pattern": f"(?P<{OPEN}>{calls.opens})(?P<{CLOSE}>)",
                "repeats": True,
                "transform": {OPEN: f"{{{OPEN}}}", CLOSE: f"{{{CLOSE}}}"},
            }
            if calls.closes is not None:  # else it is empty, as it is where the answer ends before
                fields[CALLS]["close_pattern"] = f"(?P<{CLOSE}>{calls.closes})"
        if self.reasons:
            fields[REASONING] = {
                "open_pattern": r"\s{0,32}<think>\s*",
                "close_pattern": r"\s{0,32}</think>\s*",
                "repeats": True,
                "join": "",
            }
        return {"start_anchor": _NOWHERE, "fields": fields}

    def thought_ends(self, prefix: str) -> tuple[str, ...]:
        """How an answer after `prefix` ends the reasoning that this has begun, piece by piece;
        empty if it has begun none. Raises `ValueError` if the template does not say how."""
        if self.shipped is None:
            begun = self.reasons and prefix.rfind("<think>") > prefix.rfind("</think>")
            return ("\n", "</think>", "\n\n") if begun else ()
        parser, inside = ResponseParser(self.shipped, prefix=prefix), ""
        # The parser waits for more text where a marker might go on.
        for event in (*parser.initial_events, *parser.feed(_NOWHERE)):
            inside = event["field"] if event["type"] != "region_close" else ""
        if inside not in REASONING_FIELDS:
            return ()
        close = self.shipped["fields"][inside].get("close")
        if close is None:
            raise ValueError(f"'{inside}' has no 'close' that is a text")
        return (close if isinstance(close, str) else close[0],)

    def turns(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Template]) -> list[Turn]:
        """`messages` as this model's chat template takes them."""
        turns = [dict(message) for message in messages]
        if self.short_ids:
            return [_with_short_ids(turn) for turn in turns]
        return turns if self.native else _written_out(turns, tools)


def format_of(source: str, vocabulary: Mapping[str, int], shipped: Template | None) -> AnswerFormat:
    """The format of a model by its chat template's `source`, its `vocabulary`, and the response
    template that its tokenizer ships. Raises `ValueError` if that is none."""
    native = re.search(r"\btools\b", source) is not None
    if shipped is not None:
        load_response_template(shipped)
        described = json.dumps(shipped, ensure_ascii=False).replace("\\", "")
        return AnswerFormat(native=native, shipped=shipped, markers=described)
    reasons = "<think>" in source or "<think>" in vocabulary
    calls = _calls_of(source, vocabulary) if native else LISTED
    markers = "<think></think>" if reasons else ""
    if calls is not None:
        markers += calls.opens + (calls.closes or "")
        markers += "".join(calls.spelling.call) if calls.spelling is not None else ""
        markers += "[CALL_ID]" if calls is MISTRAL_NAMED else ""
    return AnswerFormat(
        calls,
        reasons,
        native,
        short_ids=calls in (MISTRAL, MISTRAL_NAMED),
        markers=markers.replace("\\", ""),
    )


def _calls_of(source: str, vocabulary: Mapping[str, int]) -> Calls | None:
    if "<function=" in source:
        return TAGGED
    if "<tool_call>" in source:
        return HERMES
    if "[TOOL_CALLS]" in source or "[TOOL_CALLS]" in vocabulary:
        return MISTRAL_NAMED if "[ARGS]" in vocabulary else MISTRAL
    if "<|python_tag|>" in source or "<|python_tag|>" in vocabulary:
        return LLAMA
    return None


def _with_short_ids(turn: Turn) -> Turn:
    """Mistral's chat templates take ids of nine letters and digits only: the end of ours."""
    if "tool_call_id" in turn:
        turn["tool_call_id"] = _short(turn["tool_call_id"])
    if "tool_calls" in turn:
        turn["tool_calls"] = [{**call, "id": _short(call["id"])} for call in turn["tool_calls"]]
    return turn


def _short(call_id: str) -> str:
    return re.sub(r"[^A-Za-z0-9]", "", call_id)[-_MISTRAL_ID_CHARS:].rjust(_MISTRAL_ID_CHARS, "0")


def _written_out(turns: list[Turn], tools: Sequence[Template]) -> list[Turn]:
    """Turns for a chat template that knows no tools: calls and results are text.

    Results come from the user. Turns of the user that follow one another then are one turn, because
    some templates insist on alternation.
    """
    made: list[Turn] = []
    from_tools = False
    for turn in turns:
        text, after_tool = turn["content"], from_tools
        from_tools = turn["role"] == "tool"
        if "tool_calls" in turn:
            text = "\n".join(filter(None, (text, _calls_text(turn["tool_calls"]))))
        elif from_tools:
            text = f"<tool_response>\n{text}\n</tool_response>"
        role = "user" if from_tools else turn["role"]
        if after_tool and role == "user":
            made[-1]["content"] += f"\n{text}"
            continue
        kept = ("tool_calls", "tool_call_id", REASONING)
        others = {name: value for name, value in turn.items() if name not in kept}
        made.append({**others, "role": role, "content": text})
    if tools:
        described = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
        offer = _OFFER.format(tools=described)
        if made and made[0]["role"] == "system":
            made[0]["content"] = f"{made[0]['content']}\n\n{offer}"
        else:
            made.insert(0, {"role": "system", "content": offer})
    return made


def _calls_text(calls: Sequence[Template]) -> str:
    said = [{name: call["function"][name] for name in ("name", "arguments")} for call in calls]
    return f"<tool_call>{json.dumps(said, ensure_ascii=False)}</tool_call>"
