"""Chooses the next tokens of a whole batch from its logits, with vLLM's semantics.

The order is: bias and banned tokens, penalties, grammar, temperature, min_p, top_k, top_p, then the
inverse CDF at a uniform number that depends only on the draw. Invariant: only a row's own
parameters decide its path, so other rows of the batch never change an answer. An all-greedy batch
costs one maximum per row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tandem.core.plan import Draw, DrawResult
from tandem.core.sampling import SamplingParams
from tandem.model.grammars import Grammars
from tandem.model.logprobs import token_logprobs
from tandem.model.randomness import uniforms
from tandem.model.selection import best_candidates, invert
from tandem.model.transfer import Fetched, indices, to_device

# Number of candidates for top_p alone, before the whole vocabulary is sorted.
_TOP_P_CANDIDATES = 1024
# Parts of a row in which its maximum is searched.
_PARTS = 32
NOT_FINITE = "the model's output was not finite"
# In place of a token: what no token stands for.
_IMPOSSIBLE, _NOT_FINITE, _UNCOVERED = -1, -2, -3


@dataclass(frozen=True, slots=True)
class Best:
    """The greatest logit of each row: its column int64 [rows], and whether the row is finite. A NaN
    or +inf anywhere in a row shows in its maximum."""

    choice: Tensor
    finite: Tensor

    @staticmethod
    def of(logits: Tensor) -> Best:
        """Search `logits` [rows, vocab]."""
        if logits.shape[1] % _PARTS:
            value, choice = logits.max(dim=-1)
            return Best(choice, value.isfinite())
        # In parts first, since a device searches one row with few of its units.
        values, places = logits.unflatten(1, (_PARTS, -1)).max(dim=-1)
        value, part = values.max(dim=-1)
        choice = part * (logits.shape[1] // _PARTS) + places.gather(1, part[:, None])[:, 0]
        return Best(choice, value.isfinite())

    def pick(self, rows: Tensor) -> Best:
        """Those of the given rows."""
        return Best(self.choice.index_select(0, rows), self.finite.index_select(0, rows))


class Drawing:
    """Draws that the device computes. Nothing here waits for it before `results`.

    `on_device` has the tokens, int64 [draws]; negative where the device chose none.
    """

    def __init__(
        self,
        logits: Tensor,
        draws: Sequence[Draw],
        grammars: Grammars | None = None,
        best: Best | None = None,
    ) -> None:
        """One draw from each row of `logits` [draws, vocab], whose maxima are `best` if they are
        known. `grammars` are needed if a draw has one."""
        self._logits, self._draws = logits, draws
        best = best if best is not None else Best.of(logits)
        choice = best.choice
        self._problems: dict[int, str] = {}
        # Rows with a path of their own, and their edited logits.
        self._changed = [row for row, draw in enumerate(draws) if not _plainly_greedy(draw)]
        self._scores: Tensor | None = None
        if changed := self._changed:
            rows, some = indices(changed, logits.device), [draws[row] for row in changed]
            scores = _pick(logits, changed).to(torch.float32, copy=True)
            _apply_bias(scores, some)
            _apply_penalties(scores, some)
            if any(draw.sampling.grammar is not None for draw in some):
                assert grammars is not None
                found = grammars.restrict(scores, some)
                self._problems = {changed[row]: why for row, why in found.items()}
            picked, possible = _choose(scores, some)
            choice = choice.index_copy(0, rows, picked)
            usable = best.finite.index_copy(0, rows, possible & best.finite.index_select(0, rows))
            self._scores = scores
            choice = choice.masked_fill(~usable, _IMPOSSIBLE)
        self.on_device = choice.masked_fill(~best.finite, _NOT_FINITE)
        self._coded = Fetched(self.on_device)

    def results(self) -> list[DrawResult | str]:
        """One for each draw: its token, or the reason why none can be chosen: `NOT_FINITE`, or what
        the grammars say."""
        tokens: list[int] = self._coded.get().tolist()
        short = [row for row in self._changed if tokens[row] == _UNCOVERED]
        self._draw_again(short, tokens)
        results: list[DrawResult | str] = [
            DrawResult(draw.seq_id, token) if token >= 0 else NOT_FINITE
            for draw, token in zip(self._draws, tokens, strict=True)
        ]
        for row in short:
            results[row] = DrawResult(self._draws[row].seq_id, tokens[row], redrawn=True)
        for row, problem in self._problems.items():
            results[row] = problem if tokens[row] != _NOT_FINITE else NOT_FINITE
        _add_logprobs(results, self._logits, self._draws)
        return results

    def _draw_again(self, short: list[int], tokens: list[int]) -> None:
        """Draw for `short` rows among all tokens: their nucleus is larger than the candidates."""
        if not short:
            return
        assert self._scores is not None
        places = {row: place for place, row in enumerate(self._changed)}
        some = [self._draws[row] for row in short]
        scores = _pick(self._scores, [places[row] for row in short])
        params, numbers = [draw.sampling for draw in some], _numbers(some, scores.device)
        drawn = _draw_among_best(scores, params, numbers, scores.shape[1]).tolist()
        for row, token in zip(short, drawn, strict=True):
            tokens[row] = token


def sample(
    logits: Tensor, draws: Sequence[Draw], grammars: Grammars | None = None
) -> list[DrawResult | str]:
    """`Drawing.results` at once."""
    return Drawing(logits, draws, grammars).results()


def _plainly_greedy(draw: Draw) -> bool:
    sampling = draw.sampling
    edited = sampling.has_penalties or sampling.logit_bias or draw.banned
    return sampling.greedy and not edited and sampling.grammar is None


def _add_logprobs(results: list[DrawResult | str], logits: Tensor, draws: Sequence[Draw]) -> None:
    """Add requested log-probabilities, of the distribution before any edit."""
    asked = [
        (row, result, draw.sampling.logprobs)
        for row, (result, draw) in enumerate(zip(results, draws, strict=True))
        if isinstance(result, DrawResult) and draw.sampling.logprobs is not None
    ]
    if not asked:
        return
    rows = [row for row, _, _ in asked]
    tokens = [result.token for _, result, _ in asked]
    described = token_logprobs(_pick(logits, rows), tokens, [top for _, _, top in asked])
    for (row, result, _), logprob in zip(asked, described, strict=True):
        results[row] = DrawResult(result.seq_id, result.token, logprob, redrawn=result.redrawn)


def _choose(scores: Tensor, draws: Sequence[Draw]) -> tuple[Tensor, Tensor]:
    """Tokens int64 [draws] or `_UNCOVERED`, and whether each row of `scores` had a possible one. A
    row without one gets any token."""
    best = Best.of(scores)
    random = [row for row, draw in enumerate(draws) if not draw.sampling.greedy]
    if not random:
        return best.choice, best.finite
    drawn = _draw(_pick(scores, random), [draws[row] for row in random])
    return best.choice.index_copy(0, indices(random, scores.device), drawn), best.finite


def _apply_bias(scores: Tensor, draws: Sequence[Draw]) -> None:
    biased = [
        (row, token, bias)
        for row, draw in enumerate(draws)
        for token, bias in draw.sampling.logit_bias.items()
    ]
    biased += [
        (row, token, -math.inf)
        for row, draw in enumerate(draws)
        if draw.sampling.grammar is None  # else the grammar does it
        for token in draw.banned
    ]
    if biased:
        rows, tokens, values = zip(*biased, strict=True)
        where = (indices(list(rows), scores.device), indices(list(tokens), scores.device))
        added = to_device(torch.tensor(values, dtype=scores.dtype), scores.device)
        scores.index_put_(where, added, accumulate=True)


def _apply_penalties(scores: Tensor, draws: Sequence[Draw]) -> None:
    """Repetition counts prompt and output; presence and frequency count the output only."""
    parts = [
        _penalty_of(row, draw) for row, draw in enumerate(draws) if draw.sampling.has_penalties
    ]
    if not parts:
        return
    rows, tokens, factor, minus = (
        to_device(torch.from_numpy(np.concatenate(column)), scores.device)
        for column in zip(*parts, strict=True)
    )
    factor, minus = factor.to(scores.dtype), minus.to(scores.dtype)
    seen = scores[rows, tokens]
    seen = torch.where(seen > 0, seen / factor, seen * factor) - minus
    scores[rows, tokens] = seen


def _penalty_of(row: int, draw: Draw) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(row, token, repetition factor, amount to subtract) for every token that occurred."""
    sampling = draw.sampling
    history = np.array(draw.history, dtype=np.int64)
    tokens, inverse = np.unique(history, return_inverse=True)
    counts = np.bincount(inverse[draw.prompt_tokens :], minlength=tokens.size).astype(np.float64)
    minus = sampling.frequency_penalty * counts + sampling.presence_penalty * (counts > 0)
    factor = np.full(tokens.size, sampling.repetition_penalty)
    return np.full(tokens.size, row), tokens, factor, minus


