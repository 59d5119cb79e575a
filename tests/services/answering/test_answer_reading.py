"""Answers become reasoning, content and tool calls, however their text is cut."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tandem.core.sequence import FinishReason
from tandem.services.answering.answer_parts import NO_TOOLS, AnswerReader, Calling
from tandem.services.answering.choice import Delta
from tandem.services.answering.formats import (
    HERMES,
    LISTED,
    LLAMA,
    MISTRAL,
    TAGGED,
    AnswerFormat,
    format_of,
)

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}
TOOLS = tuple(
    {"type": "function", "function": {"name": name, "description": "", "parameters": PARAMETERS}}
    for name in ("f", "g")
)
QWEN, THINKS = AnswerFormat(HERMES, native=True), AnswerFormat(HERMES, reasons=True, native=True)
BOTH = Calling(TOOLS)
SHIPPED = AnswerFormat(
    shipped={
        "start_anchor": "<|assistant|>",
        "fields": {
            "thinking": {"open": "<think>", "close": "</think>"},
            "tool_calls": {
                "open_pattern": r"<call:(?P<name>\w+)>",
                "close": "</call>",
                "content": "json",
                "repeats": True,
                "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
            },
            "content": {},
        },
    }
)
ENDLESS = AnswerFormat(
    shipped={
        "start_anchor": "<|assistant|>",
        "fields": {
            "tool_calls": {"open_pattern": r"<\|python_tag\|>", "content": "json"},
            "content": {},
        },
    }
)
"""Calls go on to the end of the answer, as Llama 3's do."""
ENDS = AnswerFormat(
    shipped={
        "start_anchor": "<|assistant|>",
        "fields": {"tool_calls": {"open": "<call>"}, "content": {"close": "<|end|>"}},
    }
)
Said = list[tuple[str, ...]]


def pieces_of(
    form: AnswerFormat,
    text: str,
    seed: int | None,
    calling: Calling = BOTH,
    prefix: str = "",
    finish: FinishReason = FinishReason.STOP,
    stop: str | int | None = None,
) -> list[Delta]:
    """All deltas of an answer that comes whole (no `seed`) or in random pieces."""
    ids = (f"id-{number}" for number in range(100))
    reader = AnswerReader(form, calling, prefix, lambda: next(ids))
    cuts, rest = [], text
    while rest:
        length = len(rest) if seed is None else random.Random(f"{seed}{rest}").randint(1, 5)
        cuts.append(rest[:length])
        rest = rest[length:]
    made = [delta for cut in cuts for delta in reader.read(Delta(0, cut))]
    return [*made, *reader.read(Delta(0, "", finish_reason=finish, stop_reason=stop))]


def joined(deltas: list[Delta]) -> Said:
    said: Said = []
    for delta in deltas:
        if delta.call is not None and delta.call.name:
            assert delta.call.id and not delta.call.arguments
            said.append(("call", delta.call.id, delta.call.name, ""))
        elif delta.call is not None:
            kind, call_id, name, arguments = said.pop()
            said.append((kind, call_id, name, arguments + delta.call.arguments))
        for kind, text in (("text", delta.text), ("thought", delta.reasoning)):
            if text and said and said[-1][0] == kind:
                said.append((kind, said.pop()[1] + text))
            elif text:
                said.append((kind, text))
    return said


def said_by(form: AnswerFormat, text: str, **how: Any) -> tuple[Said, bool]:
    """The parts of an answer, which are the same however it is cut, and whether it called."""
    whole = pieces_of(form, text, None, **how)
    for seed in range(25):
        assert joined(pieces_of(form, text, seed, **how)) == joined(whole)
    return joined(whole), whole[-1].called


def f(arguments: str, number: int = 0, name: str = "f") -> tuple[str, ...]:
    return ("call", f"id-{number}", name, arguments)


