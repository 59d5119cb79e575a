"""One choice of one answer: its tokens become text, log-probabilities and a finish reason.

Joins the detokenizer and the stop finder and keeps each token's log-probability together with
its text. Invariant: the texts of all deltas join to the choice's text, and a token's entry is
handed out with the delta that shows the end of its text, never before.
"""

from __future__ import annotations

from bisect import bisect_left
from codecs import getincrementaldecoder
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tandem.core.learning import AnswerTokens, Ending
from tandem.core.plan import TokenLogprob
from tandem.core.sequence import FinishReason
from tandem.services.answering.detokenizer import Decoder, Detokenizer, StopFinder
from tandem.services.answering.tokenizer import Tokenizer

_CHARACTER_BYTES = 4  # at most, in UTF-8


@dataclass(frozen=True, slots=True)
class TokenText:
    """A token as clients see it: its text, its bytes, its log-probability.

    `logprob` is None for the first token of an echoed prompt. `top` are the alternatives, best
    first, themselves without alternatives. `offset` counts characters from the choice's start.
    """

    text: str
    raw: bytes
    logprob: float | None
    top: tuple[TokenText, ...] = ()
    offset: int = 0


@dataclass(frozen=True, slots=True)
class CallPiece:
    """What a choice's `index`-th tool call gained: first its id and name, then its arguments."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Delta:
    """What one choice gained; the last delta of a choice has a `finish_reason`.

    It gains one of `text`, `reasoning` and a `call`; `called` says at its end that it ended with
    tool calls.

    `token_ids` are all tokens that came, the stopping one too. `stop_reason` is the stop string or
    the client's own stop token that ended it.
    """

    index: int
    text: str
    tokens: tuple[TokenText, ...] = ()
    finish_reason: FinishReason | None = None
    token_ids: tuple[int, ...] = ()
    stop_reason: str | int | None = None
    reasoning: str = ""
    call: CallPiece | None = None
    called: bool = False


@dataclass(frozen=True, slots=True)
class _Held:
    """A token whose text is not all shown yet; it covers `[entry.offset, end)`."""

    entry: TokenText
    end: int


class Choice:
    """State of one choice while its tokens arrive.

    `prefix_chars` is the length of an echoed prompt, so that offsets count from its start.
    `decoder` makes text instead of the tokenizer.
    `stopped_early` becomes true when a stop string was found while the engine still generates.
    """

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer,
        *,
        context: Sequence[int],
        stops: Sequence[str],
        min_tokens: int,
        prefix_chars: int = 0,
        stop_ids: Collection[int] = (),
        decoder: Decoder | None = None,
    ) -> None:
        self.index = index
        self.finished = False
        self.stopped_early = False
        self.output_tokens = 0
        self._tokenizer = tokenizer
        begun = _ends_within_character(tokenizer, context)
        self._detokenizer = Detokenizer(decoder or tokenizer, context, begun=begun)
        self._finder = StopFinder(stops)
        self._min_tokens = min_tokens
        self._stop_ids = stop_ids
        self._decoded = prefix_chars
        self._shown = prefix_chars
        self._held: list[_Held] = []
        self._tokens: list[int] = []
        self._offsets: list[int] = []
        self._stop_token: int | None = None

    def served(self, end_tokens: Collection[int]) -> AnswerTokens:
        """What has become of a finished choice, in token ids; `end_tokens` are the model's own."""
        assert self.finished
        if self._finder.stopped:
            return AnswerTokens(tuple(self._tokens[: self._num_shown()]), Ending.STOP_TEXT)
        if self._stop_token is None:
            return AnswerTokens(tuple(self._tokens), Ending.LENGTH)
        if self._stop_token in end_tokens:
            return AnswerTokens((*self._tokens, self._stop_token), Ending.MODEL)
        return AnswerTokens(tuple(self._tokens), Ending.STOP_TOKEN)

    def _num_shown(self) -> int:
        """Tokens before a stop text; the one that it cut is among them if more than space is left
        of it."""
        shown = bisect_left(self._offsets, self._shown)
        end = self._offsets[shown] if shown < len(self._offsets) else self._decoded
        if shown and end > self._shown:
            whole = self._tokenizer.token_bytes(self._tokens[shown - 1]).decode(errors="replace")
            left = whole[: self._shown - self._offsets[shown - 1]]
            return shown if left.strip() else shown - 1
        return shown

    def take(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[TokenLogprob],
        finish: FinishReason | None,
        stop_token: int | None,
    ) -> Delta:
        """Add the tokens of one event. The token that stopped the choice has no text."""
        assert not self.finished
        text, before = "", self.output_tokens
        for place, token in enumerate(tokens):
            self.output_tokens += 1
            if stop_token is not None and place == len(tokens) - 1:
                self._stop_token = stop_token
                break
            text += self._push(token, logprobs[place] if logprobs else None)
            if self._finder.stopped:
                self.stopped_early = finish is None
                finish = FinishReason.STOP
                break
        if finish is not None and not self._finder.stopped:
            text += self._finish(cut=finish is FinishReason.LENGTH and self._cut)
            finish = FinishReason.STOP if self._finder.stopped else finish
        self._shown += len(text)
        self.finished = finish is not None
        return Delta(
            self.index,
            text,
            self._release(),
            finish,
            tuple(tokens[: self.output_tokens - before]),
            self._finder.stop or (stop_token if stop_token in self._stop_ids else None),
        )

    def _push(self, token: int, logprob: TokenLogprob | None) -> str:
        offset = self._decoded
        self._tokens.append(token)
        self._offsets.append(offset)
        text = self._detokenizer.push(token)
        self._decoded += len(text)
        if logprob is not None:
            entry = describe(self._tokenizer, logprob, offset)
            self._held.append(_Held(entry, self._decoded))
        return self._filter(text)

    @property
    def _cut(self) -> bool:
        return _ends_within_character(self._tokenizer, self._tokens)

    def _finish(self, *, cut: bool) -> str:
        """The engine ended the choice: what was held back, unless it holds a stop string; without
        the bytes of a character that was `cut` by its length."""
        text = self._filter(self._detokenizer.finish(whole=cut))
        return text if self._finder.stopped else text + self._finder.finish()

    def _filter(self, text: str) -> str:
        return self._finder.push(text, armed=self.output_tokens > self._min_tokens)

    def _release(self) -> tuple[TokenText, ...]:
        """Entries whose text is shown; at the end, those that a stop string did not swallow."""
        if self.finished and not self._finder.stopped:
            ready = self._held
            self._held = []
        elif self.finished:
            ready = [held for held in self._held if held.entry.offset < self._shown]
            self._held = []
        else:
            ready = [held for held in self._held if held.end <= self._shown]
            self._held = self._held[len(ready) :]
        return tuple(held.entry for held in ready)


