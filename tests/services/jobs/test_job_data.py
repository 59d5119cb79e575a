"""Training files."""

from __future__ import annotations

import json

import pytest

from tandem.core.errors import InvalidRequest
from tandem.core.learning import SampleKind
from tandem.services.jobs.data import BadLine, parse_examples


def lines(*examples: object) -> bytes:
    return "\n".join(json.dumps(example) for example in examples).encode()


USER = {"role": "user", "content": "Hello"}


def answer(text: str, **more: object) -> dict[str, object]:
    return {"role": "assistant", "content": text, **more}


def test_supervised_trains_every_weighted_assistant_turn() -> None:
    raw = lines(
        {"messages": [USER, answer("A")]},
        {"messages": [USER, answer("B", weight=0), USER, answer("C", weight=1), USER, answer("D")]},
    )
    samples = parse_examples(raw, SampleKind.SFT, "formal")
    assert [(s.sample_id, s.chosen, len(s.messages)) for s in samples] == [
        ("line-1", "A", 1),
        ("line-2-0", "C", 3),
        ("line-2-1", "D", 5),
    ]


def test_preferences_are_openais() -> None:
    example = {
        "input": {"messages": [USER]},
        "preferred_output": [answer("good")],
        "non_preferred_output": [answer("bad")],
    }
    [sample] = parse_examples(lines(example), SampleKind.DPO, "formal")
    assert (sample.chosen, sample.rejected, sample.messages) == ("good", "bad", (USER,))


# From OpenAI's guides to supervised fine-tuning and to direct preference optimisation.
OPENAI_SUPERVISED = """{
  "messages": [
    {"role": "system", "content": "Marv is a factual chatbot that is also sarcastic."},
    {"role": "user", "content": "What's the capital of France?"},
    {"role": "assistant", "content": "Paris", "weight": 0},
    {"role": "user", "content": "Can you be more sarcastic?"},
    {"role": "assistant", "content": "Paris, as if everyone doesn't know that.", "weight": 1}
  ]%s
}"""
OPENAI_PREFERENCE = """{
  "input": {
    "messages": [{"role": "user", "content": "Hello, can you tell me how cold San Francisco is?"}],
    "tools": %s,
    "parallel_tool_calls": true
  },
  "preferred_output": [
    {"role": "assistant", "content": "Today in San Francisco, it is not quite cold as expected."}
  ],
  "non_preferred_output": [
    {"role": "assistant", "content": "It is not particularly cold in San Francisco today."}
  ]
}"""
TOOLS = '[{"type": "function", "function": {"name": "get_weather", "parameters": {}}}]'


def one_line(text: str) -> bytes:
    return text.replace("\n", " ").encode()


@pytest.mark.parametrize("tools", ["[]", "null"])
@pytest.mark.parametrize("parallel", ["true", "false", "null"])
def test_openais_own_examples_are_taken(tools: str, parallel: str) -> None:
    preference = (OPENAI_PREFERENCE % tools).replace("true", parallel)
    [pair] = parse_examples(one_line(preference), SampleKind.DPO, "formal")
    assert pair.chosen.startswith("Today in") and pair.rejected.startswith("It is not")
    for more in ("", f', "tools": {tools}, "parallel_tool_calls": {parallel}'):
        raw = one_line(OPENAI_SUPERVISED % more)
        [sample] = parse_examples(raw, SampleKind.SFT, "formal")
        assert sample.chosen.endswith("know that.") and len(sample.messages) == 4


def test_tools_are_refused_by_name() -> None:
    lines_with = {
        SampleKind.DPO: OPENAI_PREFERENCE % TOOLS,
        SampleKind.SFT: OPENAI_SUPERVISED % f', "tools": {TOOLS}',
    }
    for kind, text in lines_with.items():
        with pytest.raises(BadLine, match="line 1: 'tools' are not supported"):
            parse_examples(one_line(text), kind, "formal")


def test_labels() -> None:
    raw = lines(
        {"messages": [USER], "completion": [answer("yes")], "label": True},
        {"prompt": "Once", "completion": "no", "label": False},
    )
    first, second = parse_examples(raw, SampleKind.KTO, "formal")
    assert (first.chosen, first.desirable, first.messages) == ("yes", True, (USER,))
    assert (second.chosen, second.desirable, second.prompt) == ("no", False, "Once")


@pytest.mark.parametrize(
    ("kind", "line", "problem"),
    [
        (SampleKind.SFT, "{", "line 2"),
        (SampleKind.SFT, '{"messages": []}', "no assistant message"),
        (SampleKind.SFT, '{"messages": [{"role": "tool", "content": "x"}]}', "no assistant|role"),
        (SampleKind.SFT, '{"messages": [], "tools": [{}]}', "'tools' are not supported"),
        (SampleKind.SFT, '{"messages": [], "functions": []}', "unknown field `functions`"),
        (SampleKind.SFT, '{"messages": [], "parallel_tool_calls": 1}', "bool"),
        (SampleKind.DPO, '{"messages": []}', "unknown field `messages`"),
        (SampleKind.DPO, '{"input": {"messages": []}}', "preferred_output"),
        (SampleKind.KTO, '{"completion": "x", "label": true}', "either 'messages' or 'prompt'"),
        (SampleKind.KTO, '{"prompt": "a", "completion": "x", "label": 1}', "bool"),
    ],
)
def test_errors_name_the_line(kind: SampleKind, line: str, problem: str) -> None:
    good = {
        SampleKind.SFT: {"messages": [USER, answer("A")]},
        SampleKind.DPO: {
            "input": {"messages": [USER]},
            "preferred_output": [answer("a")],
            "non_preferred_output": [answer("b")],
        },
        SampleKind.KTO: {"prompt": "a", "completion": "b", "label": True},
    }[kind]
    with pytest.raises(BadLine, match=problem) as caught:
        parse_examples(lines(good) + b"\n" + line.encode(), kind, "formal")
    assert caught.value.line == 2 and str(caught.value).startswith("line 2: ")


def test_an_empty_file_has_no_examples() -> None:
    with pytest.raises(InvalidRequest, match="no examples"):
        parse_examples(b"\n \n", SampleKind.SFT, "formal")


def test_a_byte_order_mark_is_no_part_of_the_file() -> None:
    raw = b"\xef\xbb\xbf" + lines({"messages": [USER, answer("A")]})
    [sample] = parse_examples(raw, SampleKind.SFT, "formal")
    assert (sample.sample_id, sample.chosen) == ("line-1", "A")


def test_a_line_that_is_not_utf_8_is_named() -> None:
    good = lines({"messages": [USER, answer("A")]})
    wrong = json.dumps({"messages": [USER, answer("Café")]}, ensure_ascii=False).encode("latin-1")
    with pytest.raises(BadLine, match="line 2: byte 0xe9 is not UTF-8"):
        parse_examples(good + b"\n" + wrong, SampleKind.SFT, "formal")
