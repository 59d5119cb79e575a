"""Grammars of answers that must call tools: what they allow is read as calls, the rest is not."""

from __future__ import annotations

from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from serving import demo_tokenizer
from tandem.core.errors import InvalidRequest
from tandem.core.sampling import Grammar, GrammarKind
from tandem.core.sequence import FinishReason
from tandem.services.answering.answer_parts import AnswerReader, Calling
from tandem.services.answering.choice import Delta
from tandem.services.answering.forcing import grammar_of_answer, grammar_of_calls
from tandem.services.answering.formats import (
    HERMES,
    LISTED,
    LLAMA,
    MISTRAL,
    MISTRAL_NAMED,
    TAGGED,
    AnswerFormat,
)

BEGIN = "<|im_start|>"  # a special token that stands for Mistral's
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: tuple[dict[str, Any], ...] = tuple(
    {"type": "function", "function": {"name": name, "description": "", "parameters": parameters}}
    for name, parameters in (("weather", CITY), ("clock", {"properties": {}}))
)
ALL, ONE = Calling(TOOLS, forced=("weather", "clock")), Calling(TOOLS, False, ("clock",))
OPEN = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris'


def allows(grammar: str, text: str) -> tuple[bool, bool]:
    """Whether the text can begin an answer, and whether it can be all of it."""
    tokenizer = demo_tokenizer()
    described = LLTokenizer(tokenizer._backend.backend_tokenizer.to_str(), eos_token=[2])
    matcher = LLMatcher(described, LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = list(tokenizer.encode(text, add_special_tokens=False))
    return matcher.try_consume_tokens(tokens) == len(tokens), matcher.is_accepting()


def special(text: str) -> int | None:
    return demo_tokenizer().special_token(BEGIN) if text in ("[TOOL_CALLS]", "[ARGS]") else None


def grammar(form: AnswerFormat, calling: Calling = ALL, prefix: str = "") -> str:
    return grammar_of_calls(form, calling, prefix, special).text


@pytest.mark.parametrize(
    ("form", "text", "names"),
    [
        (AnswerFormat(HERMES), OPEN + '"}}\n</tool_call>', ["weather"]),
        (AnswerFormat(HERMES), OPEN + '"}}\n</tool_call>\n' + OPEN + '"}}\n</tool_call>',
         ["weather", "weather"]),
        (AnswerFormat(LISTED), '<tool_call>[{"name": "clock", "arguments": {}}, '
         '{"name": "weather", "arguments": {"city": "A"}}]</tool_call>', ["clock", "weather"]),
        (AnswerFormat(LLAMA), '{"name": "clock", "parameters": {}}; {"name": "clock", '
         '"parameters": {}}', ["clock", "clock"]),
        (AnswerFormat(MISTRAL), BEGIN + ' [{"name": "clock", "arguments": {}}]', ["clock"]),
        (AnswerFormat(MISTRAL_NAMED), BEGIN + "clock" + BEGIN + "{}", ["clock"]),
    ],
)  # fmt: skip
def test_calls_are_allowed_and_read(form: AnswerFormat, text: str, names: list[str]) -> None:
    assert allows(grammar(form), text) == (True, True)
    reader = AnswerReader(form, ALL, "", str)
    written = text.replace(BEGIN, "[TOOL_CALLS]", 1).replace(BEGIN, "[ARGS]")
    deltas = reader.read(Delta(0, written, finish_reason=FinishReason.STOP))
    assert [delta.call.name for delta in deltas if delta.call and delta.call.name] == names
    assert deltas[-1].called and not any(delta.text for delta in deltas)


@pytest.mark.parametrize(
    ("calling", "text"),
    [
        (ALL, "It is sunny."),
        (ALL, '<tool_call>\n{"name": "unknown"'),
        (ALL, OPEN + '"}}\n</tool_call>\nText'),
        (ALL, '<tool_call>\n{"name": "weather", "arguments": {"town"'),
        (ONE, '<tool_call>\n{"name": "weather"'),
        (ONE, '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>\n<tool_call>'),
    ],
)
def test_anything_else_is_not(calling: Calling, text: str) -> None:
    assert allows(grammar(AnswerFormat(HERMES), calling), text)[0] is False
    assert allows(grammar(AnswerFormat(HERMES)), OPEN) == (True, False)


def test_reasoning_that_the_prompt_has_begun_ends_first() -> None:
    form = AnswerFormat(HERMES, reasons=True)
    call = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
    begun = "<|im_start|>assistant\n<think>\n"
    assert allows(grammar(form, ONE, begun), f"\n</think>\n\n{call}") == (True, True)
    assert allows(grammar(form, ONE, f"{begun}\n</think>\n"), call) == (True, True)


def test_json_comes_after_reasoning_that_the_prompt_has_begun() -> None:
    """Else it would be read as reasoning."""
    form, begun = AnswerFormat(reasons=True), "<|im_start|>assistant\n<think>\n"
    asked = Grammar(GrammarKind.JSON, '{"type": "object"}', "response_format")
    made = grammar_of_answer(form, Calling(), begun, special, asked)
    assert made is not None and made.param == "response_format"
    assert allows(made.text, '\n</think>\n\n{"a": 1}') == (True, True)
    assert allows(made.text, '{"a": 1}')[0] is False
    assert grammar_of_answer(form, Calling(), "", special, asked) is asked
    other = Grammar(GrammarKind.REGEX, "a", "structured_outputs.regex")
    with pytest.raises(InvalidRequest, match="begins its reasoning"):
        grammar_of_answer(form, Calling(), begun, special, other)


SHIPPED: dict[str, Any] = {
    "start_anchor": "<|assistant|>",
    "fields": {
        "thinking": {"open_pattern": r"<think>\s*", "close": ["</think>", "</thought>"]},
        "content": {},
    },
}


def test_a_response_template_says_how_reasoning_ends() -> None:
    form, begun = AnswerFormat(shipped=SHIPPED), "<|assistant|>x<think>a</think><|assistant|>"
    asked = Grammar(GrammarKind.JSON, '{"type": "object"}', "response_format")
    assert grammar_of_answer(form, Calling(), begun, special, asked) is asked
    made = grammar_of_answer(form, Calling(), f"{begun}<think>", special, asked)
    assert made is not None
    assert allows(made.text, '</think>{"a": 1}') == (True, True)
    assert allows(made.text, '{"a": 1}')[0] is False
    reader = AnswerReader(form, Calling(), f"{begun}<think>\n", str)
    [delta] = reader.read(Delta(0, '</think>{"a": 1}', finish_reason=FinishReason.STOP))
    assert (delta.text, delta.reasoning) == ('{"a": 1}', "")
    thinking = {"open": "<think>", "close_pattern": "</think>"}
    unsaid = {**SHIPPED, "fields": {**SHIPPED["fields"], "thinking": thinking}}
    with pytest.raises(InvalidRequest, match="does not say how it ends") as refused:
        grammar_of_answer(
            AnswerFormat(shipped=unsaid), Calling(), f"{begun}<think>", special, asked
        )
    assert refused.value.param == "response_format"


def test_an_answer_may_be_calls_or_json() -> None:
    asked = Grammar(GrammarKind.JSON, '{"type": "object", "required": ["a"]}', "response_format")
    made = grammar_of_calls(AnswerFormat(LISTED), Calling(TOOLS), "", special, asked)
    assert made.param == "response_format"
    assert allows(made.text, '{"a": 1}') == (True, True)
    call = '<tool_call>[{"name": "clock", "arguments": {}}]</tool_call>'
    assert allows(made.text, call) == (True, True)
    assert allows(made.text, "Hello")[0] is False
    for form, kind in ((TAGGED, GrammarKind.JSON), (LISTED, GrammarKind.REGEX)):
        other = Grammar(kind, "{}", "structured_outputs")
        with pytest.raises(InvalidRequest) as refused:
            grammar_of_calls(AnswerFormat(form), Calling(TOOLS), "", special, other)
        assert refused.value.param == "structured_outputs"


def test_what_cannot_be_forced_is_refused_by_name() -> None:
    for form in (AnswerFormat(TAGGED), AnswerFormat(shipped={})):
        with pytest.raises(InvalidRequest) as refused:
            grammar(form)
        assert refused.value.param == "tool_choice"
    deep: dict[str, Any] = {}
    for _ in range(100):
        deep = {"properties": {"a": deep}}
    tool = {"type": "function", "function": {"name": "f", "parameters": deep}}
    with pytest.raises(InvalidRequest) as refused:
        grammar(AnswerFormat(HERMES), Calling((*TOOLS, tool), forced=("f",)))
    assert refused.value.param == "tools[2].function.parameters"


def test_arguments_have_no_properties_that_their_schema_does_not_speak_of() -> None:
    made = grammar(AnswerFormat(HERMES))
    assert allows(made, OPEN + '"}}\n</tool_call>') == (True, True)
    assert allows(made, OPEN + '", "country"')[0] is False
    any_city = {**CITY, "additionalProperties": True}
    tool = {"type": "function", "function": {"name": "weather", "parameters": any_city}}
    spoken = Calling((tool,), forced=("weather",))
    assert allows(grammar(AnswerFormat(HERMES), spoken), OPEN + '", "country"')[0] is True
