"""Answers of a file as a load: forecasts that saw nothing, and arrivals of the paper's minutes."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest

from tandem.bench import answers
from tandem.bench.answers import arrivals, read_answers, times
from tandem.bench.traces import TraceRecord, read_trace
from tandem.core.errors import InvalidRequest
from tandem.core.request import Request


def lengths_file(path: Path, count: int = 60) -> Path:
    """Half of the prompts are vague, and their answers are long."""
    rows = [
        {"input_tokens": 10 + place, "scores": [0.0, 0.0, 0.0, 5.0 * (place % 2), 0.0, 0.0],
         "output_tokens": 20 + 200 * (place % 2), "max_tokens": 256, "finish": "stop"}
        for place in range(count)
    ]  # fmt: skip
    path.write_bytes(gzip.compress("".join(f"{json.dumps(row)}\n" for row in rows).encode()))
    return path


def test_lengths_of_answers_are_a_trace_without_times(tmp_path):
    first, second, *_ = read_trace(lengths_file(tmp_path / "lengths.jsonl.gz"))
    assert first == TraceRecord(None, 10, 20, scores=(0.0,) * 6, max_tokens=256)
    assert second.scores[3] == 5.0 and second.output_tokens == 220


def test_forecasts_tell_long_answers_from_short_ones(tmp_path):
    found = read_answers(lengths_file(tmp_path / "lengths.jsonl.gz", 200))
    short, long = found[::2], found[1::2]
    assert max(each.expected for each in short) < min(each.expected for each in long)
    assert all(list(each.quantiles) == sorted(each.quantiles) for each in found)
    assert all(
        each.quantiles[0] >= 1.0 and each.quantiles[-1] <= each.most == 256 for each in found
    )


def test_without_scores_the_sizes_tell(tmp_path):
    """A table of lengths: long prompts have long answers."""
    path = tmp_path / "lengths.csv"
    rows = [f"{size},{size}" for size in (10, 11, 12, 13, 400, 410, 420, 430) for _ in range(25)]
    path.write_text("\n".join(["num_prefill_tokens,num_decode_tokens", *rows]))
    found = read_answers(path)
    assert len(found) == 200
    short, long = found[:100], found[100:]
    assert max(each.expected for each in short) < min(each.expected for each in long)


def test_one_prompt_without_scores_leaves_the_sizes_for_all(tmp_path):
    path = lengths_file(tmp_path / "lengths.jsonl.gz")
    row = {"input_tokens": 9, "scores": [], "output_tokens": 5, "max_tokens": 256}
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()) + json.dumps(row).encode()))
    assert len(read_answers(path)) == 61


def test_prompts_share_no_beginning():
    short = answers.Answer(2, 1, 1, (1.0,) * 5)
    prompts = {answers.arrival(short, n, 0.0).work.prompt for n in range(2500)}  # type: ignore[union-attr]
    assert len(prompts) == 2500
    longer = replace(short, input_tokens=9)
    assert len(answers.arrival(longer, 7, 0.0).work.prompt) == 9  # type: ignore[union-attr]
    assert answers.arrival(replace(short, input_tokens=1), 7, 0.0).work.prompt == (7,)  # type: ignore[union-attr]


def test_no_forecast_saw_its_answer(tmp_path, monkeypatch):
    seen: list[set[float]] = []

    class Nothing:
        def predict(self, features):
            own = {round(float(each), 6) for each in features[:, -2]}
            assert own and not own & seen[-1], "a prompt's length was learned from"
            return np.full((len(features), 5), 9.0)

    def fit(features, lengths):
        seen.append({round(float(each), 6) for each in features[:, -2]})
        return Nothing()

    monkeypatch.setattr(answers, "fit", fit)
    path = lengths_file(tmp_path / "lengths.jsonl.gz")
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()) * 2))  # each prompt twice
    assert len(read_answers(path)) == 120 and len(seen) == 5


def test_few_answers_are_refused(tmp_path):
    with pytest.raises(InvalidRequest, match="has 7 answers; at least 50"):
        read_answers(lengths_file(tmp_path / "lengths.jsonl.gz", 7))


def test_answers_of_equal_requests_are_refused(tmp_path):
    path = tmp_path / "lengths.csv"
    path.write_text("\n".join(["num_prefill_tokens,num_decode_tokens", *["9,5"] * 50]))
    with pytest.raises(InvalidRequest, match="all of the file's requests are alike"):
        read_answers(path)


def test_arrivals_come_at_each_rate_for_a_minute():
    found = times(2.0, Random(0))
    assert found == sorted(found) and found[-1] < 2.0 * 60.0 * len(answers.BETAS)
    assert len(found) == pytest.approx(sum(answers.BETAS), rel=0.1)


def test_requests_have_the_answers_lengths_and_forecasts(tmp_path):
    made = read_answers(lengths_file(tmp_path / "lengths.jsonl.gz"))
    load = arrivals(made, [0.1 * place for place in range(80)], Random(0))
    works = [each.work for each in load if isinstance(each.work, Request)]
    assert len({work.request_id for work in works}) == len({work.prompt for work in works}) == 80
    again = [each.work for each in arrivals(made, [0.0] * 60, Random(0))]
    assert [replace(work, arrival_s=0.0) for work in works[:60]] == again
    lengths = sorted(work.sampling.max_tokens for work in works[:60])
    assert lengths == sorted(each.output_tokens for each in made)
    assert {work.length.source for work in works if work.length} == {"lexical"}
