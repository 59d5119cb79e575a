"""A choice hands out text and log-probabilities together and stops exactly at stop strings."""

from __future__ import annotations

import pytest

from fake_scores import logprob_of
from serving import demo_tokenizer
from tandem.core.learning import AnswerTokens, Ending
from tandem.core.sequence import FinishReason
from tandem.services.answering.choice import Choice, Delta, describe_prompt


def choice(stops: tuple[str, ...] = (), min_tokens: int = 0, prefix_chars: int = 0) -> Choice:
    return Choice(
        3,
        demo_tokenizer(),
        context=(),
        stops=stops,
        min_tokens=min_tokens,
        prefix_chars=prefix_chars,
    )


def feed(state: Choice, text: str, *, logprobs: bool = True) -> list[Delta]:
    """One event a token, until the choice is finished."""
    deltas: list[Delta] = []
    for token in demo_tokenizer().encode(text, add_special_tokens=False):
        scores = [logprob_of(token, 1)] if logprobs else []
        deltas.append(state.take([token], scores, None, None))
        if state.finished:
            break
    return deltas


@pytest.mark.parametrize(("prompt", "cut", "said"), [("\u20ac", 1, "\u20ac"), ("\ufffd", 0, "a")])
def test_an_answer_completes_the_character_that_the_prompt_began(
    prompt: str, cut: int, said: str
) -> None:
    tokens = demo_tokenizer().encode(prompt, add_special_tokens=False)
    more = tokens[-1:] if cut else demo_tokenizer().encode("a", add_special_tokens=False)
    context = tokens[: len(tokens) - cut]
    state = Choice(0, demo_tokenizer(), context=context, stops=(), min_tokens=0)
    assert len(tokens) > 1
    assert state.take(more, [], FinishReason.LENGTH, None).text == said


def test_the_stop_token_counts_but_has_no_text_and_no_logprob() -> None:
    state = choice()
    feed(state, "Hello")
    before = state.output_tokens
    last = state.take([7], [logprob_of(7, 0)], FinishReason.STOP, 7)
    assert (last.text, last.tokens, last.finish_reason) == ("", (), FinishReason.STOP)
    assert state.output_tokens == before + 1


def test_a_stop_string_ends_the_choice_early_and_swallows_its_tokens() -> None:
    state = choice(stops=(" you",))
    deltas = feed(state, "Hello, how are you today?")
    assert "".join(delta.text for delta in deltas) == "Hello, how are"
    assert state.finished and state.stopped_early
    entries = [entry for delta in deltas for entry in delta.tokens]
    assert "".join(entry.text for entry in entries) == "Hello, how are"


def test_a_stop_string_in_the_last_event_needs_no_abort() -> None:
    state = choice(stops=("lo",))
    tokens = demo_tokenizer().encode("Hello", add_special_tokens=False)
    delta = state.take(tokens, [], FinishReason.LENGTH, None)
    assert (delta.text, delta.finish_reason) == ("Hel", FinishReason.STOP)
    assert not state.stopped_early


def test_held_back_text_and_its_logprobs_come_with_the_end() -> None:
    state = choice(stops=("are you sure",))
    deltas = feed(state, "Hello, how are")
    assert "".join(delta.text for delta in deltas) == "Hello, how "
    last = state.take([7], [], FinishReason.STOP, 7)
    assert last.text == "are"
    assert [entry.text for entry in last.tokens] == [" are"]


def test_stop_strings_wait_for_min_tokens() -> None:
    state = choice(stops=("Hello",), min_tokens=50)
    assert "".join(delta.text for delta in feed(state, "Hello, Hello")) == "Hello, Hello"
    assert not state.finished


def test_a_stop_string_that_begins_before_min_tokens_and_ends_after_it_stops() -> None:
    # The tokens are "Hello", ",", " how", " are", " you", ...
    for stop, least, shown in (
        (", how", 2, "Hello"),  # begins within, ends with the first token that may stop
        ("lo, how are", 3, "Hel"),
        ("Hello", 1, "Hello, how are you"),  # is complete before
        (", how", 3, "Hello, how are you"),
        (" are", 0, "Hello, how"),
    ):
        state = choice(stops=(stop,), min_tokens=least)
        deltas = feed(state, "Hello, how are you")
        if not state.finished:
            deltas.append(state.take([], [], FinishReason.LENGTH, None))
        assert "".join(delta.text for delta in deltas) == shown, (stop, least)
        stopped = shown != "Hello, how are you"
        assert deltas[-1].stop_reason == (stop if stopped else None)
        assert deltas[-1].finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)


@pytest.mark.parametrize("text", ["你好吗", "Hi €", "Hi 😀", "Hi"])
def test_an_answer_that_ends_by_length_ends_with_a_whole_character(text: str) -> None:
    tokens = demo_tokenizer().encode(text, add_special_tokens=False)
    for length in range(1, len(tokens) + 1):
        state = choice()
        deltas = [state.take([token], [], None, None) for token in tokens[: length - 1]]
        deltas.append(state.take([tokens[length - 1]], [], FinishReason.LENGTH, None))
        shown = "".join(delta.text for delta in deltas)
        assert text.startswith(shown) and "\ufffd" not in shown
        assert [one for delta in deltas for one in delta.token_ids] == list(tokens[:length])
    assert shown == text


