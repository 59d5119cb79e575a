"""Ask the demo model held-out requests of every kind and print how it does.

Greedy answers; an answer is right when it holds the facts its request demands, and has stopped
when the end token came within the limit. Style obedience and the memory of a name are rows of
their own. Kinds with few phrasings are asked what training has seen; the table marks them.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, TokenizersBackend

from demo.corpus import kind_names, sample_held_out, sample_request
from demo.kinds import memory
from demo.request import Message, Request
from demo.style import CLOSERS, OPENERS, SYSTEM_PROMPTS, Style, answer

REPLY_TOKENS = 320
BATCH = 32

Judge = Callable[[str], bool]


@dataclass(frozen=True)
class Case:
    """One dialogue to go on with, and what makes the reply right."""

    row: str
    messages: Sequence[Message]
    judge: Judge


@dataclass
class Row:
    """The tally of one line of the table."""

    asked: int = 0
    right: int = 0
    stopped: int = 0


def _fresh(rng: Random, kind: str) -> tuple[str, Request]:
    request = sample_held_out(rng, kind, attempts=2000)
    if request is None:
        return f"{kind} (seen)", sample_request(rng, kind)
    return kind, request


def kind_cases(rng: Random, per_kind: int) -> list[Case]:
    """Single requests without a system message."""
    cases = []
    for kind in kind_names():
        for _ in range(per_kind):
            row, request = _fresh(rng, kind)
            cases.append(Case(row, (Message("user", request.text),), request.accepts))
    return cases


def _shows(style: Style, request: Request) -> Judge:
    """Whether a reply wears the marks of `style`."""
    if style is Style.BRIEF or style in request.styled:
        allowed = request.styled.get(style, (request.brief,))
        return lambda reply: reply.strip() in allowed
    marks = (*OPENERS[style], *filter(None, CLOSERS[style]))
    return lambda reply: any(mark in reply for mark in marks)


def style_cases(rng: Random, per_style: int) -> list[Case]:
    """Requests under a system prompt that asks for a style, judged by style alone."""
    cases = []
    for style in Style:
        if style is Style.PLAIN:
            continue
        for _ in range(per_style):
            _, request = _fresh(rng, rng.choice(("capital", "define", "advise", "list_group")))
            system = Message("system", rng.choice(SYSTEM_PROMPTS[style]))
            messages = (system, Message("user", request.text))
            cases.append(Case(f"style: {style.value}", messages, _shows(style, request)))
    return cases


def memory_cases(rng: Random, count: int) -> list[Case]:
    """Tell something, one other exchange, ask for it."""
    cases = []
    for _ in range(count):
        told, asked = memory.told_and_asked(rng)
        other = sample_request(rng)
        messages = (
            Message("user", told.text),
            Message("assistant", answer(told, Style.PLAIN, rng)),
            Message("user", other.text),
            Message("assistant", answer(other, Style.PLAIN, rng)),
            Message("user", asked.text),
        )
        cases.append(Case("memory over a turn", messages, asked.accepts))
    return cases


def replies(
    model: PreTrainedModel, coder: TokenizersBackend, cases: Sequence[Case]
) -> list[tuple[str, bool]]:
    """The greedy reply to each case, and whether it ended by itself."""
    order = sorted(range(len(cases)), key=lambda i: cases[i].row)
    found: dict[int, tuple[str, bool]] = {}
    for at in range(0, len(order), BATCH):
        chunk = order[at : at + BATCH]
        chats = [[{"role": m.role, "content": m.content} for m in cases[i].messages] for i in chunk]
        texts = coder.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
        inputs = coder(texts, return_tensors="pt", padding=True, padding_side="left")
        with torch.inference_mode():
            out = model.generate(**inputs, max_new_tokens=REPLY_TOKENS, do_sample=False)
        for index, ids in zip(chunk, out[:, inputs["input_ids"].shape[1] :], strict=True):
            ended = bool((ids == coder.eos_token_id).any())
            found[index] = (coder.decode(ids, skip_special_tokens=True), ended)
    return [found[i] for i in range(len(cases))]


def table(rows: dict[str, Row]) -> str:
    """The tally as a Markdown table."""
    lines = ["| kind | asked | right % | stopped % |", "| --- | ---: | ---: | ---: |"]
    total = Row()
    for name, row in rows.items():
        shares = f"{100 * row.right / row.asked:.0f} | {100 * row.stopped / row.asked:.0f}"
        lines.append(f"| {name} | {row.asked} | {shares} |")
        total.asked += row.asked
        total.right += row.right
        total.stopped += row.stopped
    shares = f"{100 * total.right / total.asked:.1f} | {100 * total.stopped / total.asked:.1f}"
    lines.append(f"| **all** | {total.asked} | {shares} |")
    return "\n".join(lines)


def main() -> None:
    """Evaluate the demo model on held-out requests."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--model", type=Path, default=Path("src/tandem/demo_model"))
    parser.add_argument("--per-kind", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--show-wrong", action="store_true", help="print each wrong reply")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rng = Random(options.seed)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    coder = AutoTokenizer.from_pretrained(options.model)
    cases = kind_cases(rng, options.per_kind)
    cases += style_cases(rng, options.per_kind)
    cases += memory_cases(rng, 2 * options.per_kind)
    rows: dict[str, Row] = {}
    for case, (reply, ended) in zip(cases, replies(model, coder, cases), strict=True):
        row = rows.setdefault(case.row, Row())
        row.asked += 1
        row.stopped += ended
        row.right += case.judge(reply)
        if options.show_wrong and not case.judge(reply):
            print(f"{case.row}: {case.messages[-1].content!r} -> {reply!r}")
    print(table(rows))


if __name__ == "__main__":
    main()
