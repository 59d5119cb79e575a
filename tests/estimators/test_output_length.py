"""Predictors of the output length, on answers whose distribution is known."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from tandem.core.lengths import LEVELS, Asked
from tandem.estimators.learned_length import (
    MOST_NETWORKS,
    Projection,
    by_state,
    by_text,
    learned,
)
from tandem.estimators.length_choice import LengthChoice
from tandem.estimators.length_network import Shape, fit
from tandem.estimators.output_length import (
    MOST_KEYS,
    History,
    by_batch,
    by_traffic,
    pinball,
    pinballs,
)

CHAT = Asked("", "chat/completions", 512, 20, (0.0,) * 6)


def told(scores: float, **changes: object) -> Asked:
    return replace(CHAT, scores=(0.0, 0.0, 0.0, 0.0, scores, 0.0), **changes)  # type: ignore[arg-type]


def test_history_tells_kinds_of_requests_apart() -> None:
    history = by_traffic()
    for _ in range(20):
        history.observe(CHAT, 100)
        history.observe(replace(CHAT, endpoint="completions"), 10)
        history.observe(replace(CHAT, adapter="terse"), 3)
    assert history.predict(CHAT) == (100.0,) * 5
    assert history.predict(replace(CHAT, endpoint="completions")) == (10.0,) * 5
    assert history.predict(replace(CHAT, adapter="terse", max_tokens=9)) == (3.0,) * 5
    assert history.predict(replace(CHAT, adapter="new")) is None


def test_a_few_answers_say_nothing_and_old_ones_are_forgotten() -> None:
    history = by_traffic()
    for number in range(15):
        history.observe(CHAT, number)
    assert history.predict(CHAT) is None
    for _ in range(256):
        history.observe(CHAT, 50)
    assert history.predict(CHAT) == (50.0,) * 5


def test_a_batch_has_a_history_of_its_own() -> None:
    batches = by_batch()
    for _ in range(16):
        batches.observe(replace(CHAT, batch="one"), 7)
        batches.observe(CHAT, 100)
    assert batches.predict(replace(CHAT, batch="one")) == (7.0,) * 5
    assert batches.predict(CHAT) is None


def test_memory_is_bounded_whatever_comes() -> None:
    history, lexical = History("all", (lambda asked: asked.batch,)), by_text()
    for number in range(MOST_KEYS + 50):
        history.observe(replace(CHAT, batch=str(number)), 1)
        lexical.observe(replace(CHAT, adapter=str(number)), 1)
    assert len(history._recent) == MOST_KEYS
    assert len(lexical._traffic) == MOST_NETWORKS


def test_pinball_is_smallest_at_the_true_quantiles() -> None:
    lengths = np.random.default_rng(0).lognormal(4.0, 0.7, 4000)
    true = tuple(np.quantile(lengths, LEVELS))
    losses = pinballs(np.tile(true, (len(lengths), 1)), lengths)
    assert losses[:3] == pytest.approx([pinball(true, length) for length in lengths[:3]])
    for wrong in (0.8, 1.25):
        other = np.tile(np.array(true) * wrong, (len(lengths), 1))
        assert pinballs(other, lengths).mean() > losses.mean()


def test_a_network_learns_quantiles_that_depend_on_a_feature() -> None:
    rng = np.random.default_rng(1)
    features = rng.uniform(0.0, 1.0, (3000, 3))
    lengths = np.exp(2.0 + 3.0 * features[:, 1] + 0.5 * rng.standard_normal(3000))
    network = fit(features[:2000], np.maximum(lengths[:2000], 1.0), seed=3)
    found = network.predict(features[2000:])
    assert (np.diff(found, axis=1) >= 0.0).all()
    for level, column in zip(LEVELS, found.T, strict=True):
        assert (lengths[2000:] <= column).mean() == pytest.approx(level, abs=0.05)
    same = np.tile(np.quantile(lengths[:2000], LEVELS), (1000, 1))
    apart = lengths[2000:]
    assert pinballs(found, apart).mean() < 0.6 * pinballs(same, apart).mean()


def test_the_same_rows_give_the_same_network() -> None:
    rng = np.random.default_rng(2)
    features, lengths = rng.standard_normal((300, 4)), rng.integers(1, 99, 300).astype(float)
    first, second = (fit(features, lengths, shape=Shape((8,), 5)) for _ in range(2))
    assert (first.predict(features) == second.predict(features)).all()


def test_lexical_learns_from_scores_and_keeps_the_limit() -> None:
    lexical, rng = by_text(), np.random.default_rng(3)
    for _ in range(400):
        score = float(rng.integers(0, 9))
        lexical.observe(told(score), int(20 + 30 * score + rng.integers(0, 10)))
    assert lexical.due == [CHAT.traffic] and lexical.predict(told(1.0)) is None
    lexical.take(CHAT.traffic, learned(lexical.rows(CHAT.traffic), lexical.shape))
    assert lexical.due == []
    few, many = lexical.predict(told(1.0)), lexical.predict(told(8.0))
    assert few is not None and many is not None
    assert few[2] == pytest.approx(55, abs=20) and many[2] == pytest.approx(265, abs=50)
    cut = LengthChoice((lexical,)).predict(told(8.0, max_tokens=30)).quantiles["lexical"]
    assert max(cut) <= 30.0
    begun_s = time.process_time()
    for _ in range(100):
        lexical.predict(told(4.0))
    assert (time.process_time() - begun_s) / 100 < 0.002  # it takes 0.03 ms


def test_the_better_predictor_is_believed_after_a_while() -> None:
    lexical, rng = by_text(), np.random.default_rng(4)
    choice = LengthChoice((by_batch(), by_traffic(), lexical))
    assert choice.predict(CHAT).forecast is None
    sources = list[str]()
    for number in range(400):
        score = float(rng.integers(0, 9))
        predicted = choice.predict(told(score))
        sources.append(predicted.forecast.source if predicted.forecast else "none")
        choice.observe(predicted, int(20 + 30 * score + rng.integers(0, 10)))
        if number == 250:
            lexical.take(CHAT.traffic, learned(lexical.rows(CHAT.traffic), lexical.shape))
    assert sources[:16] == ["none"] * 16
    assert set(sources[16:251]) == {"history"}
    assert set(sources[270:]) == {"lexical"}
    errors = choice.errors()
    assert errors["lexical"].pinball < 0.5 * errors["history"].pinball
    assert errors["lexical"].absolute < errors["history"].absolute
    assert 0.3 < errors["history"].inside_50 < 0.7
    assert errors["history"].inside_90 > 0.8


def test_lines_of_a_batch_are_judged_apart() -> None:
    choice = LengthChoice((by_batch(), by_traffic()))
    line = replace(CHAT, batch="one")
    for _ in range(60):
        for asked, tokens in ((CHAT, 200), (line, 10)):
            choice.observe(choice.predict(asked), tokens)
    of_line, of_chat = choice.predict(line).forecast, choice.predict(CHAT).forecast
    assert of_line is not None and of_line.source == "batch" and of_line.quantile(0.5) == 10.0
    assert of_chat is not None and of_chat.source == "history"


def test_a_projection_is_the_same_for_all_servers_and_keeps_distances() -> None:
    rng = np.random.default_rng(5)
    states = rng.standard_normal((40, 576)).astype(np.float16)
    first, second = Projection(), Projection()
    kept = np.array([np.frombuffer(first(state.tobytes()), np.float16) for state in states])
    assert kept.shape == (40, 64)
    assert second(states[0].tobytes()) == first(states[0].tobytes())
    apart = np.linalg.norm(states[1:].astype(float) - states[0].astype(float), axis=1)
    found = np.linalg.norm(kept[1:].astype(float) - kept[0].astype(float), axis=1)
    assert found == pytest.approx(apart, rel=0.4) and found.mean() == pytest.approx(
        apart.mean(), rel=0.1
    )
    assert len(first(bytes(2 * 8192))) == 128, "a model of another width"
    large = np.full(576, 65504.0, np.float16).tobytes()
    assert np.isfinite(np.frombuffer(first(large), np.float16)).all()


def test_without_a_state_nothing_is_said_from_it() -> None:
    hidden, rng = by_state(), np.random.default_rng(6)
    for _ in range(250):
        kind = int(rng.integers(0, 2))
        numbers = np.full(64, 4.0 * kind) + rng.standard_normal(64)
        state = numbers.astype(np.float16).tobytes()
        hidden.observe(replace(CHAT, state=state), 20 + 200 * kind)
        hidden.observe(CHAT, 500)
    assert hidden.due == [CHAT.traffic]
    hidden.take(CHAT.traffic, learned(hidden.rows(CHAT.traffic), hidden.shape))
    assert hidden.predict(CHAT) is None
    long = hidden.predict(replace(CHAT, state=np.full(64, 4.0, np.float16).tobytes()))
    assert long is not None and long[2] == pytest.approx(220, rel=0.3)


def test_lines_of_batches_teach_nothing_about_chats() -> None:
    history, lexical = by_traffic(), by_text()
    line = replace(CHAT, batch="one")
    for asked, tokens, times in ((CHAT, 400, 250), (line, 2, 3000)):
        for _ in range(times):
            history.observe(asked, tokens)
            lexical.observe(asked, tokens)
    assert history.predict(CHAT) == (400.0,) * 5 and history.predict(line) == (2.0,) * 5
    other = replace(CHAT, endpoint="completions")
    assert history.predict(other) == (400.0,) * 5, "the adapter's chats, not its lines"
    assert set(lexical.due) == {CHAT.traffic, line.traffic}
    assert {tokens for _, tokens in lexical.rows(CHAT.traffic)} == {400}


def test_a_prediction_is_judged_by_what_it_says_for_the_limit() -> None:
    """Limits of 300 and 500 are of one size, and every answer reaches its own."""
    choice = LengthChoice((by_traffic(),))
    limits = replace(CHAT, max_tokens=300), replace(CHAT, max_tokens=500)
    for _ in range(30):
        for asked in limits:
            choice.observe(choice.predict(asked), asked.max_tokens)
    for predicted in [choice.predict(limits[0]) for _ in range(128)]:
        assert predicted.quantiles["history"] == (300.0,) * 5
        choice.observe(predicted, 300)
    assert choice.errors()["history"].absolute == 0.0


def test_the_state_is_read_beside_the_limit() -> None:
    hidden, rng = by_state(), np.random.default_rng(7)

    def asked(limit: int) -> Asked:
        state = rng.standard_normal(64).astype(np.float16).tobytes()
        return replace(CHAT, state=state, max_tokens=limit)

    for _ in range(400):
        for limit in (16, 512):
            hidden.observe(asked(limit), limit)
    hidden.take(CHAT.traffic, learned(hidden.rows(CHAT.traffic), hidden.shape))
    found = hidden.predict(asked(512))
    assert found is not None and found[2] > 256.0


def test_traffic_that_others_have_displaced_has_no_rows() -> None:
    lexical = by_text()
    for _ in range(200):
        lexical.observe(CHAT, 9)
    [due] = lexical.due
    for number in range(MOST_NETWORKS):
        lexical.observe(replace(CHAT, adapter=str(number)), 1)
    assert lexical.rows(due) == [] and lexical.due == []
