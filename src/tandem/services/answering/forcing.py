"""The grammar of an answer that must call tools (`tool_choice` required, or a function's name), or
must call tools or be JSON, or be JSON after the reasoning that its prompt has begun.

Spells calls as the model's format does, with the functions' own schemas inside. Knows no engine.
Invariant: what the grammar allows, `AnswerReader` reads as calls.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tandem.core.errors import InvalidRequest
from tandem.core.sampling import Grammar, GrammarKind
from tandem.services.answering.answer_parts import Calling
from tandem.services.answering.closing import closed
from tandem.services.answering.formats import ARGUMENTS, NAME, AnswerFormat
from tandem.services.answering.grammars import check_schema

MOST_FORCED_BYTES = 256 << 10
# Between the parts of arguments is what `json.dumps` writes, which is what models were shown.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def grammar_of_answer(
    form: AnswerFormat,
    calling: Calling,
    prefix: str,
    special: Callable[[str], int | None],
    asked: Grammar | None,
) -> Grammar | None:
    """What an answer that follows `prefix` must match, if the client `asked` for a grammar or
    forces calls; None: anything. Forced calls leave no text that `asked` could be about. Raises
    `InvalidRequest`."""
    if calling.forced:
        return grammar_of_calls(form, calling, prefix, special)
    if calling.tools and asked is not None:
        return grammar_of_calls(form, calling, prefix, special, asked)
    if asked is None or not (thought_ends := _thought_ends(form, prefix, asked.param)):
        return asked
    if asked.kind is not GrammarKind.JSON:
        raise InvalidRequest(
            f"'{asked.param}' must be a schema here: the prompt of this model begins its reasoning",
            param=asked.param,
            code="unsupported_parameter",
        )
    ends = " ".join(_literals(thought_ends, special))
    text = f"start: {ends} other\nother: {_json(json.loads(asked.text))}"
    return Grammar(GrammarKind.LARK, text, asked.param)


def grammar_of_calls(
    form: AnswerFormat,
    calling: Calling,
    prefix: str,
    special: Callable[[str], int | None],
    instead: Grammar | None = None,
) -> Grammar:
    """What an answer that follows `prefix` must match: calls of what is `forced`, or, if JSON may
    stand `instead`, of any tool. `special` gives the id of a special token of that text.

    Raises `InvalidRequest`, also where this model's calls cannot be spelt.
    """
    spelling = form.calls.spelling if form.calls is not None else None
    if spelling is None or (instead is not None and instead.kind is not GrammarKind.JSON):
        param = "tool_choice" if instead is None else instead.param
        raise InvalidRequest(
            f"'{param}' does not go with 'tools' here: what must be written cannot be said of this "
            "model's tool calls; leave one of them out",
            param=param,
            code="unsupported_parameter",
        )

    def spelt(pieces: Sequence[str]) -> str:
        return " ".join(_literals(pieces, special))

    wanted = calling.forced or tuple(calling.names)
    rules: list[str] = []
    calls: list[str] = []
    size = 0
    for place, tool in enumerate(calling.tools):
        function = tool["function"]
        if function["name"] not in wanted:
            continue
        size += check_schema(function["parameters"], f"tools[{place}].function.parameters")
        _check_size(size)
        written = [function["name"] if piece == NAME else piece for piece in spelling.call]
        cut = written.index(ARGUMENTS)
        before, after = spelt(written[:cut]), spelt(written[cut + 1 :])
        calls.append(f"call{place}")
        rules.append(f"call{place}: {before} args{place} {after}")
        rules.append(f"args{place}: {_json(closed({'type': 'object', **function['parameters']}))}")
    again = f"({spelt(spelling.joint)} call)*" if calling.parallel else ""
    rules.append(f"calls: {spelt(spelling.before)} call {again} {spelt(spelling.after)}")
    rules.append(f"call: {' | '.join(calls)}")
    if instead is not None:
        rules.append(f"other: {_json(json.loads(instead.text))}")
    thinks = spelt(form.thought_ends(prefix))
    start = f"start: {thinks} {'calls' if instead is None else '(calls | other)'}"
    text = "\n".join((start, *rules))
    _check_size(len(text))
    return Grammar(GrammarKind.LARK, text, "tools" if instead is None else instead.param)


def _check_size(size: int) -> None:
    if size > MOST_FORCED_BYTES:
        raise InvalidRequest(
            f"'tools' have {size} bytes; at most {MOST_FORCED_BYTES} can be forced", param="tools"
        )


def _json(schema: Any) -> str:
    if not isinstance(schema, dict):
        return f"%json {json.dumps(schema)}"
    return f"%json {json.dumps({**schema, 'x-guidance': _SPACING})}"


def _literals(pieces: Sequence[str], special: Callable[[str], int | None]) -> Iterator[str]:
    """Pieces in Lark's notation, texts joined."""
    text = ""
    for piece in pieces:
        token = special(piece)
        if token is None:
            text += piece
            continue
        if text:
            yield json.dumps(text)
        text = ""
        yield f"<[{token}]>"
    if text:
        yield json.dumps(text)


def _thought_ends(form: AnswerFormat, prefix: str, param: str) -> tuple[str, ...]:
    try:
        return form.thought_ends(prefix)
    except ValueError as error:
        raise InvalidRequest(
            f"'{param}' is not possible here: the prompt of this model begins its reasoning, and "
            f"the tokenizer's response template does not say how it ends: {error}",
            param=param,
            code="unsupported_parameter",
        ) from error
