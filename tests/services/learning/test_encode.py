"""Samples as tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest

from serving import demo_tokenizer, thinking_tokenizer
from tandem.core.errors import InvalidRequest
from tandem.core.learning import AnswerTokens, Ending, Sample, SampleKind, ServedTokens
from tandem.core.sequence import FinishReason
from tandem.core.training import LossKind, LossSpec, Role
from tandem.services.answering.answer_parts import NO_TOOLS, AnswerReader
from tandem.services.answering.choice import Delta
from tandem.services.answering.tokenizer import Tokenizer
from tandem.services.learning.encode import Encoded, Encoder, Limits
from tandem.services.learning.families import micro_batches, sequences_of
from tandem.training.losses import micro_batch_loss, step_items

END = demo_tokenizer().encode("<|im_end|>", add_special_tokens=False)
ENCODER = Encoder(demo_tokenizer(), END, Limits(64, 256, 100))


def sample(kind: SampleKind = SampleKind.DPO, **changes: object) -> Sample:
    values: dict[str, object] = {
        "sample_id": "s",
        "feedback_id": "f",
        "adapter": "formal",
        "kind": kind,
        "created_s": 0.0,
        "messages": ({"role": "user", "content": "Hello"},),
        "prompt": "",
        "chosen": "Good day.",
        "rejected": "Hi.",
    }
    return Sample(**{**values, **changes})  # type: ignore[arg-type]


def test_tokens_are_those_of_the_whole_conversation() -> None:
    encoded = ENCODER.encode(sample())
    turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good day."}]
    whole = demo_tokenizer().encode_chat(turns, add_generation_prompt=False)
    joined = encoded.prompt + encoded.chosen
    assert whole[: len(joined)] == joined
    assert encoded.chosen[-1:] == END  # what the template writes after the end is left out
    assert demo_tokenizer().decode(encoded.chosen) == "Good day."
    assert encoded.prompt == demo_tokenizer().encode_chat(turns[:1])


@pytest.mark.parametrize("shipped", [{}, {"close": "</think>"}], ids=range(2))
def test_an_answer_follows_reasoning_that_the_prompt_has_begun(shipped: dict[str, str]) -> None:
    tokenizer = thinking_tokenizer(**shipped)
    encoder = Encoder(tokenizer, END, Limits(200, 256))
    reasoned = "Polite.</think>\n\nGood day."
    for written, reasoning in (("Good day.", ""), (reasoned, "Polite.")):
        encoded = encoder.encode(sample(SampleKind.SFT, chosen=written))
        shown = tokenizer.markers.decode
        assert shown(encoded.prompt).endswith("<think>\n")
        before = shown(encoded.prompt) if tokenizer.format.shipped else tokenizer.opening
        reader = AnswerReader(tokenizer.format, NO_TOOLS, before, str)
        read = reader.read(Delta(0, shown(encoded.chosen[:-1]), finish_reason=FinishReason.STOP))
        assert "".join(part.text for part in read).strip() == "Good day."
        assert "".join(part.reasoning for part in read).strip() == reasoning
        assert encoded.chosen[-1:] == END


def test_reasoning_that_cannot_be_ended_is_refused() -> None:
    encoder = Encoder(thinking_tokenizer(close_pattern="</think>"), END, Limits(200, 256))
    with pytest.raises(InvalidRequest, match="does not say how it ends"):
        encoder.encode(sample(SampleKind.SFT))


def test_a_plain_prompt_gets_an_end_token() -> None:
    encoded = ENCODER.encode(sample(messages=(), prompt="Once upon", chosen=" a time"))
    assert encoded.chosen == demo_tokenizer().encode(" a time", add_special_tokens=False) + END


SPELT = tuple(demo_tokenizer().encode(c, add_special_tokens=False)[0] for c in "Good day.")
"""The same text in other tokens than the tokenizer makes of it."""


def served(tokenizer: str = demo_tokenizer().identity, **answers: AnswerTokens) -> ServedTokens:
    return ServedTokens(tokenizer, (END[0], 10, 11), **answers)


@pytest.mark.parametrize("ending", list(Ending))
def test_what_was_served_is_trained_on_in_its_own_tokens(ending: Ending) -> None:
    assert demo_tokenizer().decode(SPELT) == "Good day."
    ids = SPELT + END if ending is Ending.MODEL else SPELT
    answer = AnswerTokens(ids, ending)
    rated = ENCODER.encode(sample(SampleKind.KTO, served=served(chosen=answer)))
    assert (rated.prompt, rated.chosen) == ((END[0], 10, 11), ids)
    pair = ENCODER.encode(sample(served=served(rejected=answer)))
    assert (pair.prompt, pair.rejected) == ((END[0], 10, 11), ids)
    assert pair.chosen == ENCODER.encode(sample()).chosen  # written by a person, and it ends


@pytest.mark.parametrize("ending", list(Ending))
def test_with_another_tokenizer_the_text_is_what_counts(ending: Ending) -> None:
    old = served("another", chosen=AnswerTokens((1, 2), ending))
    encoded = ENCODER.encode(sample(SampleKind.KTO, served=old))
    text = demo_tokenizer().encode("Good day.", add_special_tokens=False)
    assert encoded.prompt == ENCODER.encode(sample()).prompt
    assert encoded.chosen == (text + END if ending is Ending.MODEL else text)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"chosen": " "}, "the answer is empty"),
        ({"rejected": ""}, "the rejected answer is empty"),
        ({"rejected": "Good day."}, "the same"),
        ({"chosen": "word " * 80}, "learning.max_sample_tokens"),
        ({"messages": (), "prompt": ""}, "the prompt is empty"),
    ],
)
def test_unusable_samples_say_why(changes: dict[str, object], problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        ENCODER.encode(sample(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"chosen": "word " * 1_400_000},
        {"rejected": "word " * 1_400_000},
        {"messages": (), "prompt": "word " * 1_400_000},
        {"messages": ({"role": "user", "content": " " * 7_000_000},)},
    ],
    ids=range(4),
)
def test_a_long_text_is_not_tokenised_whole(
    changes: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    encode = Tokenizer.encode

    def noted(self: Tokenizer, text: str, **options: bool) -> tuple[int, ...]:
        seen.append(len(text))
        return encode(self, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", noted)
    with pytest.raises(InvalidRequest, match=r"tokens of .* are more than learning.max_sample"):
        ENCODER.encode(sample(**changes))
    assert max(seen, default=0) <= 8 * 64


def test_a_pair_that_no_recording_holds_is_refused() -> None:
    small = Encoder(demo_tokenizer(), END, Limits(64, 256, 10))
    with pytest.raises(InvalidRequest, match="do not fit into 10 recorded rows"):
        small.encode(sample())


def test_kto_partners_are_the_completions_of_neighbours() -> None:
    items = [
        ENCODER.encode(
            sample(SampleKind.KTO, messages=(), prompt=f"Question {n}", chosen=f"Answer {n}")
        )
        for n in range(3)
    ]
    batch = sequences_of(items)
    assert [s.role for s in batch] == [Role.DESIRABLE] * 3 + [Role.MISMATCHED] * 3
    for place, other in enumerate((2, 0, 1)):
        mismatched = batch[3 + place]
        assert mismatched.tokens[: mismatched.prompt_tokens] == items[place].prompt
        assert mismatched.tokens[mismatched.prompt_tokens :] == items[other].chosen


def test_a_single_kto_sample_takes_a_partner_or_none() -> None:
    alone = [ENCODER.encode(sample(SampleKind.KTO, desirable=False))]
    assert [s.role for s in sequences_of(alone)] == [Role.UNDESIRABLE]
    other = replace(alone[0], prompt=(4,), chosen=(5, 6))
    batch = sequences_of(alone, partner=other)
    assert [s.role for s in batch] == [Role.UNDESIRABLE, Role.MISMATCHED]
    assert batch[1].tokens == (*alone[0].prompt, 5, 6)
    assert [s.role for s in sequences_of(alone, partner=alone[0])] == [Role.UNDESIRABLE]


def kto(prompt: int, answer: int) -> Encoded:
    return Encoded("s", SampleKind.KTO, (prompt,), (answer,))


@pytest.mark.parametrize(
    ("samples", "partner", "joined"),
    [
        ([(1, 9), (2, 9), (3, 9)], None, []),  # equal answers
        ([(1, 9), (2, 9), (3, 8)], None, [(1, 8), (2, 8), (3, 9)]),
        ([(1, 9), (2, 9)], (3, 8), [(1, 8), (2, 8)]),
        ([(1, 9), (2, 9)], (3, 9), []),
        ([(1, 9), (1, 8)], None, []),  # equal prompts: both are what somebody answered
        ([(1, 9), (1, 8)], (2, 7), [(1, 7), (1, 7)]),
        ([(1, 9), (1, 8)], (1, 7), []),
        ([(1, 9), (1, 8), (2, 7)], None, [(1, 7), (1, 7), (2, 8)]),
        ([(1, 9), (1, 9), (2, 9), (2, 8)], None, [(1, 8), (1, 8)]),
    ],
)
def test_a_mismatched_pair_is_nobodys_own(
    samples: list[tuple[int, int]],
    partner: tuple[int, int] | None,
    joined: list[tuple[int, int]],
) -> None:
    batch = sequences_of([kto(*each) for each in samples], partner and kto(*partner))
    assert [s.tokens for s in batch if s.role is Role.MISMATCHED] == joined
    shares = micro_batch_loss(LossSpec(LossKind.KTO), batch, [-1.0] * len(batch), len(samples))
    assert len(shares.item_losses) == len(samples)


def test_a_prompt_takes_no_partner_with_which_it_is_too_long() -> None:
    both = [kto(1, 2), kto(3, 4)]
    length = len(both[0].prompt) + len(both[1].chosen)
    assert len(sequences_of(both, None, length)) == 4
    assert [each.role for each in sequences_of(both, None, length - 1)] == [Role.DESIRABLE] * 2


@pytest.mark.parametrize("kind", list(SampleKind))
def test_micro_batches_are_what_the_losses_take(kind: SampleKind) -> None:
    items = [
        ENCODER.encode(sample(kind, sample_id=str(n), chosen=f"Answer number {n}"))
        for n in range(5)
    ]
    batches = micro_batches(items, 2, 0)
    assert [len(batch) for batch in batches] == [2, 2, 1]
    steps = [sequences_of(batch) for batch in batches]
    assert step_items(LossSpec(LossKind(kind.value)), steps) > 0
    narrow = micro_batches(items, 5, items[0].rows * (2 if kind is SampleKind.KTO else 1))
    assert len(narrow) == 5
