"""Text to token ids and back, for one served model.

Wraps the model's own tokenizer; knows chat templates and the bytes behind every token, but not
requests. Invariant: `encode_chat` and `encode` never truncate, and `decode` never shows special
tokens.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
from transformers import AutoTokenizer

from tandem.core.errors import InvalidRequest, UnsupportedModel
from tandem.services.answering.formats import format_of

_CHARS_A_TOKEN = 8
_SPACE_MARK = "\u2581"
_FILES = ("tokenizer.json", "*.model", "*.model.*", "vocab.*", "*.tiktoken", "tekken.json")


class Tokenizer:
    """The tokenizer of the served model.

    Safe to use from several threads at once: nothing is changed after construction.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        added = backend.added_tokens_decoder.items()  # of them, the configuration may name none
        self._special_ids = frozenset(map(int, backend.all_special_ids)) | frozenset(
            int(token) for token, what in added if what.special
        )
        self._longest = max(map(len, backend.get_vocab()), default=1)
        described = backend.backend_tokenizer.to_str() if backend.is_fast else ""
        self._pieces = _piece_kind(described)
        source = json.dumps(backend.chat_template or "", ensure_ascii=False)
        self.format = format_of(source, backend.get_vocab(), backend.response_template)
        """How answers to chats are read."""
        self.markers = self._showing(self.format.markers)
        """Decodes, and also shows the special tokens by which answers are read."""
        self.opening = self._opening() if self.format.reasons else ""
        """What the chat template writes before an answer, where that may begin its reasoning."""
        self.identity = _identity(backend, described)
        """A hash of what fixes the token ids of a text and of a chat."""

    def _showing(self, markers: str) -> MarkerDecoder:
        texts = {
            token: str(self._backend.convert_ids_to_tokens(token)) for token in self._special_ids
        }
        hidden = {token for token, text in texts.items() if text not in markers}
        return MarkerDecoder(self._backend, frozenset(hidden))

    def _opening(self) -> str:
        turns = [{"role": "user", "content": "x"}]
        try:
            before = self.render_chat(turns, add_generation_prompt=False)
            return self.render_chat(turns).removeprefix(before)
        except InvalidRequest:
            return ""

    @classmethod
    def load(cls, source: str | Path) -> Tokenizer:
        """Load by Hugging Face name or directory. Raises `UnsupportedModel` with the reason.

        Lengths are checked against the engine's limit, so the tokenizer shall not warn of its own.
        """
        folder = Path(source)
        # transformers would make an empty one, or miss a package that is there.
        if folder.is_dir() and not any(path for kind in _FILES for path in folder.glob(kind)):
            raise UnsupportedModel(f"{source} has no tokenizer (tokenizer.json and the like)")
        try:
            return cls(AutoTokenizer.from_pretrained(str(source), model_max_length=sys.maxsize))
        except Exception as error:  # of any kind, where a file is damaged
            reason = " ".join(str(error).split())
            raise UnsupportedModel(
                f"cannot load a tokenizer from {source}: {type(error).__name__}: {reason}"
            ) from error

    @property
    def size(self) -> int:
        """Number of known ids, added tokens included."""
        return len(self._backend)

    @property
    def has_chat_template(self) -> bool:
        """Whether `encode_chat` can work at all."""
        return self._backend.chat_template is not None

    def special_token(self, text: str) -> int | None:
        """The id of the special token of exactly this text, if there is one."""
        token = self._backend.convert_tokens_to_ids(text)
        known = token in self._special_ids and self._backend.convert_ids_to_tokens(token) == text
        return int(token) if known else None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Token ids of `text`, with the begin marker the model was trained with if asked."""
        ids = self._backend.encode(text, add_special_tokens=add_special_tokens)
        return tuple(ids)

    def exceeds(self, text: str, tokens: int) -> bool:
        """Whether `text` certainly has more than so many tokens.

        Looks at a beginning only, so that it costs little more than a text that just fits; what is
        left may have too many nevertheless.
        """
        if len(text) > tokens * self._longest:
            return True
        head = text[: tokens * _CHARS_A_TOKEN]
        # Where the text is cut, its last word may have become other tokens.
        spare = self._longest
        return len(head) < len(text) and len(self.encode(head)) > tokens + spare

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> tuple[int, ...]:
        """Render `messages` with the model's chat template and encode the result.

        Raises `InvalidRequest` if the model has no template or the template refuses the messages.
        """
        text = self.render_chat(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
        )
        return self.encode(text, add_special_tokens=False)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """`messages` as the model's chat template writes them, with the `tools` that are offered,
        up to the beginning of an answer, or up to the end of the last message, which an answer then
        continues. Raises as `encode_chat` does."""
        if not self.has_chat_template:
            raise InvalidRequest(
                "this model has no chat template; use /v1/completions with a plain prompt",
                param="messages",
            )
        try:
            text = self._backend.apply_chat_template(
                self.format.turns(messages, [dict(tool) for tool in tools]),
                tools=[dict(tool) for tool in tools] or None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                continue_final_message=continue_final_message,
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error
        return str(text)

    def description(self) -> dict[str, Any]:
        """What clients need to render and count by themselves: the kind of tokenizer, its special
        tokens, the chat template."""
        backend = self._backend
        special = {name: str(token) for name, token in backend.special_tokens_map.items() if token}
        return {
            "tokenizer_class": type(backend).__name__,
            "vocab_size": self.size,
            "bos_token": special.get("bos_token"),
            "eos_token": special.get("eos_token"),
            "unk_token": special.get("unk_token"),
            "pad_token": special.get("pad_token"),
            "chat_template": backend.chat_template,
        }

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of `tokens` without special tokens; incomplete UTF-8 becomes U+FFFD."""
        return str(
            self._backend.decode(
                list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )

    def token_bytes(self, token: int) -> bytes:
        """The bytes this token stands for, also when they are only a part of a character."""
        piece = self._backend.convert_ids_to_tokens(token)
        if piece is None:  # rows of the embedding that pad the vocabulary have no text
            return b""
        if token in self._special_ids:
            return str(piece).encode()
        return self._pieces.to_bytes(str(piece))

    def token_text(self, token: int) -> str:
        r"""The token as OpenAI writes it: its text, or `bytes:\xe4\xbd` if that is not UTF-8."""
        raw = self.token_bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class MarkerDecoder:
    """Token ids to text as `Tokenizer.decode` does it, but only `hidden` tokens have no text."""

    def __init__(self, backend: Any, hidden: frozenset[int]) -> None:
        self._backend = backend
        self._hidden = hidden

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of `tokens`; incomplete UTF-8 becomes U+FFFD."""
        kept = [token for token in tokens if token not in self._hidden]
        text = self._backend.decode(
            kept, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return str(text)


class _BytePieces:
    """Pieces of byte-level BPE: every character stands for one byte (GPT-2's alphabet)."""

    def to_bytes(self, piece: str) -> bytes:
        alphabet = _byte_alphabet()
        try:
            return bytes(alphabet[character] for character in piece)
        except KeyError:  # an added token, written in plain text
            return piece.encode()


class _SentencePieces:
    """SentencePiece: a mark for the space, `<0xE4>` for single bytes."""

    def to_bytes(self, piece: str) -> bytes:
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        return piece.replace(_SPACE_MARK, " ").encode()


def _identity(backend: Any, described: str) -> str:
    vocabulary = described or json.dumps(backend.get_vocab(), sort_keys=True)
    digest = hashlib.sha256(vocabulary.encode())
    digest.update(str(backend.chat_template).encode())
    return digest.hexdigest()[:32]


def _piece_kind(described: str) -> _BytePieces | _SentencePieces:
    """`described` is a fast tokenizer's JSON, empty for others."""
    if not described:
        return _SentencePieces()
    decoder = json.loads(described)["decoder"]
    return _BytePieces() if "ByteLevel" in json.dumps(decoder) else _SentencePieces()


@lru_cache(maxsize=1)
def _byte_alphabet() -> dict[str, int]:
    """Character -> byte. Printable Latin-1 bytes are themselves, the others follow from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if chr(byte) not in table)
    table.update({chr(0x100 + index): byte for index, byte in enumerate(list(others))})
    return table
