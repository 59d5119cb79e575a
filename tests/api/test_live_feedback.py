"""Feedback over HTTP to a live server of the demo model: other answers within seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

import pytest

from demo.corpus import Request, Style, answer, sample_request
from demo.style import CLOSERS, OPENERS
from live_learning_client import Pair, User, live_user

# Questions with what any right answer to them contains.
QUESTIONS = {
    "What is the capital of France?": "Paris",
    "What is the opposite of hot?": "cold",
    "What is 7 plus 5?": "12",
    "What is the largest animal on Earth?": "whale",
    "How many days are in a week?": ("seven", "7"),
    "What sound does a cow make?": "moo",
}


@pytest.fixture(scope="module")
def user() -> Iterator[User]:
    with live_user() as user:
        yield user


def pairs(worded: Callable[[Request, Random], str], count: int) -> list[Pair]:
    """Preferences for a wording over plain answers; no question twice, none of `QUESTIONS`."""
    rng, found = Random(3), dict[str, Pair]()
    while len(found) < count:
        request = sample_request(rng)
        chosen, rejected = worded(request, rng), answer(request, Style.PLAIN, rng)
        if chosen != rejected and request.text not in QUESTIONS:
            found[request.text] = Pair(request.text, chosen, rejected)
    return list(found.values())


def in_style(style: Style) -> Callable[[Request, Random], str]:
    return lambda request, rng: answer(request, style, rng)


def right(question: str, text: str) -> bool:
    wanted = QUESTIONS[question]
    return any(
        word.lower() in text.lower() for word in ([wanted] if isinstance(wanted, str) else wanted)
    )


def formal(text: str) -> bool:
    return text.startswith(tuple(OPENERS[Style.FORMAL])) or text.endswith(
        tuple(CLOSERS[Style.FORMAL])
    )


def prefer_by_index(user: User, questions: list[str], most: int) -> int:
    """Sample several answers, and where one is formal and another is not, say which is better."""
    sent = 0
    for question in questions:
        completion = user.client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": question}],
            n=8,
            seed=len(question),
            temperature=1.0,
            max_tokens=60,
        )
        texts = [choice.message.content or "" for choice in completion.choices]
        good = next((place for place, text in enumerate(texts) if formal(text)), None)
        bad = next((place for place, text in enumerate(texts) if not formal(text)), None)
        if good is not None and bad is not None and sent < most:
            body = {
                "completion_id": completion.id,
                "preference": {"chosen": good, "rejected": bad},
                "adapter": "formal",
            }
            user.call("POST", "/v1/feedback", 202, json=body)
            sent += 1
    return sent


@pytest.mark.full  # tests/services/learning/test_live_learning.py has it without HTTP
def test_forty_preferences_change_one_adapter_and_roll_back_restores_it(user: User) -> None:
    for pair in pairs(in_style(Style.RUDE), 8):
        user.prefer("other", pair)
    user.wait_until_learned("other")
    label = user.call("GET", "/v1/adapters/other")["label"]
    assert label.startswith("other@")
    questions = list(QUESTIONS)
    base, other = user.asked("demo", questions), user.asked("demo:other", questions)
    assert {said.version for said in base} == {"base"}
    assert {said.version for said in other} == {label}

    known = pairs(in_style(Style.FORMAL), 60)
    taught, held_out = known[:40], known[40:]
    before = user.win_rate("demo", held_out)
    by_index = prefer_by_index(user, [pair.question for pair in taught[:8]], 5)
    assert by_index >= 1
    for pair in taught[by_index:]:
        user.prefer("formal", pair)
    newest = user.wait_until_learned("formal")
    current = next(version for version in user.versions("formal") if version["current"])
    assert newest["metrics"]["canary_divergence"] is not None

    learned = user.asked("demo:formal", questions)
    assert user.win_rate("demo:formal", held_out) >= before + 0.2
    assert {said.version for said in learned} == {current["label"]}
    assert {said.fingerprint for said in learned}.isdisjoint(said.fingerprint for said in base)
    assert all(current["label"] in said.fingerprint for said in learned)
    assert not any(formal(said.text) for said in base)
    assert sum(formal(said.text) for said in learned) >= 5
    kept = [
        right(question, now.text)
        for question, was, now in zip(questions, base, learned, strict=True)
        if right(question, was.text)
    ]
    # Of the contents 0.85 are kept (docs/learning.md); which ones, depends on the last bit.
    assert len(kept) >= 4 and kept.count(False) <= 1, learned
    assert user.asked("demo", questions) == base
    assert user.asked("demo:other", questions) == other

    user.call("POST", "/v1/adapters/formal/rollback", json={"version": 0})
    restored = user.asked("demo:formal", questions)
    assert restored == base
    user.call("POST", f"/v1/adapters/formal/versions/{current['version']}/publish")
    assert user.asked("demo:formal", questions) == learned


@pytest.mark.full
def test_a_wording_that_the_model_never_used_is_learned_too(user: User) -> None:
    """The base finds "Certainly." before a plain answer unlikely: no pair is won before."""
    known = pairs(lambda request, rng: f"Certainly. {answer(request, Style.PLAIN, rng)}", 60)
    taught, held_out = known[:40], known[40:]
    before = user.win_rate("demo", held_out)
    for pair in taught:
        user.prefer("certain", pair)
    user.wait_until_learned("certain")
    assert before <= 0.1
    assert user.win_rate("demo:certain", held_out) >= before + 0.2
    base = user.asked("demo", list(QUESTIONS))
    said = user.asked("demo:certain", list(QUESTIONS))
    assert sum(answer_.text.startswith("Certainly.") for answer_ in said) >= 4
    for question, was, now in zip(QUESTIONS, base, said, strict=True):
        if right(question, was.text):
            assert right(question, now.text), now