@pytest.mark.parametrize(
    ("form", "text", "parts"),
    [
        (QWEN, 'Ok.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
         [("text", "Ok."), f('{"a": 1}')]),
        (QWEN, '<tool_call>{"name": "f", "arguments": {"b": "}\\"{</x>"}}</tool_call>\n'
         '<tool_call>{"arguments": {"a": 2}, "name": "g"}</tool_call>',
         [f('{"b": "}\\"{</x>"}'), f('{"a": 2}', 1, "g")]),
        (QWEN, '<tool_call>{"type": "function", "name": "f", "parameters": {}}</tool_call>',
         [f("{}")]),
        (QWEN, '<tool_call>{"function": {"name": "f", "arguments": {"a": 1}}}</tool_call>',
         [f('{"a": 1}')]),
        (QWEN, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
         [f('{"a": 1}')]),
        (QWEN, '<tool_call>{"name": "f"}</tool_call>', [f("{}")]),
        (THINKS, "<think>\nHm.\n</think>\n\nYes.", [("thought", "Hm."), ("text", "Yes.")]),
        (THINKS, '<think>Use <tool_call>?</think><tool_call>{"name": "f"}</tool_call>',
         [("thought", "Use <tool_call>?"), f("{}")]),
        (AnswerFormat(LISTED), '<tool_call>[{"name": "f", "arguments": {"a": 1}},\n'
         '{"name": "g", "arguments": {}}]</tool_call>', [f('{"a": 1}'), f("{}", 1, "g")]),
        (AnswerFormat(LISTED), "<tool_call>[]</tool_call>", []),
        (AnswerFormat(MISTRAL), '[TOOL_CALLS] [{"name": "f", "arguments": {"a": [1, {}]}}]',
         [f('{"a": [1, {}]}')]),
        (AnswerFormat(MISTRAL), 'So[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]x[ARGS]{}',
         [("text", "So"), f('{"a": 1}'), f("{}", 1, "g")]),
        (AnswerFormat(LLAMA), '{"name": "f", "parameters": {"a": 1}}; {"name": "g", '
         '"parameters": {}}', [f('{"a": 1}'), f("{}", 1, "g")]),
        (AnswerFormat(LLAMA), '<|python_tag|>{"name": "f", "parameters": {}}', [f("{}")]),
        (AnswerFormat(TAGGED), "I do.\n<tool_call>\n<function=f>\n<parameter=a>\n12\n</parameter>"
         "\n<parameter=b>\nx\n y\n</parameter>\n</function>\n</tool_call>",
         [("text", "I do."), f('{"a": 12, "b": "x\\n y"}')]),
        (SHIPPED, '<think>Hm</think><call:f>{"a": 1}</call>', [("thought", "Hm"), f('{"a": 1}')]),
    ],
)  # fmt: skip
def test_calls_and_reasoning_are_found(form: AnswerFormat, text: str, parts: Said) -> None:
    called = any(kind == "call" for kind, *_ in parts)
    assert said_by(form, text) == (parts, called)


@pytest.mark.parametrize(
    ("form", "prefix", "text", "parts"),
    [
        (THINKS, "<|im_start|>assistant\n", "Hello there", [("text", "Hello there")]),
        (THINKS, "assistant\n", "\nHello", [("text", "\nHello")]),
        (THINKS, "assistant\n", "\n<think>\nHm.</think>Yes.",
         [("thought", "Hm."), ("text", "Yes.")]),
        (THINKS, "<think>Well, ", "yes.</think>Yes.", [("thought", "yes."), ("text", "Yes.")]),
        (THINKS, "<think>Well, ", "</think>Yes.", [("text", "Yes.")]),
        (THINKS, "a <th", "at", [("text", "at")]),
        (THINKS, "a <th", "ink>at", [("thought", "at")]),
        (AnswerFormat(LISTED), "Sure: ", "Hello there", [("text", "Hello there")]),
        (AnswerFormat(LISTED), "Sure:\n", '<tool_call>[{"name": "f"}]</tool_call>', [f("{}")]),
        (AnswerFormat(LISTED), "Sure:\n", "<tool_call>no</tool_call>",
         [("text", "<tool_call>no</tool_call>")]),
        (SHIPPED, "<|assistant|>", " a", [("text", " a")]),
        (SHIPPED, "<|assistant|>a <", "b", [("text", "b")]),
        (ENDS, "<|assistant|><|end|>", "Hello world", [("text", "Hello world")]),
    ],
)  # fmt: skip
def test_text_of_the_prompt_is_not_in_the_answer(
    form: AnswerFormat, prefix: str, text: str, parts: Said
) -> None:
    """Also where it could have gone on as a marker."""
    assert said_by(form, text, prefix=prefix)[0] == parts


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (QWEN, '<tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call>'),
        (QWEN, "<tool_call>\nno JSON\n</tool_call>"),
        (QWEN, '<tool_call>\n{"name": "f", "argum\n</tool_call>'),
        (QWEN, "2 < 3, and <tool_cal is no call"),
        (QWEN, "Write\n\n <tool_call> foo </tool_call> around it."),
        (QWEN, "Write <tool_call> </tool_call>, or <tool_call></tool_call>."),
        (QWEN, "Write <tool_call>"),
        (AnswerFormat(TAGGED), "Write <tool_call> foo </tool_call> around it."),
        (AnswerFormat(LISTED), '<tool_call>[{"name": "unknown", "arguments": {}}]</tool_call>'),
        (AnswerFormat(LLAMA), '{"name": "Bob", "parameters": {}}'),
        (AnswerFormat(LLAMA), 'See {"name": "f", "parameters": {}}'),
        (AnswerFormat(MISTRAL), "[TOOL_CALLS]never{}"),
        (AnswerFormat(MISTRAL), "Write [TOOL_CALLS] never {} [TOOL_CALLS] "),
        (AnswerFormat(LLAMA), '<|python_tag|> {"name": "Bob", "parameters": {}}'),
        (AnswerFormat(TAGGED), "<tool_call>\n<function=q>\n</function>\n</tool_call>"),
        (SHIPPED, "<call:f>{no JSON"),
    ],
)
def test_what_is_no_call_is_text(form: AnswerFormat, text: str) -> None:
    said, called = said_by(form, text)
    assert not called
    [(kind, told)] = said
    swallowed = "<call:f>" if form is SHIPPED else ""  # transformers does not tell what it was
    assert (kind, swallowed + told) == ("text", text)


