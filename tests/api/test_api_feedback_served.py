"""What feedback by a completion's id trains on: the token ids that were served, over HTTP."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from feedback_client import send, served

from fake_engine import FakeEngine, Script
from learning_world import CANARY
from patience import PATIENCE_S
from serving import demo_tokenizer, make_app, thinking_tokenizer
from tandem.config import LearningConfig
from tandem.core.request import Request
from tandem.core.training import Role, TrainingSequence
from tandem.services.answering.tokenizer import Tokenizer

END = 2
SPELT = tuple(
    demo_tokenizer().encode(c, add_special_tokens=False)[0] for c in "Bamboo can grow fast."
)
"""An answer in other tokens than the tokenizer makes of its text."""


@contextmanager
def learning(
    tmp_path: Path, tokenizer: Tokenizer | None = None, **script: Any
) -> Iterator[tuple[httpx.Client, FakeEngine]]:
    canary = tmp_path / "canary.jsonl"
    canary.write_text(CANARY)
    config = LearningConfig(
        canary_file=str(canary), held_out=0.0, epochs=1, replay=0.0, version_wait_s=0.0
    )
    engine = FakeEngine(play=lambda request, index: Script(**{"tokens": SPELT, **script}))
    with served(make_app(engine, tokenizer=tokenizer, learning=config)) as http:
        yield http, engine


def trained(engine: FakeEngine, number: int, *roles: Role) -> list[TrainingSequence]:
    """Sequences with these roles, once there are `number`."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        batches = [batch for step in list(engine.steps) for batch in step.micro_batches]
        found = [item for batch in batches for item in batch if item.role in roles]
        if len(found) >= number:
            return found
        assert time.monotonic() < deadline, f"{len(found)} of {number} were trained on"
        time.sleep(0.02)


