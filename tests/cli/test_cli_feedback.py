"""`tandem feedback import` and `export` against a server over the scripted engine."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner, Result

from fake_engine import FakeEngine
from learning_world import CANARY
from patience import PATIENCE_S, eventually
from serving import live, make_app
from tandem.cli import app
from tandem.cli.remote import Remote, Unreachable
from tandem.config import AdapterConfig, LearningConfig, ServerConfig

RUNNER = CliRunner(env={"COLUMNS": "200"})
TURNS = [{"role": "user", "content": "How are you?"}]
LINES: list[dict[str, Any]] = [
    {"messages": TURNS, "completion": "Fine \u0000.", "rating": 0.25, "user": "ann", "weight": 2.0},
    {"messages": TURNS, "preference": {"chosen": "Fine.", "rejected": "What?"}, "adapter": "other"},
    {"prompt": "p", "demonstration": "x", "completion": "y", "comment": "hm"},
    {"prompt": "p", "comment": "only words"},
]


@pytest.fixture
def url() -> Iterator[str]:
    with live(make_app(FakeEngine(), learning=LearningConfig(batch_samples=1000))) as address:
        yield f"{address}/v1"


def run(url: str, *words: str) -> Result:
    return RUNNER.invoke(app, ["feedback", *words, "--url", url])


def stored(url: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = httpx.get(f"{url}/feedback", params={"limit": 100}).json()["data"]
    return found


def write(file: Path, lines: list[Any]) -> str:
    file.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    return str(file)


def test_importing_twice_stores_once(url: str, tmp_path: Path) -> None:
    file = write(tmp_path / "in.jsonl", [*LINES, LINES[0]])
    for _ in range(2):
        done = run(url, "import", file, "--adapter", "formal", "--concurrency", "3")
        assert done.exit_code == 0 and "5 of 5 lines are stored" in done.output, done.output
        assert len(stored(url)) == 5  # the line that comes twice is stored twice
    assert sorted(item["adapter"] for item in stored(url)) == ["formal"] * 4 + ["other"]


def test_pipes_are_read_and_written_once(url: str, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    Thread(target=write, args=(pipe, LINES), daemon=True).start()
    done = run(url, "import", str(pipe), "--adapter", "formal")
    assert done.exit_code == 0 and "4 of 4 lines are stored" in done.output, done.output
    read: list[str] = []
    reader = Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    done = run(url, "export", str(pipe))
    reader.join(timeout=PATIENCE_S)
    assert len(read[0].splitlines()) == 4
    assert "4 lines in" in done.stderr and not done.stdout


def test_lines_with_mistakes_are_told_and_the_others_stored(url: str, tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text(f'nonsense\n[1]\n{{"prompt": "p"}}\n{json.dumps(LINES[3])}\n')
    done = run(url, "import", str(file), "--adapter", "formal")
    assert done.exit_code == 1 and "1 of 4 lines are stored" in done.output
    assert all(f"line {number}: " in done.output for number in (1, 2, 3))
    assert run(url, "import", str(tmp_path / "absent")).exit_code == 1


def test_an_export_can_be_imported(url: str, tmp_path: Path) -> None:
    run(url, "import", write(tmp_path / "in.jsonl", LINES), "--adapter", "formal")
    out = tmp_path / "out.jsonl"
    assert "4 lines in" in run(url, "export", str(out)).output
    before = {item["id"]: item for item in stored(url)}
    with live(make_app(FakeEngine(), learning=LearningConfig(batch_samples=1000))) as address:
        copy = f"{address}/v1"
        assert run(copy, "import", str(out)).exit_code == 0
        after = {item["id"]: item for item in stored(copy)}
    changing = {"created_at", "samples"}
    for name, item in before.items():
        same = {key: value for key, value in item.items() if key not in changing}
        assert {key: after[name][key] for key in same} == same
        kinds = [[s["kind"] for s in one["samples"]] for one in (item, after[name])]
        assert kinds[0] == kinds[1]


SIGNALS: list[dict[str, Any]] = [
    {"signal": {"type": "regenerate"}, "weight": 3.0, "user": "ann"},
    {"signal": {"type": "regenerate", "text": "other"}},
    {"signal": {"type": "edit", "text": "x y z!"}},
    {"signal": {"type": "edit", "text": " x y z"}, "user": "bob"},
    {"signal": {"type": "edit", "text": "x"}, "completion": ""},
    {"signal": {"type": "skip"}, "weight": 0.1},
    {"signal": {"type": "rephrase"}},
    {"signal": {"type": "dwell_time", "seconds": 0.01}, "user": "ann"},
    {"signal": {"type": "dwell_time", "seconds": 0.5}, "user": "bob"},
    {"signal": {"type": "dwell_time", "seconds": 99.0}, "weight": 10.0},
    {"rating": False},
]


def test_exported_signals_are_signals_again_and_overrule_no_rating(
    url: str, tmp_path: Path
) -> None:
    about = {"messages": TURNS, "completion": "x y z"}
    for line in SIGNALS:
        httpx.post(f"{url}/feedback", json={"adapter": "a", **about, **line}).raise_for_status()
    out = tmp_path / "out.jsonl"
    assert "11 lines in" in run(url, "export", str(out)).output
    names = ("signal", "kind", "chosen", "rejected", "rating", "superseded_by")

    def said(address: str) -> dict[str, tuple[Any, ...]]:
        return {
            each["id"]: (*(each[name] for name in names), round(each["weight"], 6))
            for each in stored(address)
        }

    with live(make_app(FakeEngine(), learning=LearningConfig(batch_samples=1000))) as address:
        assert run(f"{address}/v1", "import", str(out)).exit_code == 0
        assert said(f"{address}/v1") == said(url)


def test_an_export_is_known_to_its_own_server_unless_it_was_changed(
    url: str, tmp_path: Path
) -> None:
    run(url, "import", write(tmp_path / "in.jsonl", LINES), "--adapter", "formal")
    out = tmp_path / "out.jsonl"
    run(url, "export", str(out))
    done = run(url, "import", str(out))
    assert done.exit_code == 0 and "4 of 4 lines are stored" in done.output, done.output
    assert len(stored(url)) == 4
    first, *others = map(json.loads, out.read_text().splitlines())
    write(out, [{**first, "comment": "other words"}, *others])
    done = run(url, "import", str(out))
    assert done.exit_code == 1 and "other feedback was sent with this id" in done.output


def test_the_later_of_two_lines_about_an_answer_counts(url: str, tmp_path: Path) -> None:
    lines = [
        {"prompt": f"p{number}", "completion": "x", "rating": rating, "user": "ann"}
        for number in range(20)
        for rating in (True, False)
    ]
    file = write(tmp_path / "in.jsonl", lines)
    assert run(url, "import", file, "--adapter", "a", "--concurrency", "8").exit_code == 0
    states = {(item["rating"], item["samples"][0]["state"]) for item in stored(url)}
    assert states == {(1.0, "invalid"), (0.0, "accepted")}
    out = tmp_path / "out.jsonl"
    assert "20 lines in" in run(url, "export", str(out)).output
    assert {json.loads(line)["rating"] for line in out.read_text().splitlines()} == {0.0}


def test_an_import_tells_what_waits(tmp_path: Path) -> None:
    config = LearningConfig(batch_samples=1000)
    with live(make_app(FakeEngine(), adapters=AdapterConfig(max_loaded=1), learning=config)) as at:
        file = write(tmp_path / "in.jsonl", LINES)
        done = run(f"{at}/v1", "import", file, "--adapter", "formal", "--concurrency", "1")
    assert done.exit_code == 0 and "4 of 4 lines are stored" in done.output
    assert "1 of them wait: 1 adapters are loaded or about to be, and 'other'" in done.output


def test_an_export_goes_on_where_it_ended(url: str, tmp_path: Path) -> None:
    run(url, "import", write(tmp_path / "in.jsonl", LINES), "--adapter", "formal")
    out = tmp_path / "out.jsonl"
    run(url, "export", str(out))
    whole = out.read_text()
    lines = whole.splitlines(keepends=True)
    out.write_text("".join(lines[:2]) + lines[2][:10])
    run(url, "export", str(out))
    assert out.read_text() == whole
    assert "1 lines in" in run(url, "export", str(tmp_path / "one"), "--user", "ann").output


def test_one_file_teaches_several_adapters(url: str, tmp_path: Path) -> None:
    file = write(tmp_path / "in.jsonl", [*LINES, LINES[0]])
    for adapter in ("a", "b", "a", "b"):
        done = run(url, "import", file, "--adapter", adapter)
        assert done.exit_code == 0, done.output
    # The line that names its adapter is one feedback, whatever the others are given to.
    assert sorted(item["adapter"] for item in stored(url)) == [*"aaaabbbb", "other"]


def said(url: str) -> list[tuple[Any, ...]]:
    """What is stored, without ids and times."""
    names = ("kind", "messages", "prompt", "chosen", "rejected", "rating", "weight")
    return sorted([tuple(item[name] for name in names) for item in stored(url)], key=str)


def test_lines_that_are_no_text_are_named_and_the_others_stored(url: str, tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    good = [json.dumps({"prompt": f"p{number}", "rating": True}).encode() for number in range(3)]
    bad = [b'{"prompt": "\xff", "rating": true}', b'{"prompt": "\\ud83d", "rating": true}']
    worse = [b'{"prompt": "p", "rating": NaN}', b"[" * 100_000]
    completed = [line.replace(b"true", b'true, "completion": "x"') for line in (*good, *bad)]
    lines = [*completed[:1], completed[3], completed[1], completed[4], *worse, completed[2]]
    file.write_bytes(b"\xef\xbb\xbf" + b"\n".join(lines))
    done = run(url, "import", str(file), "--adapter", "formal")
    assert done.exit_code == 1 and "3 of 7 lines are stored" in done.output, done.output
    assert "line 2: not UTF-8: invalid start byte at byte 13" in done.output
    assert "line 4: half of a surrogate pair: '\\ud83d'" in done.output
    assert "line 5: not JSON: NaN" in done.output
    assert "line 6: not JSON: nested too deeply" in done.output
    assert sorted(item["prompt"] for item in stored(url)) == ["p0", "p1", "p2"]


USER = [{"role": "user", "content": "Hi"}]
YES, NO = ([{"role": "assistant", "content": text}] for text in ("Yes.", "No."))
PAIR = ("preference", USER, None, "Yes.", "No.", None, 1.0)
ROWS: list[tuple[dict[str, Any], tuple[Any, ...]]] = [
    ({"prompt": "Hi", "chosen": "Yes.", "rejected": "No.", "score": 3, "rating": 4.5}, PAIR),
    ({"prompt": USER, "chosen": YES, "rejected": NO, "comment": "of the data set"}, PAIR),
    ({"chosen": [*USER, *YES], "rejected": [*USER, *NO]}, PAIR),
    (
        {
            "input": {"messages": USER},
            "preferred_output": YES,
            "non_preferred_output": NO,
            "weight": 0.5,
        },
        (*PAIR[:-1], 0.5),
    ),
    (
        {"prompt": "Hi", "completion": "Yes.", "id": 7},
        ("demonstration", USER, None, "Yes.", None, None, 1.0),
    ),
    ({"messages": [*USER, *YES]}, ("demonstration", USER, None, "Yes.", None, None, 1.0)),
    (
        {"prompt": USER, "completion": YES, "label": False},
        ("rating", USER, None, "Yes.", None, 0.0, 1.0),
    ),
]


@pytest.mark.parametrize(("row", "meaning"), ROWS)
def test_rows_of_training_files_are_feedback(
    url: str, tmp_path: Path, row: dict[str, Any], meaning: tuple[Any, ...]
) -> None:
    done = run(url, "import", write(tmp_path / "in.jsonl", [row]), "--adapter", "formal")
    assert done.exit_code == 0, done.output
    assert said(url) == [meaning]
    for name in ("score", "rating", "comment", "id"):
        assert (f"{name} (1 lines)" in done.output) == (name in row)


def test_prompts_of_rows_stay_texts_if_wanted(url: str, tmp_path: Path) -> None:
    file = write(tmp_path / "in.jsonl", [ROWS[0][0]])
    assert run(url, "import", file, "--adapter", "formal", "--raw").exit_code == 0
    assert said(url) == [("preference", None, "Hi", "Yes.", "No.", None, 1.0)]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"chosen": "a", "rejected": "b"}, "'chosen' needs a 'prompt'"),
        ({"prompt": "p", "chosen": "a"}, "'rejected' must be a text or a list"),
        ({"prompt": 1, "chosen": "a", "rejected": "b"}, "'prompt' must be a text"),
        ({"chosen": [*USER, *YES], "rejected": [*NO]}, "'rejected' needs a 'prompt'"),
        ({"chosen": [*USER, *YES], "rejected": [*TURNS, *NO]}, "answer different prompts"),
        ({"prompt": USER, "completion": USER}, "'completion' must end with an assistant's"),
        ({"prompt": "p", "completion": "x", "label": "yes"}, "'label' must be true or false"),
        ({"text": "x"}, "says nothing"),
    ],
)
def test_rows_that_say_nothing_are_told(
    url: str, tmp_path: Path, row: dict[str, Any], problem: str
) -> None:
    done = run(url, "import", write(tmp_path / "in.jsonl", [row]), "--adapter", "formal")
    assert done.exit_code == 1 and problem in done.output, done.output


def test_an_export_does_not_go_on_with_another_file(url: str, tmp_path: Path) -> None:
    out = tmp_path / "notes.txt"
    out.write_text("my notes\n")
    done = run(url, "export", str(out))
    assert done.exit_code == 1 and "does not end as an export does" in done.output
    assert out.read_text() == "my notes\n"
    for notes in ('{"my": "notes"}', "a\nb", "x"):
        out.write_text(notes)
        assert run(url, "export", str(out)).exit_code == 1
        assert out.read_text() == notes
    out.write_text('{"feedba')  # the first line of an export, cut off
    assert run(url, "export", str(out)).exit_code == 0 and "feedba" not in out.read_text()
    assert run(url, "export", str(tmp_path)).exit_code == 1


def test_an_import_tells_what_teaches_nothing_and_when_the_rest_is_learned(
    url: str, tmp_path: Path
) -> None:
    long = {"messages": TURNS, "demonstration": " ".join(map(str, range(5000)))}
    shown = {"messages": TURNS, "demonstration": "Fine."}
    done = run(url, "import", write(tmp_path / "in.jsonl", [long, shown]), "--adapter", "formal")
    assert done.exit_code == 0 and "2 of 2 lines are stored" in done.output
    assert re.search(r"1 of them teach nothing: .* are more than the model", done.output), (
        done.output
    )
    told = (
        r"formal: a version begins in 10 min, or soon after 999 more \(tandem adapters watch formal"
    )
    assert re.search(told, done.output)


def test_what_was_learned_before_can_be_sent_as_new_feedback(tmp_path: Path) -> None:
    canary = tmp_path / "canary.jsonl"
    canary.write_text(CANARY)
    config = LearningConfig(
        canary_file=str(canary), held_out=0.0, version_wait_s=0.0, gate="always"
    )
    file = write(tmp_path / "in.jsonl", [{"messages": TURNS, "demonstration": "Fine."}])
    with live(make_app(FakeEngine(), learning=config)) as at:
        url = f"{at}/v1"

        def imported(*more: str) -> str:
            done = run(url, "import", file, "--adapter", "formal", *more)
            assert done.exit_code == 0 and "1 of 1 lines are stored" in done.output
            return done.output

        assert "not new" not in imported()
        eventually(lambda: "1 of them are not new: version 1 learned from it" in imported())
        assert "--attempt 2" in imported() and len(stored(url)) == 1
        for _ in range(2):  # the same attempt is one feedback
            imported("--attempt", "2")
            assert len(stored(url)) == 2
        eventually(lambda: "--attempt 3" in imported("--attempt", "2"))


def test_each_api_key_may_import_a_file(tmp_path: Path) -> None:
    """As an administrator does for others, or after a server was given keys."""
    file = write(tmp_path / "in.jsonl", [*LINES, {**LINES[0], "adapter": "formal"}])
    keys = tmp_path / "keys.toml"
    rows = [f'[[keys]]\nkey = "key-{name}"\ntrain = ["*"]\n' for name in ("ann", "bob")]
    keys.write_text("".join(rows))
    server = ServerConfig(api_key_file=str(keys))
    with live(make_app(FakeEngine(), server)) as at:
        for name in ("ann", "bob", "ann"):
            words = ("import", file, "--adapter", "formal", "--api-key", f"key-{name}")
            done = run(f"{at}/v1", *words)
            assert done.exit_code == 0 and "5 of 5 lines are stored" in done.output, done.output
            seen = {"Authorization": f"Bearer key-{name}"}
            listed = httpx.get(f"{at}/v1/feedback", params={"limit": 100}, headers=seen).json()
            assert len(listed["data"]) == 5


@pytest.mark.parametrize("away", [3, 1000])
def test_an_import_outlasts_a_server_that_is_away_for_a_moment(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, away: int
) -> None:
    posted, real = itertools.count(), Remote.post

    def post(self: Remote, *words: Any, **more: Any) -> dict[str, Any]:
        if 2 <= next(posted) < 2 + away:
            raise Unreachable("cannot reach it")
        return real(self, *words, **more)

    monkeypatch.setattr(Remote, "post", post)
    monkeypatch.setattr("tandem.cli.feedback_sender._PAUSES_S", (0.001,) * 6)
    words = ("import", write(tmp_path / "in.jsonl", LINES), "--adapter", "formal")
    done = run(url, *words, "--concurrency", "1")
    assert done.output.count("cannot reach it; trying again for a minute") == 1
    if away == 3:
        assert done.exit_code == 0 and "4 of 4 lines are stored" in done.output
    else:
        assert done.exit_code == 1 and "2 of 2 lines are stored" in done.output
        assert "cannot reach it; the same command goes on from here" in done.output


def test_an_import_to_nobody_ends_at_once(tmp_path: Path) -> None:
    file = write(tmp_path / "in.jsonl", LINES)
    done = run("http://127.0.0.1:9/v1", "import", file, "--adapter", "formal")
    assert done.exit_code == 1 and "error: cannot reach http://127.0.0.1:9/v1/" in done.output
    assert "stored" not in done.output and "trying again" not in done.output


def test_a_quota_ends_no_import(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[[keys]]\nkey = "one"\ntrain = ["*"]\nsamples_cap = 1\n')
    lines = [LINES[0], {**LINES[0], "user": "bob"}, LINES[1]]
    server = ServerConfig(api_key_file=str(keys))
    with live(make_app(FakeEngine(), server)) as at:
        file = write(tmp_path / "in.jsonl", lines)
        words = ("import", file, "--adapter", "formal", "--api-key", "one", "--concurrency", "1")
        done = run(f"{at}/v1", *words)
    assert done.exit_code == 1 and "2 of 3 lines are stored" in done.output, done.output
    assert "line 2: " in done.output
