"""The study of output lengths, on rows whose answer is known."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.lengths.collect import Ask, answers, resume
from benchmarks.lengths.figures import figures, given, in_order, spearman
from benchmarks.lengths.ladder import folds, lengths_of, predicted, steps
from benchmarks.lengths.page import Model, page
from benchmarks.lengths.prompts import Prompt, prompts
from benchmarks.lengths.rows import Row, keep, kept, made
from benchmarks.reporting.bootstrap import Interval
from tandem.services.lengths.lexicon import Lexicon
from tandem.services.lengths.scores import Scorer

RNG = np.random.default_rng(0)


def rows(count: int) -> list[Row]:
    """Lengths that follow the fifth score, and a source's own level."""
    found = []
    for number in range(count):
        scores = tuple(float(each) for each in RNG.integers(0, 8, 6))
        source, level = ("short", 10) if number % 2 else ("long", 100)
        tokens = level + int(40 * scores[4] + RNG.integers(0, 10))
        found.append(Row(source, number, int(RNG.integers(5, 90)), scores, tokens, 512))
    return found


def test_prompts_are_read_once_each_and_end_with_a_user(tmp_path: Path) -> None:
    lengths, dialogue = tmp_path / "lengths", tmp_path / "dialogue"
    for folder in (lengths / "vicuna_bench", lengths / "self_instruct", lengths / "oasst_lottery"):
        folder.mkdir(parents=True)
    dialogue.mkdir()
    (lengths / "mt_bench_question.jsonl").write_text('{"turns": ["Why?", "Again."]}\n')
    twice = '{"text": "How?"}\n{"text": "How?"}\n'
    (lengths / "vicuna_bench" / "question.jsonl").write_text(twice)
    instructed = {"instruction": "Shorten this.", "instances": [{"input": "A long text."}]}
    for name in ("seed_tasks", "user_oriented_instructions"):
        path = lengths / "self_instruct" / f"{name}.jsonl"
        path.write_text(json.dumps(instructed) + "\n")
    asked = {"prompts": [{"prompt": "Who?"}]}
    (lengths / "oasst_lottery" / "a_deepseek.json").write_text(json.dumps(asked))
    for name in ("arena_hard_v0.1/question.jsonl", "arena_hard_v2.0/question.jsonl.gz"):
        path = lengths / name
        path.parent.mkdir()
        text = b'{"prompt": "What?"}\n'
        path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    said = 'Best Generated Conversation\n"User 1: Hi!\nUser 2: Hello!\nUser 1: Well?"\n""\n'
    (dialogue / "synthetic_persona_chat_valid.csv.gz").write_bytes(gzip.compress(said.encode()))
    topics = {"t": {"content": [{"message": "Football?"}]}}
    (dialogue / "topical_chat_valid_freq.json.gz").write_bytes(
        gzip.compress(json.dumps(topics).encode())
    )
    (dialogue / "taskmaster_4_data_07.json.gz").write_bytes(gzip.compress(b"[]"))
    chat = [{"conversations": [{"from": "human", "value": "Hey"}, {"from": "gpt", "value": "Yo"}]}]
    (dialogue / "fastchat_dummy_conversation.json").write_text(json.dumps(chat))

    found = prompts(tmp_path)
    assert found == prompts(tmp_path)
    by_source = {prompt.source: prompt for prompt in found}
    assert len(found) == len(by_source) == 8  # one question is there twice, one task too
    assert by_source["self_instruct"].text == "Shorten this.\n\nA long text."
    assert by_source["mt_bench"].text == "Why?"
    assert all(prompt.messages[-1]["role"] == "user" for prompt in found)
    assert all(prompt.messages[0]["role"] == "user" for prompt in found)


def test_rows_have_no_text_and_are_read_as_they_were(tmp_path: Path) -> None:
    prompt = Prompt("oasst_1k", 7, ({"role": "user", "content": "Explain the history of art."},))
    answer = {"input_tokens": 9, "output_tokens": 120, "finish": "stop"}
    own = made([prompt], {prompt.key: answer}, 512, Scorer(Lexicon.load()))
    keep(tmp_path / "rows.jsonl.gz", own)
    assert kept(tmp_path / "rows.jsonl.gz") == own
    text = gzip.decompress((tmp_path / "rows.jsonl.gz").read_bytes()).decode()
    assert "art" not in text.lower().replace("start", "")
    assert own[0].output_tokens == 120 and own[0].scores[4] > 0


