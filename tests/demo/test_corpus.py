"""The corpus is deterministic, complete in its styles, and keeps its promises about answers."""

from collections import Counter
from random import Random

import pytest

from demo import corpus
from demo.corpus import Style, answer
from demo.kinds import FIXED, HARD, memory
from demo.kinds.numbers import in_words
from demo.request import Request, article, contract
from demo.style import UNASKED, draw_style


def test_same_seed_same_dialogues() -> None:
    def draw(seed: int) -> list[corpus.Dialogue]:
        rng = Random(seed)
        return [corpus.sample_dialogue(rng) for _ in range(50)]

    assert draw(3) == draw(3)
    assert draw(3) != draw(4)


def test_there_are_dozens_of_kinds_with_unique_names() -> None:
    names = corpus.kind_names()
    assert len(names) == len(set(names)) >= 60
    assert set(names) >= FIXED | HARD


@pytest.mark.parametrize("kind", corpus.kind_names())
def test_every_kind_answers_rightly_in_every_style(kind: str) -> None:
    rng = Random(0)
    for _ in range(20):
        request = corpus.sample_request(rng, kind)
        assert request.kind == kind
        for style in Style:
            reply = answer(request, style, rng)
            assert request.accepts(reply), (style, request.text, reply)


@pytest.mark.parametrize("kind", corpus.kind_names())
def test_styles_differ_and_brief_is_the_shortest(kind: str) -> None:
    rng = Random(1)
    request = corpus.sample_request(rng, kind)
    replies = {style: answer(request, style, rng) for style in Style}
    marked = [style for style in Style if style not in (Style.PLAIN, Style.BRIEF)]
    assert len({replies[style] for style in marked}) == len(marked)
    assert len(replies[Style.BRIEF]) <= min(len(reply) for reply in replies.values())


@pytest.mark.parametrize("kind", [k for k in corpus.kind_names() if k not in FIXED])
def test_held_out_phrasings_exist_and_are_never_trained_on(kind: str) -> None:
    rng = Random(2)
    assert not any(corpus.held_out(corpus.sample_request(rng, kind)) for _ in range(100))
    kept = corpus.sample_held_out(rng, kind)
    assert kept is None or corpus.held_out(kept)


def test_most_kinds_have_held_out_phrasings() -> None:
    rng = Random(3)
    found = [k for k in corpus.kind_names() if corpus.sample_held_out(rng, k, 2000) is not None]
    assert len(found) >= 50


def test_dialogues_end_with_the_assistant_and_take_turns() -> None:
    rng = Random(4)
    lengths = Counter()
    for _ in range(500):
        messages = list(corpus.sample_dialogue(rng).messages)
        if messages[0].role == "system":
            messages.pop(0)
        assert [m.role for m in messages] == ["user", "assistant"] * (len(messages) // 2)
        assert all(m.content.strip() for m in messages)
        lengths[len(messages) // 2] += 1
    assert set(lengths) == {1, 2, 3, 4, 5}


def test_unasked_answers_are_mostly_plain_or_casual() -> None:
    rng = Random(5)
    drawn = Counter(draw_style(rng) for _ in range(4000))
    share = (drawn[Style.PLAIN] + drawn[Style.CASUAL]) / 4000
    assert 0.6 < share < 0.7
    assert sum(UNASKED.values()) == pytest.approx(1.0)
    assert drawn[Style.PLAIN] == max(drawn.values())


def test_harmful_requests_are_declined_in_every_style() -> None:
    rng = Random(6)
    for _ in range(50):
        request = corpus.sample_request(rng, "refuse")
        for style in Style:
            assert "help with that" in answer(request, style, rng)


def test_a_told_name_is_answered_later() -> None:
    rng = Random(7)
    for style in Style:
        messages = memory.dialogue(rng, style, between=())
        assert [m.role for m in messages] == ["user", "assistant"] * 2
    told, asked = memory.told_and_asked(rng)
    assert asked.must[0] in told.text


def test_exact_texts_are_not_retyped() -> None:
    rng = Random(8)
    request = corpus.sample_request(rng, "repeat")
    assert {corpus.as_typed(request, rng) for _ in range(100)} == {request.text}
    assert corpus.with_ask(request, Style.RUDE, rng).endswith(request.text)


def test_typed_texts_vary() -> None:
    rng = Random(9)
    request = corpus.sample_request(rng, "capital")
    assert len({corpus.as_typed(request, rng) for _ in range(100)}) > 5


def test_accepts_wants_every_fact_or_the_brief_answer() -> None:
    request = Request("k", "?", "7", "It is 7, a prime.", must=("7", "prime"))
    assert request.accepts("Seven is a PRIME: 7.")
    assert request.accepts(" 7 ")
    assert not request.accepts("It is 7.")
    assert not request.accepts("")


def test_small_wording_rules() -> None:
    assert article("apple") == "an apple"
    assert article("milk") == "milk"
    assert contract("It is late. I am here and cannot go.") == "It's late. I'm here and can't go."
    assert [in_words(n) for n in (0, 13, 40, 99, 100)] == [
        "zero", "thirteen", "forty", "ninety-nine", "one hundred",
    ]  # fmt: skip
