"""Sampling against plain formulas: distributions by counting, edits by a scalar reference."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch

from devices import DEVICES
from tandem.core.plan import Draw, DrawResult
from tandem.core.sampling import SamplingParams
from tandem.model.randomness import uniforms
from tandem.model.sampling import NOT_FINITE, Drawing, sample

VOCAB = 50
COUNT = 20_000


def logits_of(seed: int, rows: int = 1, vocab: int = VOCAB) -> torch.Tensor:
    return 2.0 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def draw_of(params: SamplingParams, position: int = 0, **fields) -> Draw:
    return Draw(seq_id=position, index=0, position=position, sampling=params, **fields)


def reference_distribution(row: torch.Tensor, draw: Draw) -> np.ndarray:
    """The probabilities of vLLM's definitions, one token at a time in double precision."""
    params = draw.sampling
    scores = [float(x) for x in row]
    for token, bias in params.logit_bias.items():
        scores[token] += bias
    for token in draw.banned:
        scores[token] = -math.inf
    output = draw.history[draw.prompt_tokens :]
    for token in set(draw.history):
        penalty = params.repetition_penalty
        scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
        scores[token] -= params.frequency_penalty * output.count(token)
        scores[token] -= params.presence_penalty * (token in output)
    if params.greedy:
        best = np.zeros(len(scores))
        best[int(np.argmax(scores))] = 1.0
        return best
    weights = np.exp((np.array(scores) - max(scores)) / params.temperature)
    weights /= weights.sum()
    weights[weights < params.min_p * weights.max()] = 0.0
    order = np.argsort(-weights, kind="stable")
    if params.top_k > 0:
        weights[order[params.top_k :]] = 0.0
    weights /= weights.sum()
    before = np.cumsum(weights[order]) - weights[order]
    weights[order[(before >= params.top_p) & (np.arange(len(order)) > 0)]] = 0.0
    return weights / weights.sum()


