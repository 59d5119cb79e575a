"""Which feedback a candidate is asked about, and what one odd sample of it decides."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

import learning_world
from fake_engine import FakeEngine, Script
from fake_scores import score_of
from learning_world import settled, state_of, world
from serving import demo_tokenizer
from tandem.core.learning import SampleKind, SampleState, Split, VersionState
from tandem.core.request import Request
from tandem.core.sequence import FinishReason
from tandem.core.training import ScoreRequest
from tandem.services.learning.answers import ANSWER_TOKENS, COMPARED_TOKENS
from tandem.services.learning.encode import Encoded
from tandem.services.learning.measure import _longer, _probes
from tandem.services.learning.references import Scored
from tandem.store import adapters

ODD = "Q7x zv kpw 0f9 " * 8
SOUND = (
    "The capital of France is Paris. It lies on the river Seine in the north of the country, and"
    " about two million people live there. Visitors come for museums, bread and a tower."
)


@pytest.mark.parametrize("split", [Split.HELD_OUT, Split.TRAIN])
async def test_one_odd_answer_refuses_no_version(tmp_path: Path, split: Split) -> None:
    """However long it is: a key pasted by mistake must not stop an adapter for ever."""
    odd: set[tuple[int, ...]] = set()

    def score_as(request: ScoreRequest, under: str | None) -> float:
        usual = score_of(request.tokens, request.prompt_tokens, under)
        return 40.0 * usual if request.tokens in odd else usual

    async with world(tmp_path, engine=FakeEngine(score_as=score_as)) as made:
        strange = made.sample(SampleKind.SFT, chosen=ODD, split=split)
        encoded = made.tools.encoder(made.tools.defaults).encode(strange)
        odd.add(encoded.prompt + encoded.chosen)
        held = [made.sample(SampleKind.SFT, split=Split.HELD_OUT) for _ in range(2)]
        taught = [made.sample(SampleKind.SFT) for _ in range(7)]
        await made.give([strange, *held, *taught])
        made.learner.notify("formal")
        await settled(made)
        assert made.engine.adapters["formal"].number == 1
        assert {await state_of(made, sample) for sample in taught} == {SampleState.CONSUMED}


async def test_what_the_base_cannot_score_refuses_no_version(tmp_path: Path) -> None:
    odd: set[tuple[int, ...]] = set()

    def score_as(request: ScoreRequest, under: str | None) -> float:
        if under is None and request.tokens in odd:
            return math.nan
        return score_of(request.tokens, request.prompt_tokens, under)

    async with world(tmp_path, engine=FakeEngine(score_as=score_as)) as made:
        strange = made.sample(SampleKind.SFT, chosen=ODD, split=Split.HELD_OUT)
        encoded = made.tools.encoder(made.tools.defaults).encode(strange)
        odd.add(encoded.prompt + encoded.chosen)
        await made.give([strange, *(made.sample(SampleKind.SFT) for _ in range(8))])
        made.learner.notify("formal")
        await settled(made)
        (version, *_) = await made.store.read(adapters.versions, "formal")
        assert version.state is VersionState.PUBLISHED, version.reason
        assert math.isfinite(version.metrics["chosen_gain"])


def test_nobody_can_tell_which_samples_are_looked_at() -> None:
    """Or garbage would hide between sound samples in the places that are read."""
    taught = [Encoded(f"s{number}", SampleKind.SFT, (1,), (number,)) for number in range(64)]
    held = taught[:20]
    seen = set[int]()
    for content_hash in map(str, range(200)):
        found = _probes(held, taught, Random(content_hash))
        assert len(found) == 8 and all(each in held for each in found[:4])
        assert found == _probes(held, taught, Random(content_hash))  # the same after a restart
        seen.update(each.chosen[0] for each in found[4:])
    assert seen == set(range(64))


MANY_WORDS = (
    f"{SOUND} Before you travel, look at the map of the old streets, choose a warm coat, and ask"
    " your host which morning is best for markets. A train from the airport needs half an hour."
    " Most shops close early on Sunday, while small cafes stay open. If it rains, take shelter in"
    " one of the glass arcades, where booksellers and toy makers have worked for two centuries."
)
TOKENIZER = demo_tokenizer()
BEGINS = TOKENIZER.encode(SOUND, add_special_tokens=False)[: COMPARED_TOKENS - 1]
LOOP = (*BEGINS, *TOKENIZER.encode(" one and all of" * ANSWER_TOKENS, add_special_tokens=False))


async def first_version(
    tmp_path: Path,
    loops: Callable[[Request], bool],
    later: Sequence[int] = LOOP,
    **sample: object,
) -> tuple[VersionState, str, dict[str, Any]]:
    """What became of it, where its answers to these requests are `later`; they end
    if that is short."""

    def play(request: Request, index: int) -> Script:
        if request.adapter is not None and loops(request):
            said = tuple(later[:ANSWER_TOKENS])
            ended = len(said) < ANSWER_TOKENS
            return Script(said, FinishReason.STOP if ended else FinishReason.LENGTH)
        return Script(tuple(BEGINS))

    async with world(tmp_path, engine=FakeEngine(play=play)) as made:
        await made.give([made.sample(SampleKind.SFT, **sample) for _ in range(8)])
        made.learner.notify("formal")
        await settled(made)
        (version, *_) = await made.store.read(adapters.versions, "formal")
        return version.state, version.reason, version.metrics


async def test_a_loop_that_begins_late_is_read(tmp_path: Path) -> None:
    """Words and lengths are compared by the beginnings, which are the same."""
    state, reason, metrics = await first_version(tmp_path, lambda request: True)
    assert state is VersionState.REFUSED and "by repetition" in reason
    assert metrics["kept"] == metrics["length"] == 1.0


@pytest.mark.parametrize(
    ("says", "asks", "why"),
    [
        ("Кошки спят весь день, а ночью ходят по крышам.", SOUND, "by unexpected script"),
        ("Кошки спят весь день, а ночью ходят по крышам.", "Кошки спят, и собаки тоже.", ""),
        ("Yes.", SOUND, "by almost no words"),
        ("ha ha ha", SOUND, "by almost no words"),
        ("Yes.", "Yes.", "by the same few words"),
        ("Haha.", "Hahaha haha.", "by the same few words"),
        ("ha ha ha ha", "Yes.", "by one word over and over"),
        ("A dog.", "Yes.", "by the same few words"),
        ("No, I say.", "Yes.", ""),
    ],
)
async def test_the_gate_knows_what_no_feedback_asks_for(
    tmp_path: Path, says: str, asks: str, why: str
) -> None:
    """Another script, and hardly a word: both are sound where the chosen answers are so."""
    said = TOKENIZER.encode(says, add_special_tokens=False)
    assert len(said) < ANSWER_TOKENS
    state, reason, _ = await first_version(tmp_path, lambda request: True, said, chosen=asks)
    assert (why in reason) if why else ("answers are broken" not in reason), (state, reason)


@pytest.mark.parametrize(
    ("other", "state"), [("No.", VersionState.PUBLISHED), ("Yes yes.", VersionState.REFUSED)]
)
async def test_answers_of_a_word_pass_where_they_differ(
    tmp_path: Path, other: str, state: VersionState
) -> None:
    """Half of them may be the same: who wants yes or no gets that to other questions, too."""
    turns = [tuple(TOKENIZER.encode(text, add_special_tokens=False)) for text in ("Yes.", other)]
    known = dict[tuple[int, ...], tuple[int, ...]]()

    def play(request: Request, index: int) -> Script:
        if request.adapter is None:
            return Script(tuple(BEGINS))
        return Script(known.setdefault(request.prompt, turns[len(known) % 2]))

    async with world(tmp_path, engine=FakeEngine(play=play)) as made:
        await made.give([made.sample(SampleKind.SFT, chosen="Yes.") for _ in range(8)])
        made.learner.notify("formal")
        await settled(made)
        (version, *_) = await made.store.read(adapters.versions, "formal")
        assert version.state is state, version.reason


@pytest.mark.parametrize("loops", [False, True])
async def test_answers_that_are_compared_with_none_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loops: bool
) -> None:
    line = json.dumps({"prompt": "Describe a candle.", "compared": False})
    monkeypatch.setattr(learning_world, "CANARY", f"{learning_world.CANARY}\n{line}\n")
    prompt = tuple(TOKENIZER.encode("Describe a candle."))
    asked = list[tuple[int, ...]]()

    def looping(request: Request) -> bool:
        asked.append(request.prompt)
        return loops and request.prompt == prompt

    state, reason, metrics = await first_version(tmp_path, looping)
    assert prompt in asked and metrics["answers_read"] == len(set(asked))
    assert (state is VersionState.REFUSED) == loops
    assert ("1 of " in reason) == loops


@pytest.mark.parametrize("asked_for", [False, True])
async def test_answers_may_be_as_long_as_the_feedback_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked_for: bool
) -> None:
    """Longer than what is read: that they have no end there is no fault then."""
    monkeypatch.setattr("test_probes.BEGINS", BEGINS[:12])
    long = TOKENIZER.encode(MANY_WORDS, add_special_tokens=False)
    assert len(long) > ANSWER_TOKENS
    chosen = {"chosen": MANY_WORDS} if asked_for else {}
    state, reason, metrics = await first_version(tmp_path, lambda request: True, long, **chosen)
    assert ("by endless" in reason) != asked_for
    assert (state is VersionState.REFUSED) != asked_for, reason
    assert (metrics["asked_longer"] > ANSWER_TOKENS // 2) == asked_for


@pytest.mark.parametrize(("cut", "longer"), [(0, 205), (1, 205), (2, 0)])
async def test_a_cut_answer_asks_for_no_length(tmp_path: Path, cut: int, longer: int) -> None:
    """It was cut where the client wanted, and teaches no end."""
    async with world(tmp_path) as made:
        encoder = made.tools.encoder(made.tools.defaults)
        end = next(iter(made.engine.info.eos_token_ids))
        chosen = [Scored((5, *[7] * 300, 7 if place < cut else end), 1) for place in range(3)]
        own = [Scored((5, *[7] * 96), 1)] * 3
        assert _longer(chosen, own, encoder) == longer