def describe(tokenizer: Tokenizer, logprob: TokenLogprob, offset: int) -> TokenText:
    """The text form of the engine's log-probability of one token."""
    top = tuple(_plain(tokenizer, token, value) for token, value in logprob.top)
    chosen = _plain(tokenizer, logprob.token, logprob.logprob)
    return TokenText(chosen.text, chosen.raw, chosen.logprob, top, offset)


def _ends_within_character(tokenizer: Tokenizer, tokens: Sequence[int]) -> bool:
    """Whether the next token would go on with a character that has begun."""
    decoder = getincrementaldecoder("utf-8")(errors="replace")
    decoder.decode(b"".join(map(tokenizer.token_bytes, tokens[-_CHARACTER_BYTES:])))
    return bool(decoder.getstate()[0])


def describe_prompt(
    tokenizer: Tokenizer, text: str, prompt: Sequence[int], logprobs: Sequence[TokenLogprob]
) -> tuple[TokenText, ...]:
    """Text forms of all tokens of a prompt that is echoed as `text`.

    `logprobs` belong to all but the first. A special token counts where the text spells it out.
    """
    assert len(logprobs) == len(prompt) - 1
    detokenizer = Detokenizer(tokenizer)
    entries: list[TokenText] = []
    offset = 0
    for place, token in enumerate(prompt):
        if place == 0:
            entries.append(_plain(tokenizer, token, None))
        else:
            entries.append(describe(tokenizer, logprobs[place - 1], offset))
        piece, spelt = detokenizer.push(token), entries[-1].text
        if not piece and spelt and text.startswith(spelt, offset):
            piece = spelt
        offset += len(piece)
    return tuple(entries)


def _plain(tokenizer: Tokenizer, token: int, logprob: float | None) -> TokenText:
    return TokenText(tokenizer.token_text(token), tokenizer.token_bytes(token), logprob)