def ask(http: httpx.Client, path: str, **body: Any) -> Any:
    answer = http.post(path, json={"model": "demo", **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def completion(item: TrainingSequence) -> tuple[int, ...]:
    return item.tokens[item.prompt_tokens :]


def prompts(requests: list[Request]) -> set[tuple[int, ...]]:
    return {r.prompt for r in requests if r.request_id.startswith("chatcmpl")}


@pytest.mark.parametrize(
    "said",
    [
        {"rating": True},
        {"signal": {"type": "dwell_time", "seconds": 600}},
        {"signal": {"type": "edit", "text": "Bamboo "}},
    ],
)
def test_a_cut_answer_teaches_no_end(tmp_path: Path, said: dict[str, Any]) -> None:
    with learning(tmp_path) as (http, engine):
        for number in range(25):
            turns = [{"role": "user", "content": f"What grows {number} feet a day?"}]
            answer = ask(http, "/chat/completions", messages=turns, max_tokens=6)
            assert answer["choices"][0]["finish_reason"] == "length"
            send(http, completion_id=answer["id"], adapter="formal", **said)
        found = trained(engine, 25, Role.DESIRABLE)
        asked = prompts(engine.requests)
    assert {completion(item) for item in found} == {SPELT[:6]}
    assert {item.tokens[: item.prompt_tokens] for item in found} == asked


def test_a_whole_answer_teaches_the_end_that_the_model_made(tmp_path: Path) -> None:
    with learning(tmp_path) as (http, engine):
        turns = [{"role": "user", "content": "What grows?"}]
        answer = ask(http, "/chat/completions", messages=turns)
        send(http, completion_id=answer["id"], adapter="formal", rating=True)
        (found,) = trained(engine, 1, Role.DESIRABLE)
    assert completion(found) == (*SPELT, END)


def test_a_stop_text_and_a_stop_token_teach_no_end(tmp_path: Path) -> None:
    with learning(tmp_path, stop_token=7) as (http, engine):
        turns = [{"role": "user", "content": "What grows?"}]
        for number, asked in enumerate(({"stop": [" can"]}, {"stop_token_ids": [7]})):
            answer = ask(http, "/chat/completions", messages=turns, **asked)
            user = f"person-{number}"
            send(http, completion_id=answer["id"], adapter="formal", rating=True, user=user)
        found = trained(engine, 2, Role.DESIRABLE)
    assert {completion(item) for item in found} == {SPELT[:6], SPELT}


def test_a_prompt_of_token_ids_keeps_its_special_tokens(tmp_path: Path) -> None:
    prompt = [END, 10, END, 11, 12]
    with learning(tmp_path) as (http, engine):
        answer = ask(http, "/completions", prompt=[[13, 14], prompt], n=2, max_tokens=60)
        about = {"completion_id": answer["id"], "adapter": "formal", "choice": 3}
        send(http, **about, rating=True)
        (rated,) = trained(engine, 1, Role.DESIRABLE)
        send(http, **about, demonstration="Grass.")
        (shown,) = trained(engine, 1, Role.TARGET)
        (rejected,) = trained(engine, 1, Role.REJECTED)
    assert rated.tokens == (*prompt, *SPELT, END) == rejected.tokens
    written = demo_tokenizer().encode("Grass.", add_special_tokens=False)
    assert shown.tokens == (*prompt, *written, END)


@pytest.mark.parametrize("by", ["index", "text"])
def test_a_pair_is_trained_on_as_it_was_served(tmp_path: Path, by: str) -> None:
    with learning(tmp_path) as (http, engine):
        engine.play = lambda request, index: Script(tokens=SPELT[: 21 - 15 * index])
        turns = [{"role": "user", "content": "What grows?"}]
        answer = ask(http, "/chat/completions", messages=turns, n=2)
        texts = [choice["message"]["content"] for choice in answer["choices"]]
        pair = (1, 0) if by == "index" else (texts[1], texts[0])
        send(
            http,
            completion_id=answer["id"],
            adapter="formal",
            preference={"chosen": pair[0], "rejected": pair[1]},
        )
        chosen, rejected = trained(engine, 2, Role.CHOSEN, Role.REJECTED)
    assert completion(chosen) == (*SPELT[:6], END)
    assert completion(rejected) == (*SPELT, END)


THOUGHT = "Hm, the user asks for a capital.</think>\n\nThe capital is Paris."
SHOWN = "The capital is Paris."


@contextmanager
def reasoning(tmp_path: Path) -> Iterator[tuple[httpx.Client, FakeEngine, dict[str, Any]]]:
    """A model that reasons has answered, and its client has seen the content alone."""
    tokenizer = thinking_tokenizer()
    with learning(tmp_path, tokenizer) as (http, engine):

        def play(request: Request, index: int) -> Script:
            text = ("Lyon.</think>Lyon.", THOUGHT)[index % 2]
            return Script(tokens=tokenizer.encode(text, add_special_tokens=False))

        engine.play = play
        answer = ask(http, "/chat/completions", messages=[{"role": "user", "content": "?"}], n=2)
        message = answer["choices"][1]["message"]
        assert (message["content"], message["reasoning"]) == (SHOWN, THOUGHT.partition("<")[0])
        yield http, engine, {"completion_id": answer["id"], "adapter": "formal"}


@pytest.mark.parametrize(
    ("signal", "rating"),
    [
        ({"type": "edit", "text": f"{SHOWN} "}, 1.0),
        ({"type": "edit", "text": THOUGHT}, 1.0),
        ({"type": "dwell_time", "seconds": 1.1}, 1.0),  # four words
        ({"type": "dwell_time", "seconds": 0.3}, 0.5),
    ],
)
def test_signals_are_about_what_the_client_was_shown(
    tmp_path: Path, signal: dict[str, Any], rating: float
) -> None:
    with reasoning(tmp_path) as (http, _, about):
        stored = send(http, **about, choice=1, signal=signal)
    assert (stored["kind"], stored["rating"]) == ("rating", rating)


def test_texts_that_were_shown_are_trained_on_with_their_reasoning(tmp_path: Path) -> None:
    written = thinking_tokenizer().encode(THOUGHT, add_special_tokens=False)
    with reasoning(tmp_path) as (http, engine, about):
        send(http, **about, choice=0, signal={"type": "regenerate", "text": SHOWN})
        (kept,) = trained(engine, 1, Role.CHOSEN)
        both = {"chosen": SHOWN, "rejected": "Lyon."}
        named = send(http, **about, preference=both)
        again = send(http, **about, preference={"chosen": 1, "rejected": 0})
        assert send(http, 400, **about, preference={"chosen": SHOWN, "rejected": 1})
        assert send(http, 400, **about, choice=1, demonstration=SHOWN)
        named = http.get(f"/feedback/{named['id']}").json()
    assert completion(kept) == (*written, END)
    assert named["superseded_by"] == again["id"]


def test_an_answer_that_the_client_sends_itself_ends_as_the_template_ends(tmp_path: Path) -> None:
    with learning(tmp_path) as (http, engine):
        turns = [{"role": "user", "content": "What grows?"}]
        send(http, messages=turns, completion="Bamboo", rating=True, adapter="formal")
        (found,) = trained(engine, 1, Role.DESIRABLE)
    assert completion(found) == (*demo_tokenizer().encode("Bamboo", add_special_tokens=False), END)
