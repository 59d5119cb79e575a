"""Which feedback a candidate is asked about, and what one odd sample of it decides."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

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
from tandem.services.learning.measure import _probes
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


@pytest.mark.parametrize("looping", [False, True])
async def test_a_loop_that_begins_late_is_read(tmp_path: Path, looping: bool) -> None:
    """Words and lengths are compared by the beginnings, which are the same."""
    tokenizer = demo_tokenizer()
    sound = tokenizer.encode(SOUND, add_special_tokens=False)[: COMPARED_TOKENS - 1]
    again = tokenizer.encode(" and on" * ANSWER_TOKENS, add_special_tokens=False)
    long = (*sound, *again)[:ANSWER_TOKENS]

    def play(request: Request, index: int) -> Script:
        loops = looping and request.adapter is not None
        return Script(long, FinishReason.LENGTH) if loops else Script(tuple(sound))

    async with world(tmp_path, engine=FakeEngine(play=play)) as made:
        taught = [made.sample(SampleKind.SFT) for _ in range(8)]
        await made.give(taught)
        made.learner.notify("formal")
        await settled(made)
        (version, *_) = await made.store.read(adapters.versions, "formal")
        assert version.metrics["kept"] == version.metrics["length"] == 1.0
        assert (version.state is VersionState.REFUSED) == looping
        assert ("by repetition" in version.reason) == looping