def _numbers(draws: Sequence[Draw], device: torch.device) -> Tensor:
    """Uniform numbers, float64 [draws]."""
    numbers = uniforms([(d.sampling.seed, d.index, d.position) for d in draws])
    return to_device(torch.from_numpy(numbers), device)


def _draw(scores: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Tokens int64 [draws], each drawn from its row of `scores` [draws, vocab], or `_UNCOVERED`."""
    params, uniform = [draw.sampling for draw in draws], _numbers(draws, scores.device)
    needs = [_candidates(p, scores.shape[1]) for p in params]
    choice = torch.empty(len(draws), dtype=torch.int64, device=scores.device)
    for need in sorted(set(needs)):
        rows = [row for row, other in enumerate(needs) if other == need]
        some = [params[row] for row in rows]
        part, number = _pick(scores, rows), _pick(uniform, rows)
        if need:
            drawn = _draw_among_best(part, some, number, need)
        else:
            drawn = invert(_filtered(part, some).exp_(), number)
        choice.index_copy_(0, indices(rows, scores.device), drawn)
    return choice


def _candidates(params: SamplingParams, vocab: int) -> int:
    """How many of the best tokens to try first; 0: the whole vocabulary, unsorted."""
    if params.top_k > 0:
        return min(1 << (params.top_k - 1).bit_length(), vocab)
    return min(_TOP_P_CANDIDATES, vocab) if params.top_p < 1.0 else 0


def _draw_among_best(
    scores: Tensor, params: Sequence[SamplingParams], uniform: Tensor, count: int
) -> Tensor:
    """Tokens drawn after top_k and top_p from the best `count` of each row.

    With top_k the mass is that of the k best, otherwise that of the whole row. The result is
    `_UNCOVERED` if the nucleus is larger than `count`.
    """
    values, tokens = best_candidates(scores, count)
    weights = _filtered(values, params).exp_()
    rank = torch.arange(count, device=scores.device)
    limits = _column(scores, [p.top_k if p.top_k > 0 else count for p in params])
    weights.masked_fill_(rank >= limits, 0.0)
    held = weights.sum(dim=-1)
    total = held.clone()
    open_ended = [row for row, p in enumerate(params) if p.top_k <= 0]
    if open_ended and count < scores.shape[1]:
        whole = _filtered(_pick(scores, open_ended), [params[row] for row in open_ended])
        rows = indices(open_ended, total.device)
        total.index_copy_(0, rows, whole.exp_().sum(dim=-1))
    before = (weights.cumsum(dim=-1) - weights) / total[:, None]
    share = _column(scores, [p.top_p for p in params])
    kept = weights.masked_fill((before >= share) & (rank > 0), 0.0)
    choice = tokens.gather(1, invert(kept, uniform)[:, None])[:, 0]
    if not open_ended or count == scores.shape[1]:
        return choice
    least = _column(scores, [p.top_p + 1e-6 if p.top_k <= 0 else 0.0 for p in params])
    return choice.masked_fill(held / total < least[:, 0], _UNCOVERED)


def _filtered(scores: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Scores over temperature with a maximum of 0; -inf below min_p of the best probability."""
    scores = scores - scores.amax(dim=-1, keepdim=True)
    if any(p.temperature != 1.0 for p in params):
        scores.div_(_column(scores, [p.temperature for p in params]))
    if any(p.min_p > 0.0 for p in params):
        floor = _column(scores, [math.log(p.min_p) if p.min_p > 0.0 else -math.inf for p in params])
        scores.masked_fill_(scores < floor, -torch.inf)
    return scores


def _pick(tensor: Tensor, rows: list[int]) -> Tensor:
    """The given rows, ascending; `tensor` itself if it has no others."""
    if len(rows) == tensor.shape[0]:
        return tensor
    return tensor.index_select(0, indices(rows, tensor.device))


def _column(scores: Tensor, values: Sequence[float]) -> Tensor:
    return to_device(torch.tensor(values, dtype=scores.dtype), scores.device)[:, None]