def test_a_prompt_may_begin_the_reasoning() -> None:
    prefix = "<|im_start|>assistant\n<think>\n"
    said, _ = said_by(THINKS, "Hm.\n</think>\n\nYes.", prefix=prefix, calling=NO_TOOLS)
    assert said == [("thought", "Hm."), ("text", "Yes.")]
    history = "<|assistant|><call:f>{}</call> x <|assistant|><think>"
    assert said_by(SHIPPED, "Hm.</think>Yes.", prefix=history)[0] == said


@pytest.mark.parametrize("rest", ["", " So"])
def test_after_a_broken_call_in_the_prompt_all_is_text(rest: str) -> None:
    """An assistant's turn that the client began may hold one."""
    text, prefix = 'Hm.</think><call:f>{"a": 1}</call>', "<|assistant|><call:f>{no JSON}</call>"
    assert said_by(SHIPPED, text, prefix=prefix + rest) == ([("text", text)], False)


def test_a_call_that_is_cut_counts_but_does_not_end_the_answer() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": 1'
    assert said_by(QWEN, text, finish=FinishReason.LENGTH) == ([f('{"a": 1')], False)


HALF_TAGGED = "<tool_call>\n<function=f>\n<parameter=a>\n12\n</parameter>\n<parameter=b>\nhal"


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (QWEN, '<tool_call>\n{"name": "f", "argum'),
        (AnswerFormat(LISTED), '<tool_call>[{"na'),
        (AnswerFormat(MISTRAL), "[TOOL_CALLS]f[AR"),
        (AnswerFormat(TAGGED), HALF_TAGGED),
        (SHIPPED, '<call:f>{"a": 1'),
        (ENDLESS, '<|python_tag|>{"name": "f", "parameters": {"a": 1}'),
    ],
)
def test_half_a_call_is_text_as_the_model_wrote_it(form: AnswerFormat, text: str) -> None:
    """No marker follows that the model did not write, and nothing half is told as a call."""
    said, called = said_by(form, text, finish=FinishReason.LENGTH)
    assert not called
    swallowed = {id(SHIPPED): "<call:f>", id(ENDLESS): "<|python_tag|>"}.get(id(form), "")
    assert said == [("text", text.removeprefix(swallowed))]