CASES = {
    "plain": SamplingParams(),
    "cool": SamplingParams(temperature=0.4),
    "hot": SamplingParams(temperature=3.0),
    "top_k": SamplingParams(top_k=5),
    "top_k_odd": SamplingParams(top_k=7, temperature=2.0),
    "top_p": SamplingParams(top_p=0.7),
    "top_p_tiny": SamplingParams(top_p=1e-6),
    "min_p": SamplingParams(min_p=0.1),
    "all_filters": SamplingParams(top_k=12, top_p=0.85, min_p=0.02, temperature=1.7),
    "top_p_min_p": SamplingParams(top_p=0.8, min_p=0.05, temperature=2.0),
    "bias": SamplingParams(logit_bias={3: 4.0, 4: -100.0}),
    "presence": SamplingParams(presence_penalty=1.5),
    "frequency": SamplingParams(frequency_penalty=0.8),
    "repetition": SamplingParams(repetition_penalty=1.6),
    "everything": SamplingParams(
        temperature=1.3,
        top_k=30,
        top_p=0.95,
        repetition_penalty=1.2,
        presence_penalty=-0.5,
        frequency_penalty=0.3,
        logit_bias={9: 2.0},
    ),
    "greedy_edited": SamplingParams(temperature=0.0, repetition_penalty=3.0),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", sorted(CASES))
def test_distribution_equals_the_definition(name, device):
    params = CASES[name]
    row = logits_of(sum(map(ord, name))).to(device)
    fields = {"history": (1, 2, 2, 7, 7, 7, 9), "prompt_tokens": 2, "banned": (11, 12)}
    draws = [draw_of(params, position, **fields) for position in range(COUNT)]
    found = sample(row.expand(COUNT, -1), draws)
    counts = np.bincount([result.token for result in found], minlength=VOCAB)
    expected = reference_distribution(row[0], draws[0])
    assert counts[expected == 0.0].sum() == 0
    error = np.abs(counts / COUNT - expected)
    assert (error <= 5.0 * np.sqrt(expected * (1 - expected) / COUNT) + 1e-9).all()


@pytest.mark.parametrize("device", DEVICES)
def test_answers_do_not_depend_on_batch_mates(device):
    rng = random.Random(4)
    names = sorted(CASES)
    draws = [Draw(i, i % 3, i, CASES[rng.choice(names)], 1, (1, 2, 3, 2), (5,)) for i in range(64)]
    logits = logits_of(9, rows=64, vocab=3000).to(device)
    together = sample(logits, draws)
    for i in rng.sample(range(64), 20):
        assert sample(logits[i : i + 1], [draws[i]]) == [together[i]]
    order = rng.sample(range(64), 64)
    shuffled = sample(logits[order], [draws[i] for i in order])
    assert shuffled == [together[i] for i in order]


def test_nucleus_larger_than_the_candidates():
    """Nearly flat over 5,000 tokens: the first thousand hold a fraction of the mass."""
    row = 0.01 * logits_of(2, vocab=5000)
    params = SamplingParams(top_p=0.9)
    found = sample(row.expand(1000, -1), [draw_of(params, i) for i in range(1000)])
    expected = reference_distribution(row[0], draw_of(params))
    tokens = [result.token for result in found]
    assert all(expected[token] > 0 for token in tokens)
    assert len(set(tokens)) > 800


@pytest.mark.parametrize("device", DEVICES)
def test_equal_scores_are_drawn_alike_whatever_the_batch(device):
    row = torch.zeros(1, 3000, dtype=torch.bfloat16, device=device)
    three = draw_of(SamplingParams(top_k=3, seed=1))
    many = draw_of(SamplingParams(top_k=2000), 5)
    alone = sample(row, [three])[0]
    assert sample(row.expand(2, -1), [three, many])[0] == alone


@pytest.mark.parametrize("device", DEVICES)
def test_greedy_takes_the_first_of_the_best(device):
    row = torch.tensor([[0.0, 3.0, 3.0, 1.0]], device=device)
    assert sample(row, [draw_of(SamplingParams(temperature=0.0))])[0].token == 1


def test_logprobs_are_those_of_the_model_before_any_edit():
    row = logits_of(8)
    params = SamplingParams(temperature=0.3, top_k=1, logit_bias={17: 100.0}, logprobs=4)
    (result,) = sample(row, [draw_of(params)])
    raw = row.log_softmax(-1)[0]
    order = raw.argsort(descending=True).tolist()
    assert result.token == 17
    assert result.logprob.logprob == pytest.approx(float(raw[17]), abs=1e-5)
    assert result.logprob.rank == order.index(17) + 1
    assert [token for token, _ in result.logprob.top] == order[:4]
    assert [lp for _, lp in result.logprob.top] == pytest.approx(
        [float(raw[token]) for token in order[:4]], abs=1e-5
    )


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_are_not_finite_fail_alone(bad, temperature):
    logits = logits_of(3, rows=3)
    draws = [draw_of(SamplingParams(temperature=temperature, logprobs=1), i) for i in range(3)]
    expected = sample(logits, draws)
    logits[1, 20] = bad
    assert sample(logits, draws) == [expected[0], NOT_FINITE, expected[2]]


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"top_k": 700, "top_p": 0.99}])
def test_rows_that_are_bad_everywhere_fail_alone(bad, filters):
    """Their searches end outside of the last piece of the vocabulary."""
    logits = logits_of(3, rows=3, vocab=1100)
    draws = [draw_of(SamplingParams(**filters), i) for i in range(3)]
    expected = sample(logits, draws)
    logits[1] = bad
    assert sample(logits, draws) == [expected[0], NOT_FINITE, expected[2]]


def test_rows_that_draw_again_are_those_with_a_nucleus_larger_than_the_candidates():
    params = [SamplingParams(top_p=0.999, seed=i) for i in range(4)] + [SamplingParams(top_k=5)]
    logits = torch.cat([4.0 * logits_of(5, 2, 3000), 0.01 * logits_of(6, 3, 3000)])
    draws = [draw_of(each, place) for place, each in enumerate(params)]
    drawing = Drawing(logits, draws)
    given = drawing._coded.get().tolist()
    assert [token < 0 for token in given] == [False, False, True, True, False]
    results = drawing.results()
    assert [each.redrawn for each in results] == [False, False, True, True, False]
    assert results == [sample(logits[i : i + 1], [draws[i]])[0] for i in range(5)]


def test_a_row_with_every_token_banned_fails():
    draws = [draw_of(SamplingParams(), i, banned=tuple(range(VOCAB)) * i) for i in range(2)]
    found = sample(logits_of(3, rows=2), draws)
    assert isinstance(found[0], DrawResult) and found[1] == NOT_FINITE


def test_uniforms_are_uniform_and_differ_in_every_argument():
    counters = [(seed, index, place) for seed in (0, 7, -1) for index in range(4)
                for place in range(2000)]  # fmt: skip
    numbers = uniforms(counters)
    assert len(set(numbers)) == len(counters)
    assert ((numbers >= 0) & (numbers < 1)).all()
    histogram = np.histogram(numbers, bins=20, range=(0, 1))[0] / len(counters)
    assert np.abs(histogram - 0.05).max() < 0.008
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.02
    assert uniforms([(2**70 + 5, 0, 1)]) == uniforms([(2**70 % 2**64 + 5, 0, 1)])
