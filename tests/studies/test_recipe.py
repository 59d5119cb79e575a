"""The study of recipes: tries, tastes, and a row of a real run."""

from __future__ import annotations

import json

import pytest
import typer

from benchmarks.recipe.__main__ import RESULTS, Study, Try, main, run, table
from benchmarks.recipe.material import HELD, TASTES, TAUGHT

OWN = (
    "Elephants are the largest animals on land. They eat leaves, bark and fruit. They live in"
    " herds, which the oldest of them leads."
)


def test_a_try_is_read():
    tried = Try.parse("pirate dpo 12 3e-4 5 7")
    assert tried.taste.name == "pirate"
    assert (tried.kind, tried.samples, tried.learning_rate) == ("dpo", 12, 3e-4)
    assert (tried.rpo_alpha, tried.epochs) == (5.0, 7)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("privateer dpo 12 1e-3 5 7", "privateer"),
        ("pirate ppo 12 1e-3 5 7", "ppo"),
        ("pirate dpo 12", "pirate dpo 12"),
        ("pirate dpo twelve 1e-3 5 7", "twelve"),
        ("pirate dpo 41 1e-3 5 7", "41"),
        ("pirate dpo 12 0 5 7", "learning rate"),
        ("pirate dpo 12 1e-3 -1 7", "rpo_alpha"),
        ("pirate dpo 12 1e-3 5 0", "pirate dpo 12 1e-3 5 0"),
    ],
)
def test_a_try_that_cannot_be_made_is_refused(text, named):
    with pytest.raises(ValueError, match=named):
        Try.parse(text)


def test_a_wrong_try_is_named_before_a_model_is_loaded():
    with pytest.raises(typer.BadParameter, match="ppo"):
        main(["pirate dpo 12 1e-3 5 7", "pirate ppo 12 1e-3 5 7"], model="no-such-model")


def test_a_row_names_its_machine(tmp_path):
    out = tmp_path / "rows.jsonl"
    main(["pirate sft 8 1e-3 5 1"], model="demo", threads=1, out=out)
    assert json.loads(out.read_text(encoding="utf-8"))["machine"].startswith("cpu-")


@pytest.mark.parametrize(
    "taste", [each for each in TASTES if each.good], ids=lambda each: each.name
)
def test_a_good_taste_is_told_from_the_plain_answer(taste):
    assert taste.shows(taste.turn(OWN))
    assert not taste.shows(OWN)


def test_no_prompt_that_is_asked_was_taught():
    assert not set(HELD) & set(TAUGHT)


@pytest.mark.parametrize("kind", ["dpo", "kto"])
def test_each_epoch_is_measured_and_changes_the_model(kind):
    study = Study("demo", threads=1)
    rows = list(run(study, Try.parse(f"pirate {kind} 8 1e-3 5 2"), "tried"))
    assert [row["steps"] for row in rows] == [1, 2]
    assert all(row["read"] == 36 for row in rows)
    assert rows[0]["chosen_base"] == rows[1]["chosen_base"]
    assert 0.0 < rows[0]["chosen_gain"] < rows[1]["chosen_gain"]
    assert table([{**row, "machine": "here"} for row in rows]).count("| here |") == 2


def test_the_committed_rows_make_a_table():
    rows = [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]
    assert len(table(rows).splitlines()) == 2 + len(rows)