@pytest.mark.parametrize(
    ("form", "text", "arguments"),
    [
        (QWEN, '<tool_call>{"name": "f", "arguments": {"a": 1}}\n</tool_call>', '{"a": 1}'),
        (QWEN, '<tool_call>{"name": "f", "arguments": {"a": 1}}', '{"a": 1}'),
        (AnswerFormat(TAGGED), f"{HALF_TAGGED}f\n</parameter>\n</function>\n</tool_call>",
         '{"a": 12, "b": "half"}'),
        (SHIPPED, '<call:f>{"a": 1}</call>', '{"a": 1}'),
        (ENDLESS, '<|python_tag|>{"name": "f", "parameters": {"a": 1}}', '{"a": 1}'),
        (AnswerFormat(LLAMA), '{"name": "f", "parameters": {"a": 1}}', '{"a": 1}'),
    ],
)  # fmt: skip
def test_a_call_that_ends_where_the_answer_is_cut_is_whole(
    form: AnswerFormat, text: str, arguments: str
) -> None:
    assert said_by(form, text, finish=FinishReason.LENGTH) == ([f(arguments)], False)


WHOLE_TAGGED = f"{HALF_TAGGED}f\n</parameter>\n</function>\n</tool_call>\n"


@pytest.mark.parametrize(
    ("form", "text", "parts"),
    [
        (QWEN, '<tool_call>{"name": "f", "arguments": {"a": 1', [f('{"a": 1')]),
        (QWEN, '<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "g", "arguments": {"a',
         [f("{}"), f('{"a', 1, "g")]),
        (AnswerFormat(LLAMA), '{"name": "f", "parameters": {"a": 1', [f('{"a": 1')]),
        (AnswerFormat(MISTRAL), "[TOOL_CALLS]f[AR", [("text", "[TOOL_CALLS]f[AR")]),
        (AnswerFormat(MISTRAL), "[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]g[AR",
         [f("{}"), ("text", "[TOOL_CALLS]g[AR")]),
        (AnswerFormat(TAGGED), HALF_TAGGED, [("text", HALF_TAGGED)]),
        (AnswerFormat(TAGGED), WHOLE_TAGGED + HALF_TAGGED,
         [f('{"a": 12, "b": "half"}'), ("text", HALF_TAGGED)]),
        (SHIPPED, '<call:f>{"a": 1', [("text", '{"a": 1')]),
        (SHIPPED, '<call:f>{}</call><call:g>{"a', [f("{}"), ("text", '{"a')]),
        (ENDLESS, '<|python_tag|>{"name": "f", "parameters": {"a": 1}',
         [("text", '{"name": "f", "parameters": {"a": 1}')]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stop", ["STOP", 7])
def test_a_call_that_a_stop_of_the_client_cuts_does_not_end_the_answer(
    form: AnswerFormat, text: str, parts: Said, stop: str | int
) -> None:
    assert said_by(form, text, stop=stop) == (parts, False)
    assert said_by(form, text, finish=FinishReason.LENGTH) == (parts, False)


@pytest.mark.parametrize(
    ("form", "text", "arguments"),
    [
        (QWEN, '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', '{"a": 1}'),
        (QWEN, '<tool_call>{"name": "f", "arguments": {"a": 1}}\n', '{"a": 1}'),
        (AnswerFormat(TAGGED), WHOLE_TAGGED, '{"a": 12, "b": "half"}'),
        (AnswerFormat(LLAMA), '{"name": "f", "parameters": {"a": 1}}', '{"a": 1}'),
        (AnswerFormat(MISTRAL), '[TOOL_CALLS]f[ARGS]{"a": 1}', '{"a": 1}'),
        (SHIPPED, '<call:f>{"a": 1}</call>', '{"a": 1}'),
        (ENDLESS, '<|python_tag|>{"name": "f", "parameters": {"a": 1}}', '{"a": 1}'),
    ],
)
def test_a_stop_of_the_client_may_follow_a_whole_call(
    form: AnswerFormat, text: str, arguments: str
) -> None:
    assert said_by(form, text, stop="STOP") == ([f(arguments)], True)


def test_arguments_come_in_pieces_and_a_call_is_known_by_its_name() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"b": "a long text for a tool"}}</tool_call>'
    ids = iter("abc")
    reader = AnswerReader(QWEN, Calling(TOOLS), "", lambda: next(ids))
    calls = [delta.call for letter in text for delta in reader.read(Delta(0, letter)) if delta.call]
    assert (calls[0].id, calls[0].name, calls[0].arguments) == ("a", "f", "")
    assert len(calls) > 20 and all(not call.id and not call.name for call in calls[1:])


def test_without_parallel_calls_only_the_first_counts() -> None:
    text = '<tool_call>{"name": "f"}</tool_call>\n<tool_call>{"name": "g"}</tool_call>'
    assert said_by(QWEN, text, calling=Calling(TOOLS, parallel=False)) == ([f("{}")], True)


def test_without_tools_calls_are_text() -> None:
    text = '<tool_call>{"name": "f"}</tool_call>'
    assert said_by(THINKS, text, calling=NO_TOOLS) == ([("text", text)], False)
    assert QWEN.template(tools=False) is None


def test_log_probabilities_and_the_end_are_told_once() -> None:
    reader = AnswerReader(THINKS, NO_TOOLS, "", str)
    last = Delta(0, "<think>a</think>b", (), FinishReason.STOP, (1, 2), "stop")
    made = reader.read(last)
    assert [(delta.reasoning, delta.text) for delta in made] == [("a", ""), ("", "b")]
    assert [delta.token_ids for delta in made] == [(1, 2), ()]
    assert [delta.finish_reason for delta in made] == [None, FinishReason.STOP]
    assert made[-1].stop_reason == "stop"


@pytest.mark.parametrize(
    ("source", "vocabulary", "calls", "reasons"),
    [
        ("{% if tools %}<tool_call>{% endif %}<think>", {}, HERMES, True),
        ("{% if tools %}<tool_call><function=x>{% endif %}", {}, TAGGED, False),
        ("{% if tools %}[AVAILABLE_TOOLS]{% endif %}", {"[TOOL_CALLS]": 5}, MISTRAL, False),
        ("{% if tools is not none %}json{% endif %}", {"<|python_tag|>": 5}, LLAMA, False),
        ("{% if tools %}something else{% endif %}", {}, None, False),
        ("{{ messages }}", {"<think>": 7}, LISTED, True),
    ],
)
def test_the_format_is_found_by_template_and_vocabulary(
    source: str, vocabulary: dict[str, int], calls: Any, reasons: bool
) -> None:
    form = format_of(source, vocabulary, None)
    assert (form.calls, form.reasons) == (calls, reasons)
    assert form.native is ("tools" in source) and form.takes_tools is (calls is not None)
    assert format_of(source, vocabulary, SHIPPED.shipped).shipped == SHIPPED.shipped
    with pytest.raises(ValueError, match="fields"):
        format_of(source, vocabulary, {"start_anchor": "x"})


def test_all_that_the_reading_looks_for_is_shown() -> None:
    """Also what a tokenizer takes for a special token."""
    source = "{% if tools %}[TOOL_CALLS]{% endif %}"
    markers = format_of(source, {"[ARGS]": 5}, None).markers
    for marker in ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"):
        assert marker in markers


CALL = {"id": "call_0123456789", "type": "function",
        "function": {"name": "f", "arguments": {"a": 1}}}  # fmt: skip
HISTORY = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "2", "tool_call_id": "call_0123456789"},
    {"role": "tool", "content": "3", "tool_call_id": "call_1"},
    {"role": "user", "content": "Go on"},
]