def test_bytes_that_the_model_left_broken_are_shown() -> None:
    tokens = demo_tokenizer().encode("€", add_special_tokens=False)
    assert len(tokens) > 1
    state = choice()
    first = state.take(tokens[:1], [], None, None)
    last = state.take([7], [], FinishReason.STOP, 7)
    assert first.text + last.text == "\ufffd"


def test_the_clients_own_stop_token_is_a_reason_and_the_models_end_is_none() -> None:
    for ids, reason in (((7,), 7), ((), None)):
        state = Choice(
            0, demo_tokenizer(), context=(), stops=(), min_tokens=0, stop_ids=frozenset(ids)
        )
        delta = state.take([9, 7], [], FinishReason.STOP, 7)
        assert (delta.stop_reason, delta.token_ids) == (reason, (9, 7))


def test_offsets_count_characters_from_the_prefix() -> None:
    deltas = feed(choice(prefix_chars=100), "Hello, how are you")
    offset = 100
    for delta in deltas:
        for entry in delta.tokens:
            assert entry.offset == offset
            offset += len(entry.text)
    assert offset == 100 + len("Hello, how are you")


def test_without_logprobs_no_entries() -> None:
    assert not any(delta.tokens for delta in feed(choice(), "Hello", logprobs=False))


def test_prompt_entries_cover_the_prompt() -> None:
    text = "Hello, how are you"
    tokens = demo_tokenizer().encode(text, add_special_tokens=False)
    logprobs = [logprob_of(t, 2) for t in tokens[1:]]
    entries = describe_prompt(demo_tokenizer(), text, tokens, logprobs)
    assert "".join(entry.text for entry in entries) == text
    assert entries[0].logprob is None and entries[0].top == ()
    assert entries[1].logprob == -tokens[1] / 1000 and len(entries[1].top) == 2
    assert entries[1].offset == len(entries[0].text)


@pytest.mark.parametrize("spelt_out", [True, False])
def test_prompt_offsets_count_the_special_tokens_of_the_text(spelt_out: bool) -> None:
    tokenizer = demo_tokenizer()
    tokens = tokenizer.encode_chat([{"role": "user", "content": "Grüße, 你好"}])
    whole = tokenizer.render_chat([{"role": "user", "content": "Grüße, 你好"}])
    text = whole if spelt_out else tokenizer.decode(tokens)
    entries = describe_prompt(tokenizer, text, tokens, [logprob_of(t, 0) for t in tokens[1:]])
    readable = [
        entry for entry in entries[1:] if entry.text in whole and "\ufffd" not in entry.text
    ]
    assert len(readable) > 5
    for entry in readable:
        if spelt_out or entry.text in text:
            assert text.startswith(entry.text, entry.offset)


def test_what_was_served_ends_as_the_choice_ended() -> None:
    hello = demo_tokenizer().encode("Hello", add_special_tokens=False)
    for token, finish, served in (
        (7, FinishReason.STOP, AnswerTokens((*hello, 7), Ending.MODEL)),
        (9, FinishReason.STOP, AnswerTokens(hello, Ending.STOP_TOKEN)),
        (9, FinishReason.LENGTH, AnswerTokens((*hello, 9), Ending.LENGTH)),
    ):
        state = choice()
        feed(state, "Hello")
        state.take([token], [], finish, token if finish is FinishReason.STOP else None)
        assert state.served(end_tokens=(7, 8)) == served


@pytest.mark.parametrize("min_tokens", [0, 2])
@pytest.mark.parametrize(
    ("stop", "kept"),
    [
        (" you", "Hello, how are"),
        ("you", "Hello, how are"),  # a space alone is left of the token
        ("u t", "Hello, how are you"),  # the user saw " yo"
        ("day", "Hello, how are you today"),
        ("?", "Hello, how are you today"),
    ],
)
def test_tokens_that_a_stop_string_hid_were_not_served(
    stop: str, kept: str, min_tokens: int
) -> None:
    text = "Hello, how are you today?"
    state = choice(stops=(stop,), min_tokens=min_tokens)
    feed(state, text, logprobs=False)
    tokens = demo_tokenizer().encode(kept, add_special_tokens=False)
    assert state.served(end_tokens=()) == AnswerTokens(tokens, Ending.STOP_TEXT)


def test_a_stop_string_in_what_was_held_back_hides_the_end_token() -> None:
    state = choice(stops=("\ufffd",))
    tokens = demo_tokenizer().encode("Hello 你", add_special_tokens=False)[:-1]  # half a character
    state.take(tokens, [], None, None)
    state.take([7], [], FinishReason.STOP, 7)
    served = state.served(end_tokens=(7,))
    assert served.ending is Ending.STOP_TEXT and 7 not in served.ids