def test_collection_goes_on_from_the_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ask, results = Ask("smollm2"), tmp_path / "rows.jsonl.gz"
    resume(ask, results)
    assert not answers(ask.path)  # the model has no results yet
    some = rows(3)
    keep(results, some)
    resume(ask, results)
    lengths = {key: answer["output_tokens"] for key, answer in answers(ask.path).items()}
    assert lengths == {row.key: row.output_tokens for row in some}
    ask.path.write_text('{"key": "a/1"}\n')
    resume(ask, results)  # this machine's own answers stay
    assert list(answers(ask.path)) == ["a/1"]


def test_a_line_that_a_crash_cut_is_asked_again(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text('{"key": "a/1", "output_tokens": 5}\n{"key": "a/2", "outp')
    assert list(answers(path)) == ["a/1"]
    assert Ask("smollm2").path.name == "answers-smollm2.jsonl"


def test_no_prompt_is_on_both_sides() -> None:
    some = rows(50)
    several = [*some, *(replace(row, output_tokens=1) for row in some)]
    judged = list[int]()
    for learned, there in folds(several, seed=0):
        keys = [{several[place].key for place in places} for places in (learned, there)]
        assert not keys[0] & keys[1]
        judged += there.tolist()
    assert sorted(judged) == list(range(100))


def test_the_ladder_finds_what_lengths_follow() -> None:
    some = rows(600)
    noise = RNG.standard_normal((600, 80))
    lengths = lengths_of(some)
    noise[:, :20] += ((lengths - lengths.mean()) / lengths.std())[:, None]
    states = {
        row.key: vector.astype(np.float16) for row, vector in zip(some, 3.0 * noise, strict=True)
    }
    found = {
        name: figures(predicted(step, some), lengths)
        for name, step in steps(states).items()
        if name in ("history", "input length", "weighted rules", "lexical", "hidden")
    }
    assert found["history"].spearman == pytest.approx(0.0, abs=0.2)
    assert found["weighted rules"].pinball < 0.9 * found["input length"].pinball
    assert found["lexical"].pinball < 0.9 * found["history"].pinball
    assert found["hidden"].spearman > 0.8 > abs(found["input length"].spearman)
    for each in found.values():
        assert 0.35 < each.inside_50 < 0.65 and 0.7 < each.inside_90 < 0.98


def test_correlation_is_of_ranks_with_ties() -> None:
    left = np.array([1.0, 2.0, 2.0, 4.0])
    assert spearman(left, np.exp(left)) == pytest.approx(1.0)
    assert spearman(left, -left) == pytest.approx(-1.0)
    assert spearman(np.ones(4), left) == 0.0


def test_what_is_made_already_makes_the_rest_better_known() -> None:
    some = rows(400)
    quantiles = predicted(steps({})["history"], some)
    found = given(quantiles, some, 200)
    assert found is not None
    without, with_it, left = found
    assert left == sum(row.output_tokens > 200 for row in some)
    assert with_it.pinball < without.pinball
    assert given(quantiles, some, 10_000) is None


def test_what_is_believed_is_about_as_good_as_the_best() -> None:
    found = in_order(rows(700))
    assert found.answers > 300
    assert found.pinball < 1.05 * min(found.alone.values())
    assert sum(found.share.values()) == pytest.approx(1.0)


def test_the_page_says_what_was_not_shown() -> None:
    some = rows(60)
    each = figures(predicted(steps({})["history"], some), lengths_of(some))
    ladder = {"history": each, "lexical": each, "hidden": each}
    claims = {
        ("lexical", "history"): Interval(-1.0, -3.0, 1.0),
        ("hidden", "lexical"): Interval(-5.0, -6.0, -4.0),
    }
    model = Model("own", 60, 60, 0.25, 99.0, ladder, claims)
    text = page("How.", {"own": model}, (0.1, 0.25))
    assert "lexical against history" in text and "no difference is shown" in text
    assert "hidden is better" in text and "goal for the mean: 0.3 ms, met" in text
    assert "25% ended at the limit" in text
