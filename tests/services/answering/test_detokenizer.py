"""Incremental text equals the text of all tokens, however characters are split over tokens."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders

from serving import demo_tokenizer
from tandem.services.answering.detokenizer import Detokenizer, StopFinder


class ByteDecoder:
    """Token ids are bytes; ids from 256 on are special and have no text."""

    def __init__(self) -> None:
        self.decoded_tokens = 0

    def decode(self, tokens: Sequence[int]) -> str:
        self.decoded_tokens += len(tokens)
        return bytes(token for token in tokens if token < 256).decode(errors="replace")


class SpaceDecoder:
    """Like SentencePiece: the space before the very first word is dropped."""

    words = ("▁Hello", "▁world", "s", "▁")

    def decode(self, tokens: Sequence[int]) -> str:
        text = "".join(self.words[token] for token in tokens).replace("▁", " ")
        return text.removeprefix(" ")


class FallbackDecoder:
    """Like Llama 2's: letters are tokens, any other character is a run of bytes, which is decoded
    as a whole."""

    def __init__(self) -> None:
        self._decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )

    def encode(self, text: str) -> list[int]:
        return [
            token
            for character in text
            for token in ([256 + ord(character)] if character.isascii() else character.encode())
        ]

    def decode(self, tokens: Sequence[int]) -> str:
        pieces = (chr(token - 256) if token >= 256 else f"<0x{token:02X}>" for token in tokens)
        return str(self._decoder.decode(list(pieces)))


def stream(detokenizer: Detokenizer, tokens: Sequence[int]) -> list[str]:
    return [*(detokenizer.push(token) for token in tokens), detokenizer.finish()]


@given(st.text(), st.lists(st.integers(256, 260), max_size=3))
def test_bytes_join_to_the_text_and_no_piece_shows_a_broken_character(
    text: str, special: list[int]
) -> None:
    tokens = [*special, *text.encode(), *special]
    pieces = stream(Detokenizer(ByteDecoder()), tokens)
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@given(st.text("ab é€😀"), st.text("ab é€😀"), st.integers(0, 3))
def test_runs_of_bytes_are_never_cut_within_a_character(before: str, text: str, cut: int) -> None:
    """Whether the prompt ends with a character or within one."""
    decoder, first = FallbackDecoder(), len(text[:1].encode())
    tokens = decoder.encode(text)
    begun = min(cut, max(first - 1, 0))
    context = [*decoder.encode(before), *tokens[:begun]]
    pieces = stream(Detokenizer(decoder, context, begun=begun > 0), tokens[begun:])
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("number", range(1, 20))
def test_many_characters_of_bytes_follow_one_another(number: int) -> None:
    decoder, text = FallbackDecoder(), "😀" * number
    tokens = decoder.encode(text)
    assert "".join(stream(Detokenizer(decoder), tokens)) == text
    assert stream(Detokenizer(decoder, tokens), decoder.encode("X")) == ["X", ""]


@given(st.text(min_size=1, max_size=60))
def test_the_demo_tokenizer_streams_what_it_decodes(text: str) -> None:
    tokenizer = demo_tokenizer()
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert "".join(stream(Detokenizer(tokenizer), tokens)) == tokenizer.decode(tokens) == text


def test_a_character_appears_with_its_last_byte() -> None:
    detokenizer = Detokenizer(ByteDecoder())
    assert [detokenizer.push(byte) for byte in "é€".encode()] == ["", "é", "", "", "€"]


def test_bytes_that_never_become_a_character_are_shown_at_the_end() -> None:
    assert stream(Detokenizer(ByteDecoder()), [0x61, 0xE2, 0x82]) == ["a", "", "", "\ufffd"]


def test_endless_rubbish_is_shown_before_the_end() -> None:
    pieces = stream(Detokenizer(ByteDecoder()), [0x80] * 40)
    assert "".join(pieces) == "\ufffd" * 40
    assert any(pieces[:-1])


def test_the_space_before_the_first_word_depends_on_the_prompt() -> None:
    assert stream(Detokenizer(SpaceDecoder()), [0, 1, 2]) == ["Hello", " world", "s", ""]
    assert stream(Detokenizer(SpaceDecoder(), context=[0]), [1, 2]) == [" world", "s", ""]


def test_a_prompt_that_ends_inside_a_character_is_completed() -> None:
    detokenizer = Detokenizer(ByteDecoder(), context=list("a€".encode()[:-1]), begun=True)
    assert detokenizer.push("€".encode()[-1]) == "€"


def test_a_replacement_character_of_the_prompt_is_not_repeated() -> None:
    detokenizer = Detokenizer(ByteDecoder(), context=list("what is \ufffd".encode()))
    assert stream(detokenizer, list(b"ok")) == ["o", "k", ""]


@pytest.mark.parametrize("token", [ord("x"), 256], ids=["text", "special"])
def test_the_cost_of_a_token_does_not_grow(token: int) -> None:
    decoder = ByteDecoder()
    detokenizer = Detokenizer(decoder)
    for _ in range(1000):
        detokenizer.push(token)
    assert decoder.decoded_tokens < 1000 * 20


def shown(stops: Sequence[str], pieces: Sequence[str]) -> tuple[list[str], bool]:
    finder = StopFinder(stops)
    out = []
    for piece in pieces:
        out.append(finder.push(piece))
        if finder.stopped:
            return out, True
    return [*out, finder.finish()], False


def test_a_stop_string_over_three_pieces_is_never_shown() -> None:
    assert shown(["</end>"], ["hi <", "/e", "nd> more"]) == (["hi ", "", ""], True)


def test_text_that_only_looked_like_a_stop_string_is_shown() -> None:
    assert shown(["</end>"], ["a<", "/b"]) == (["a", "</b", ""], False)
    assert shown(["</end>"], ["a</en"]) == (["a", "</en"], False)


def test_the_earliest_of_several_stop_strings_counts() -> None:
    assert shown(["three", "two"], ["one two three"]) == (["one "], True)


@given(
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.lists(st.text("abc", max_size=4), max_size=12),
)
def test_pieces_do_not_change_where_a_text_stops(stops: list[str], pieces: list[str]) -> None:
    text = "".join(pieces)
    ends = {}
    for size in range(1, len(text) + 1):  # the text as it grows: the first stop to be complete
        found = [text.find(stop, 0, size) for stop in stops if stop in text[:size]]
        if found:
            ends[size] = min(found)
    out, stopped = shown(stops, list(text))
    assert stopped == bool(ends)
    assert "".join(out) == (text[: ends[min(ends)]] if ends else text)
    assert shown(stops, pieces)[1] == stopped
