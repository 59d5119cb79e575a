"""Which tokens the grammars of sequences allow next, with llguidance.

The only module that imports llguidance, and it does so when the first grammar comes. Knows no text
and no plan. Invariant: what is kept is a cache. A mask depends on the grammar and on the output
tokens of its sequence only, so a preempted or repeated draw has the same mask.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer

from tandem.core.errors import InvalidRequest
from tandem.core.plan import Draw
from tandem.core.ports import EndDraws
from tandem.core.sampling import TOO_COMPLEX, Grammar, GrammarKind
from tandem.model import kernels
from tandem.model.transfer import indices, to_device

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer
    from llguidance._lib import JsonCompileOptions

# Compiled grammars that are kept although nobody holds them.
_MOST_SPARE = 64
# A grammar that took longer to compile is not compiled again between two iterations. One that took
# less may be, once an iteration: that delays all answers, which is better than to end some.
_SHORT_S = 0.1
# A grammar that takes longer to compile, with its first mask, is refused.
_LONGEST_S = 1.0
# Between two parts of JSON: nothing, a space, or a new line with its indent. Endless space would
# let a small model write nothing else.
_JSON: JsonCompileOptions = {
    "whitespace_pattern": r" |\n[ \t]{0,40}",
    "lenient": False,
    "coerce_one_of": False,
}
_SAID_CHARS = 500


@dataclass(slots=True)
class _Running:
    """State of one sequence: its grammar after the output tokens in `taken`. `begun` is the one of
    which it is a copy, with the same lexer."""

    matcher: LLMatcher
    begun: LLMatcher
    taken: tuple[int, ...] = ()


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Compiled:
    """A grammar that is ready for as long as somebody refers to this."""

    matcher: LLMatcher  # at the beginning
    seconds: float  # that compiling took
    full: bool = False  # its lexer has no room for further states
    running: dict[int, _Running] = field(default_factory=dict)  # by sequence

    def end(self, seq_ids: Iterable[int]) -> None:
        """Free the states of sequences that have ended."""
        for seq_id in seq_ids:
            self.running.pop(seq_id, None)


class _Masks:
    """Room for masks: `words` is int32 [count, ceil(vocab / 32)], a bit a token."""

    def __init__(self, count: int, vocab: int) -> None:
        self.count = count
        self.words = np.zeros((count, -(-vocab // 32)), dtype=np.int32)
        self._bytes = 4 * self.words.shape[1]
        self._address = self.words.ctypes.data  # asking for it takes as long as a short mask

    def make(self, place: int, matcher: LLMatcher) -> None:
        """Which tokens the matcher allows next."""
        matcher.unsafe_compute_mask_ptr(self._address + place * self._bytes, self._bytes)


class Grammars:
    """Grammars over the tokens of one model.

    `source` is the directory of its tokenizer, `vocab_size` the width of its logits, `ends` are the
    tokens that end an answer. `compile` may be called from any thread, `restrict` from one.
    """

    def __init__(self, source: str, vocab_size: int, ends: tuple[int, ...]) -> None:
        self._source = source
        self._vocab_size = vocab_size
        self._ends = ends
        self._lock = threading.Lock()  # of the tokenizer, `_compiled` and `_spare`
        self._tokenizer: LLTokenizer | None = None
        self._compiled: WeakValueDictionary[Grammar, _Compiled] = WeakValueDictionary()
        self._spare: OrderedDict[Grammar, _Compiled] = OrderedDict()  # the last ones
        self._masks = _Masks(1, vocab_size)
        self._table: Tensor | None = None
        self._renewed: list[_Compiled] = []  # in this iteration

    def compile(self, grammar: Grammar) -> EndDraws:
        """Check a grammar. It is ready for draws for as long as the result is kept, which is told
        which sequences have ended. Raises `InvalidRequest` that says what is wrong with it."""
        ready = self._ready(grammar)
        if ready.seconds > _LONGEST_S:
            raise InvalidRequest(
                f"'{grammar.param}' takes more than {_LONGEST_S:g} s to prepare; simplify it",
                param=grammar.param,
            )
        if ready.full:
            ready.matcher, ready.full = self._matcher(grammar), False
        return ready.end

    def restrict(self, scores: Tensor, draws: Sequence[Draw]) -> dict[int, str]:
        """Set the scores [draws, vocab] of tokens that a draw's grammar does not allow to -inf.

        Draws without a grammar are not changed. Of the allowed tokens, a draw's `banned` ones go
        too unless nothing is left then. Returns the rows that have no mask, each with the reason.
        """
        rows = [row for row, draw in enumerate(draws) if draw.sampling.grammar is not None]
        problems: dict[int, str] = {}
        self._renewed = []
        if len(rows) > self._masks.count:
            self._masks = _Masks(len(rows), self._vocab_size)
        for place, row in enumerate(rows):
            try:
                self._fill(place, draws[row])
            except InvalidRequest as error:
                self._masks.words[place] = 0
                problems[row] = str(error)
        self._apply(scores, rows)
        return problems

    def _apply(self, scores: Tensor, rows: list[int]) -> None:
        """The first masks on these rows of the scores."""
        words = self._masks.words[: len(rows)]
        if scores.device.type == "cpu" and kernels.status().available:
            places = torch.from_numpy(np.array(rows, dtype=np.int64))
            kernels.forbid_tokens(scores, torch.from_numpy(words), places)
            return
        masks = to_device(torch.from_numpy(words.view(np.uint8)), scores.device)
        added = self._added(scores).index_select(0, masks.view(-1).int())
        added = added.view(len(rows), -1)[:, : scores.shape[1]]
        scores.index_add_(0, indices(rows, scores.device), added)

    def _added(self, scores: Tensor) -> Tensor:
        """float32 [256, 8]: what a byte of a mask adds to the scores of its eight tokens."""
        if self._table is None or self._table.device != scores.device:
            bits = torch.arange(256)[:, None] >> torch.arange(8) & 1
            table = torch.zeros(256, 8).masked_fill_(bits == 0, -torch.inf)
            self._table = table.to(scores.device, scores.dtype)
        return self._table

    def _fill(self, place: int, draw: Draw) -> None:
        """The mask of one draw. Raises `InvalidRequest`."""
        assert draw.sampling.grammar is not None
        words, taken = self._masks.words[place], draw.history[draw.prompt_tokens :]
        ready = self._ready(draw.sampling.grammar)
        matcher = _advanced(ready, draw.seq_id, taken)
        self._masks.make(place, matcher)
        if matcher.is_error():
            # Sequences of one grammar share a lexer, which may be full from the others.
            if ready.running[draw.seq_id].begun is ready.matcher:
                self._renew(ready, draw.sampling.grammar)
            matcher = _advanced(ready, draw.seq_id, taken)
            self._masks.make(place, matcher)
        if matcher.is_error() or not words.any():
            ready.end([draw.seq_id])
            raise InvalidRequest(TOO_COMPLEX)
        if draw.banned:
            allowed, banned = words.copy(), np.array(draw.banned)
            np.bitwise_and.at(words, banned >> 5, ~(1 << (banned & 31)).astype(np.int32))
            if not words.any():
                words[:] = allowed

    def _renew(self, ready: _Compiled, grammar: Grammar) -> None:
        """Compile a grammar again for sequences that come, and for others once their lexer is full.

        Raises `InvalidRequest` if that was done in this iteration, or if it takes too long here:
        then it is done beside the loop, for the next request.
        """
        if ready.seconds > _SHORT_S:
            ready.full = True
        if ready.full or ready in self._renewed:
            raise InvalidRequest(TOO_COMPLEX)
        ready.matcher = self._matcher(grammar)
        self._renewed.append(ready)

    def _ready(self, grammar: Grammar) -> _Compiled:
        """The grammar, compiled now if it is not ready. Raises `InvalidRequest`."""
        with self._lock:
            ready = self._compiled.get(grammar)
        if ready is None:
            self._loaded(grammar.param)  # takes a second the first time, which is no grammar's
            began_s = time.thread_time()
            matcher = self._matcher(grammar)
            ready = _Compiled(matcher, time.thread_time() - began_s)
        if ready.seconds <= _LONGEST_S:
            with self._lock:
                ready = self._spare[grammar] = self._compiled.setdefault(grammar, ready)
                self._spare.move_to_end(grammar)
                if len(self._spare) > _MOST_SPARE:
                    self._spare.popitem(last=False)
        return ready

    def _matcher(self, grammar: Grammar) -> LLMatcher:
        """A new matcher that has made its first masks. Raises `InvalidRequest`."""
        from llguidance import LLMatcher

        tokenizer = self._loaded(grammar.param)
        try:
            source = _source(grammar)
        except Exception as error:  # the converters raise errors of many kinds
            raise _refusal(grammar, str(error)) from error
        try:
            matcher = LLMatcher(tokenizer, source, log_level=0, limits=_limits())
            problem = matcher.get_error() or self._problem(matcher)
        except Exception as error:
            raise _refusal(grammar, str(error)) from error
        if problem:
            raise _refusal(grammar, problem)
        return matcher

    def _problem(self, matcher: LLMatcher) -> str:
        """Why a new matcher has no mask for the first token, or fails at one that it allows. The
        most expensive grammars do."""
        first = _Masks(1, self._vocab_size)
        first.make(0, matcher)
        if matcher.is_error():
            return matcher.get_error()
        possible = np.flatnonzero(np.unpackbits(first.words[0].view(np.uint8), bitorder="little"))
        if not possible.size:
            return "no text matches it"
        begun = matcher.deep_copy()
        begun.consume_token(int(possible[-1]))
        return begun.get_error()

    def _loaded(self, param: str) -> LLTokenizer:
        """llguidance's form of the model's tokenizer, made once. Raises `InvalidRequest`."""
        from llguidance import LLTokenizer

        with self._lock:
            if self._tokenizer is None:
                described = self._described(param)
                try:
                    self._tokenizer = LLTokenizer(
                        described, n_vocab=self._vocab_size, eos_token=list(self._ends)
                    )
                except Exception as error:
                    raise _impossible(str(error), param) from error
            return self._tokenizer

    def _described(self, param: str) -> str:
        if not self._ends:
            raise _impossible("it has no end token", param)
        try:
            tokenizer = AutoTokenizer.from_pretrained(self._source)
        except Exception as error:  # of any kind, where a file is damaged
            raise _impossible("it has no tokenizer", param) from error
        if not tokenizer.is_fast:
            kind = type(tokenizer).__name__
            raise _impossible(f"its tokenizer {kind} is not one of Hugging Face's fast ones", param)
        return str(tokenizer.backend_tokenizer.to_str())


def _advanced(ready: _Compiled, seq_id: int, taken: tuple[int, ...]) -> LLMatcher:
    """The matcher of a sequence after its output `taken`. It shares the lexer's states with others
    of its grammar."""
    state = ready.running.pop(seq_id, None)
    known = 0 if state is None else len(state.taken)
    if state is None or state.matcher.is_error() or state.taken != taken[:known]:
        state, known = _Running(ready.matcher.deep_copy(), ready.matcher), 0
    state.matcher.consume_tokens(list(taken[known:]))
    state.taken = taken
    ready.running[seq_id] = state
    return state.matcher


def _limits() -> LLParserLimits:
    """Steps and states: a state takes about 240 bytes, a mask at most some 10 ms."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=300_000,
        step_lexer_fuel=60_000,
        step_max_items=20_000,
        max_lexer_states=30_000,
        max_grammar_size=60_000,
        verbose_errors=False,
    )


def _source(grammar: Grammar) -> str:
    """llguidance's notation."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import gbnf_to_lark

    match grammar.kind:
        case GrammarKind.JSON:
            return str(LLMatcher.grammar_from_json_schema(grammar.text, overrides=_JSON))
        case GrammarKind.REGEX:
            return str(LLMatcher.grammar_from_regex(grammar.text))
        case GrammarKind.GBNF:
            return str(LLMatcher.grammar_from_lark(gbnf_to_lark(grammar.text)))
        case GrammarKind.LARK:
            return str(LLMatcher.grammar_from_lark(grammar.text))


def _refusal(grammar: Grammar, reason: str) -> InvalidRequest:
    reason = reason.replace("<non-verbose/>", "").replace("NoExtensionBias", "no text matches it")
    said = " ".join(reason.split())[:_SAID_CHARS]
    return InvalidRequest(f"'{grammar.param}' cannot be used: {said}", param=grammar.param)


def _impossible(reason: str, param: str) -> InvalidRequest:
    return InvalidRequest(
        f"'{param}' is not possible with this model: {reason}",
        param=param,
        code="unsupported_parameter",
    )