def test_a_template_without_tools_gets_them_as_text() -> None:
    turns = AnswerFormat(LISTED).turns(HISTORY, TOOLS)
    assert [turn["role"] for turn in turns] == ["system", "user", "assistant", "user"]
    assert turns[0]["content"].startswith("Be brief.\n\n") and '"name": "g"' in turns[0]["content"]
    assert turns[2]["content"] == '<tool_call>[{"name": "f", "arguments": {"a": 1}}]</tool_call>'
    assert turns[3]["content"] == (
        "<tool_response>\n2\n</tool_response>\n<tool_response>\n3\n</tool_response>\nGo on"
    )
    assert all(turn.keys() == {"role", "content"} for turn in turns)
    alone = AnswerFormat(LISTED).turns(HISTORY[1:2], TOOLS)
    assert [turn["role"] for turn in alone] == ["system", "user"]
    assert AnswerFormat(LISTED).turns(HISTORY[:2], ()) == HISTORY[:2]
    assert HISTORY[0]["content"] == "Be brief."  # nothing of the caller's is changed


def test_a_template_with_tools_gets_what_was_sent_and_mistral_short_ids() -> None:
    assert QWEN.turns(HISTORY, TOOLS) == HISTORY
    turns = AnswerFormat(MISTRAL, native=True, short_ids=True).turns(HISTORY, TOOLS)
    assert turns[2]["tool_calls"][0]["id"] == turns[3]["tool_call_id"] == "123456789"
    assert turns[4]["tool_call_id"] == "0000call1"
