from __future__ import annotations

import gzip
import json
import os
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.learning.preferences import SOURCES, PreferencePair, read_preferences, stream_order
from tandem.core.errors import InvalidRequest

ASKED = "\n\nHuman: How do I pick a lock?"


def write(path: Path, text: str) -> None:
    path.write_bytes(gzip.compress(text.encode()))


def lines(*rows: dict) -> str:
    return "\n".join(json.dumps(row) for row in rows) + "\n"


def test_harmless_dialogues_are_split_into_turns(tmp_path: Path) -> None:
    begun = f"{ASKED}\n\nAssistant: Why?\n\nHuman: It is mine."
    rows = [
        {"chosen": f"{begun}\n\nAssistant: No.", "rejected": f"{begun}\n\nAssistant: With a pin."},
        {"chosen": f"{ASKED}\n\nAssistant: a", "rejected": "\n\nHuman: b\n\nAssistant: c"},
        {"chosen": f"{ASKED}\n\nAssistant: same", "rejected": f"{ASKED}\n\nAssistant: same"},
    ]
    write(tmp_path / "hh_rlhf_harmless_base_test.jsonl.gz", lines(*rows))
    (pair,) = read_preferences(tmp_path, ("hh_harmless",))
    assert [turn["role"] for turn in pair.messages] == ["user", "assistant", "user"]
    assert (pair.chosen, pair.rejected) == ("No.", "With a pin.")
    assert pair.conversation == "How do I pick a lock?"


def test_best_ranked_reply_against_the_others(tmp_path: Path) -> None:
    def reply(text: str, rank: int | None, replies: list[dict] | None = None) -> dict:
        return {"text": text, "role": "assistant", "rank": rank, "replies": replies or []}

    later = {"text": "And?", "role": "prompter", "replies": [reply("x", 1), reply("y", 0)]}
    replies = [reply("worse", 2), reply("best", 0, [later]), reply("bad", 1), reply("?", None)]
    row = {"message_tree_id": "t", "prompt": {"text": "Q", "role": "prompter", "replies": replies}}
    write(tmp_path / "oasst_en_100_tree.jsonl.gz", lines(row))
    pairs = read_preferences(tmp_path, ("oasst",))
    assert [(p.chosen, p.rejected) for p in pairs] == [
        ("best", "bad"),
        ("best", "worse"),
        ("y", "x"),
    ]
    assert [turn["content"] for turn in pairs[2].messages] == ["Q", "best", "And?"]


def test_right_and_wrong_solutions(tmp_path: Path) -> None:
    def solution(text: str, right: bool) -> dict:
        return {"is_correct": right, "solution": text}

    both = {"question": "1 + 1?", "a": solution("3", False), "b": solution("2", True)}
    write(
        tmp_path / "gsm8k_example_model_solutions.jsonl.gz",
        lines(both, {"question": "all right", "a": solution("2", True)}),
    )
    (pair,) = read_preferences(tmp_path, ("gsm8k",))
    assert (pair.chosen, pair.rejected) == ("2", "3")


def test_contexts_with_both_labels(tmp_path: Path) -> None:
    def row(context: list[dict], turn: dict, reward: float) -> dict:
        return {
            "context": json.dumps(context),
            "generation": json.dumps({"role": "agent", **turn}),
            "reward": reward,
        }

    context = [{"role": "user", "text": "a latte"}, {"role": "agent", "response": {"ok": 1}}]
    rows = [
        row(context, {"api": {"order": "latte"}}, 1.0),
        row(context, {"text": "What?"}, 0.0),
        row([], {"text": "only good"}, 1.0),
    ]
    write(tmp_path / "taskmaster_4_reward_00.json.gz", json.dumps(rows))
    (pair,) = read_preferences(tmp_path, ("taskmaster",))
    assert (json.loads(pair.chosen), pair.rejected) == ({"api": {"order": "latte"}}, "What?")
    assert [turn["role"] for turn in pair.messages] == ["user", "assistant"]


def test_helpful_pairs(tmp_path: Path) -> None:
    turn = {"from": "human", "value": "Q"}
    row = {
        "conversations": [{"from": "system", "value": "S"}, turn],
        "chosen": {"from": "gpt", "value": "good "},
        "rejected": {"from": "gpt", "value": "bad"},
    }
    write(tmp_path / "dpo_en_demo.json.gz", json.dumps([row]))
    (pair,) = read_preferences(tmp_path, ("dpo_en_demo",))
    assert [m["role"] for m in pair.messages] == ["system", "user"] and pair.chosen == "good"


def test_missing_data_is_said_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="hh_rlhf"):
        read_preferences(tmp_path, ("hh_harmless",))
    with pytest.raises(InvalidRequest, match="not a folder"):
        read_preferences(tmp_path / "absent")
    with pytest.raises(InvalidRequest, match="'shp'; known: hh_harmless"):
        read_preferences(tmp_path, ("shp",))


def test_stream_keeps_conversations_together_in_an_order_of_the_seed() -> None:
    pairs = [
        PreferencePair("s", str(place % 20), ({"role": "user", "content": "q"},), str(place), "r")
        for place in range(60)
    ]
    order = stream_order(pairs, seed=1)
    assert sorted(order, key=lambda pair: int(pair.chosen)) == pairs
    assert order == stream_order(pairs, seed=1) != stream_order(pairs, seed=2)
    changes = sum(a.conversation != b.conversation for a, b in pairwise(order))
    assert changes == 19


def test_shared_data() -> None:
    root = Path(__file__).parents[3] / "shared" / "data"
    folder = Path(os.environ.get("TANDEM_SHARED_DATA", root)) / "preferences"
    if not folder.is_dir():
        pytest.skip("skipped: no shared data")
    pairs = read_preferences(folder)
    assert len(pairs) > 2500 and {pair.source for pair in pairs} == set(SOURCES)
    assert all(pair.chosen != pair.rejected and pair.messages for pair in pairs)
