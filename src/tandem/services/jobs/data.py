"""Reads JSONL training files: OpenAI's supervised and preference formats, and ours for KTO.

Every line becomes samples, as feedback does; a supervised conversation gives one sample for each
assistant turn with weight 1. Knows no tokens. Invariant: an error names its line.
"""

from __future__ import annotations

import re
from codecs import BOM_UTF8
from collections.abc import Iterator
from typing import Any

import msgspec

from tandem.core.errors import InvalidRequest
from tandem.core.learning import Sample, SampleKind

# An escape of a leading half without a trailing one after it, or the other way round.
_LONE_SURROGATE = re.compile(
    rb"(?<!\\)(?:\\\\)*(\\u[dD][89abAB][0-9a-fA-F]{2})(?!\\u[dD][c-fC-F])"
    rb"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})(\\u[dD][c-fC-F][0-9a-fA-F]{2})"
)
_ROLES = frozenset(("system", "developer", "user", "assistant"))


class BadLine(InvalidRequest):
    """A line of a training file is wrong; `line` counts from 1."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(f"line {line}: {message}", code="invalid_training_file")
        self.line = line


class _Turn(msgspec.Struct, forbid_unknown_fields=True):
    role: str
    content: str | list[dict[str, Any]]
    weight: int | None = None
    name: str | None = None

    def rendered(self) -> dict[str, str]:
        """As the chat template takes it. Raises `InvalidRequest`."""
        if self.role not in _ROLES:
            raise InvalidRequest(f"the role '{self.role}' is not supported")
        if self.weight not in (None, 0, 1):
            raise InvalidRequest("weight is 0 or 1")
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": _text(self.content)}


class _Chat(msgspec.Struct, forbid_unknown_fields=True):
    """OpenAI's examples have `tools` and `parallel_tool_calls` also where there are no tools."""

    messages: list[_Turn]
    tools: list[Any] | None = None
    parallel_tool_calls: bool | None = None

    def turns(self) -> list[_Turn]:
        """Its messages. Raises `InvalidRequest` if it has tools."""
        if self.tools:
            raise InvalidRequest("'tools' are not supported; leave them out or empty")
        return self.messages


class _Preference(msgspec.Struct, forbid_unknown_fields=True):
    input: _Chat
    preferred_output: list[_Turn]
    non_preferred_output: list[_Turn]


class _Labelled(msgspec.Struct, forbid_unknown_fields=True):
    completion: str | list[_Turn]
    label: bool
    messages: list[_Turn] = []
    prompt: str = ""


def parse_examples(raw: bytes, kind: SampleKind, adapter: str) -> list[Sample]:
    """Samples of a training file, in order; their ids name the line. Raises `BadLine`."""
    samples: list[Sample] = []
    for number, line in enumerate(raw.removeprefix(BOM_UTF8).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            line.decode()  # msgspec's own error of it does not name the byte
            made = [*_READERS[kind](line)]
        except UnicodeDecodeError as error:
            byte = error.object[error.start]
            raise BadLine(number, f"byte 0x{byte:02x} is not UTF-8; save it as UTF-8") from None
        except RecursionError:
            raise BadLine(number, "it is nested too deeply") from None
        except (msgspec.MsgspecError, InvalidRequest) as error:
            half = isinstance(error, msgspec.DecodeError) and _LONE_SURROGATE.search(line)
            raise BadLine(number, _half_a_pair(half) if half else str(error)) from None
        for place, (messages, prompt, chosen, rejected, desirable) in enumerate(made):
            sample_id = f"line-{number}" + (f"-{place}" if len(made) > 1 else "")
            samples.append(
                Sample(
                    sample_id=sample_id,
                    feedback_id="",
                    adapter=adapter,
                    kind=kind,
                    created_s=0.0,
                    messages=messages,
                    prompt=prompt,
                    chosen=chosen,
                    rejected=rejected,
                    desirable=desirable,
                )
            )
    if not samples:
        raise InvalidRequest("the file has no examples", code="invalid_training_file")
    return samples


def _half_a_pair(found: re.Match[bytes]) -> str:
    """What the parser calls truncated or malformed."""
    half = (found[1] or found[2]).decode()
    return f"{half} is half of a character: emoji are written as pairs, such as \\ud83d\\ude00"


def line_of(sample_id: str) -> int:
    """The line that a sample of `parse_examples` is from."""
    return int(sample_id.split("-")[1])


_Example = tuple[tuple[dict[str, str], ...], str, str, str, bool]


def _supervised(line: bytes) -> Iterator[_Example]:
    turns = msgspec.json.decode(line, type=_Chat).turns()
    rendered = [turn.rendered() for turn in turns]
    trained = [
        place
        for place, turn in enumerate(turns)
        if turn.role == "assistant" and turn.weight != 0 and place > 0
    ]
    if not trained:
        raise InvalidRequest("there is no assistant message to learn from")
    for place in trained:
        yield tuple(rendered[:place]), "", rendered[place]["content"], "", True


def _preference(line: bytes) -> Iterator[_Example]:
    example = msgspec.json.decode(line, type=_Preference)
    turns = example.input.turns()
    if not turns:
        raise InvalidRequest("'input.messages' is empty")
    yield (
        tuple(turn.rendered() for turn in turns),
        "",
        _only_answer(example.preferred_output, "preferred_output"),
        _only_answer(example.non_preferred_output, "non_preferred_output"),
        True,
    )


def _labelled(line: bytes) -> Iterator[_Example]:
    example = msgspec.json.decode(line, type=_Labelled)
    if bool(example.messages) == bool(example.prompt):
        raise InvalidRequest("give either 'messages' or 'prompt'")
    answer = example.completion
    text = answer if isinstance(answer, str) else _only_answer(answer, "completion")
    turns = tuple(turn.rendered() for turn in example.messages)
    yield turns, example.prompt, text, "", example.label


_READERS = {
    SampleKind.SFT: _supervised,
    SampleKind.DPO: _preference,
    SampleKind.KTO: _labelled,
}


def _only_answer(turns: list[_Turn], name: str) -> str:
    if len(turns) != 1 or turns[0].role != "assistant":
        raise InvalidRequest(f"'{name}' must be one assistant message")
    return turns[0].rendered()["content"]


def _text(content: str | list[dict[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for part in content:
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise InvalidRequest("only parts of type 'text' are supported")
        texts.append(part["text"])
    return "".join(texts)
