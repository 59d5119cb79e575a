"""The workload, the arithmetic and the sharing of benchmarks/coexecution; no engine is run."""

from __future__ import annotations

import json
import signal
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import typer

import benchmarks.coexecution.__main__ as script
from benchmarks.coexecution.arrangement import Times, run
from benchmarks.coexecution.figures import (
    Sample,
    percentile,
    ratio,
    sample,
    summary,
    training_window,
)
from benchmarks.coexecution.pairs import STEP_PAIRS, read, whole_steps, write
from benchmarks.coexecution.report import Measured, as_data, as_markdown, from_json, to_json
from benchmarks.coexecution.systems import (
    PEFT,
    PINNED,
    TANDEM,
    systems,
    warm_up,
    with_scheduling,
    worker_spec,
    workers_of,
)
from benchmarks.coexecution.workload import ClosedLoop, Serving, Steps, Training

VOCABULARY = 1000


def test_closed_loop_replaces_requests_and_staggers_the_first() -> None:
    loop = ClosedLoop(Serving(VOCABULARY, seed=1, sequences=4, output_tokens=8, prompt_tokens=5))
    first = loop.first()
    assert [ask.output_tokens for ask in first] == [2, 4, 6, 8]
    assert not loop.note(first[0].name, 1, 1.0)
    assert loop.note(first[0].name, 1, 2.0)
    later = loop.next()
    assert later.output_tokens == 8 and len(later.prompt) == 5
    assert later.prompt not in [ask.prompt for ask in first]
    assert loop.open() == [*(ask.name for ask in first[1:]), later.name]
    for at in range(8):
        loop.note(later.name, 1, 3.0 + at)
    requests = loop.answer()["requests"]
    assert [each["tpot"] for each in requests] == [False, False, False, False, True]
    assert requests[0]["token_s"] == [1.0, 2.0]


def test_same_seed_same_requests() -> None:
    serving = Serving(VOCABULARY, seed=3)
    assert ClosedLoop(serving).first() == ClosedLoop(Serving(**asdict(serving))).first()
    assert ClosedLoop(serving).first() != ClosedLoop(Serving(VOCABULARY, seed=4)).first()


def test_batches_have_the_size_that_is_counted() -> None:
    sft = Training("sft", VOCABULARY, 0, 1.0, (0,))
    assert sft.step_tokens == 1024 and sft.prompt_tokens == 1
    one, other = islice(sft.batches(), 2)
    assert [len(each) for each in one] == [512, 512] and one[0] != one[1] and one != other
    dpo = Training("dpo", VOCABULARY, 0, 1.0, (0,))
    chosen, rejected = next(dpo.batches())
    assert len(chosen) == len(rejected) == 512
    assert chosen[:256] == rejected[:256] and chosen[256:] != rejected[256:]
    assert dpo.prompt_tokens == 256


def test_no_step_begins_after_the_time_is_up() -> None:
    steps = Steps(Training("sft", VOCABULARY, 0, 0.0, (0,)))
    assert not steps.due
    steps.note()
    answer = steps.answer()
    assert answer["step_tokens"] == 1024 and answer["ends_s"][0] >= answer["began_s"]
    assert answer["window_ends_s"] == answer["ends_s"][0]
    assert Steps(Training("sft", VOCABULARY, 0, 60.0, (0,))).due


def test_the_time_of_steps_that_were_given_up_counts() -> None:
    steps = Steps(Training("sft", VOCABULARY, 0, 60.0, (0,)))
    steps.give_up()
    answer = steps.answer()
    assert answer["ends_s"] == [] and answer["window_ends_s"] > answer["began_s"]
    assert sample(training_window(answer), None, answer, 0).training_tokens_per_s == 0.0


def test_figures_count_what_is_inside_the_window() -> None:
    serve = {
        "requests": [
            {"asked_s": 8.0, "token_s": [9.0, 10.0, 12.0, 14.0], "tpot": True},
            {"asked_s": 9.5, "token_s": [11.0, 13.0], "tpot": False},
            {"asked_s": 14.0, "token_s": [15.0, 19.0, 21.0], "tpot": True},
            {"asked_s": 19.0, "token_s": [], "tpot": False},
        ]
    }
    train = {"began_s": 10.0, "ends_s": [15.0, 20.0], "window_ends_s": 20.0, "step_tokens": 100}
    found = sample(training_window(train), serve, train, 2**30)
    assert found.seconds == 10.0
    assert found.training_tokens_per_s == pytest.approx(20.0)
    assert found.output_tokens_per_s == pytest.approx(6 / 10.0)
    assert found.tpot_s == [pytest.approx(5.0 / 3)], "the third ended after the window"
    assert found.gaps_s == [2.0, 2.0, 2.0, 4.0]
    assert found.ttft_s == [1.5, 1.0], "the first one's came before the window"
    assert found.steps == 2 and summary([found])["step_ms"] == 5000.0
    assert summary([found])["ttft_p99_ms"] == pytest.approx(1495.0)
    alone = sample((10.0, 20.0), None, train, 0)
    assert alone.output_tokens_per_s is None and alone.gaps_s == []


def test_percentiles_and_summary_over_rounds() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 0.5) == pytest.approx(2.5)
    assert percentile([1.0], 0.99) == 1.0
    samples = [
        Sample(10.0, 2**30, 5.0, None, [0.1, 0.2], [0.1]),
        Sample(10.0, 2**31, 7.0, None, [0.3], [0.1]),
    ]
    figures = summary(samples)
    assert figures["rss_gib"] == 2.0 and figures["output_tokens_per_s"] == 6.0
    assert figures["tpot_mean_ms"] == pytest.approx(200.0)
    assert "training_tokens_per_s" not in figures
    assert ratio(samples, samples[::-1], "output_tokens_per_s") == pytest.approx(
        (5 / 7 + 7 / 5) / 2
    )


def _measured() -> Measured:
    measured = Measured("m", streamed_bytes=1000, peer="vLLM")
    measured.workers = {"peft": {"versions": {"peft": "1"}}}
    measured.ceilings = [{"read_bytes_per_s": 20_000.0, "flops": 1e6}] * 2
    measured.samples = {
        "fused": [Sample(1.0, 2**30, 10.0, 200.0, [0.1], [0.1])],
        "pinned": [Sample(1.0, 2**30, 8.0, 50.0, [0.2], [0.2])],
    }
    return measured


def test_report_has_shares_and_goals() -> None:
    rows = [each for each in systems((0, 1)) if each.key in ("fused", "pinned")]
    data = as_data({"cpu": "x"}, _measured(), rows)
    fused = data["rows"][0]
    assert fused["streaming_share"] == pytest.approx(1000 / 0.1 / 20_000)
    assert fused["matrix_share"] == pytest.approx(200.0 * 4 * 500 / 1e6)
    reached = {goal["figure"]: goal["is"] for goal in data["goals"]}
    assert reached == {
        "fused / pinned, training tokens/s": pytest.approx(4.0),
        "fused / pinned, output tokens/s": pytest.approx(1.25),
        "pinned / fused, TPOT p99": pytest.approx(2.0),
    }
    page = as_markdown(data)
    assert "| (c) vLLM and PEFT, own cores | 8.0 |  |  | 200 | 200 | 200 |" in page
    assert "m, bfloat16, 1 rounds; steps of random tokens." in page
    assert "gaps_s" not in json.dumps(data)


def test_a_model_in_float32_streams_twice_the_bytes_and_computes_the_same() -> None:
    row = [each for each in systems((0, 1)) if each.key == "fused"]
    found = []
    for dtype, streamed in (("bfloat16", 1000), ("float32", 2000)):
        measured = _measured()
        measured.dtype, measured.streamed_bytes = dtype, streamed
        found.append(as_data({"cpu": "x"}, measured, row)["rows"][0]["matrix_share"])
    assert found[0] == found[1]


def test_real_pairs_come_in_whole_steps_and_are_the_same_to_both_trainers(tmp_path: Path) -> None:
    from benchmarks.coexecution.engine_tandem import _sequences

    row = {"prompt": "p", "chosen": "c", "rejected": "r"}
    ids = {"prompt_ids": [1, 2], "chosen_ids": [3, 4, 5], "rejected_ids": [6]}
    path = tmp_path / "pairs.json"
    write(path, [{**row, **ids, "prompt": str(place)} for place in range(STEP_PAIRS + 3)])
    pairs = read(str(path))
    assert [pair.prompt for pair in pairs] == [str(place) for place in range(STEP_PAIRS)]
    assert whole_steps(pairs) == [pairs] and pairs[0].tokens == 8
    chosen, rejected = _sequences(pairs[0])
    assert (chosen.tokens, rejected.tokens) == ((1, 2, 3, 4, 5), (1, 2, 6))
    assert chosen.prompt_tokens == rejected.prompt_tokens == 2


def test_steps_of_different_lengths_count_their_tokens() -> None:
    steps = Steps(Training("dpo", VOCABULARY, 0, 0.0, (0,)))
    steps.note(100)
    steps.note(300)
    assert steps.answer()["step_tokens"] == 200.0


def test_a_run_can_be_resumed() -> None:
    measured = _measured()
    assert from_json(json.loads(json.dumps(to_json(measured)))) == measured


def test_peers_side_by_side_get_a_core_each() -> None:
    rows = {each.key: each for each in systems((4, 5))}
    assert rows["pinned"].training_cores == (5,)
    spec = worker_spec(PINNED, (4, 5), None)
    assert spec.options == {"cores": (4,), "threads": 1}
    spec = worker_spec(PINNED, (4, 5), Path("/env"))
    assert spec.environ["VLLM_CPU_OMP_THREADS_BIND"] == "4"
    assert rows["slices"].training_cores == (4, 5)
    assert workers_of([rows["pinned"], rows["peer-sft"]]) == [PINNED, PEFT]


def test_every_worker_is_warmed_up_once_for_all_that_it_does() -> None:
    rows = {each.key: each for each in systems((0, 1))}
    found = warm_up([rows["peer-sft"], rows["pinned"], rows["dpo"], rows["fused"]])
    assert {(each.serving, each.training, each.loss) for each in found} == {
        (PINNED, None, "sft"),
        (TANDEM, None, "sft"),
        (None, PEFT, "sft"),
        (None, TANDEM, "sft"),
        (None, TANDEM, "dpo"),
    }
    assert len(found) == 5
    assert {each.training_cores for each in found if each.training == PEFT} == {(0, 1)}


def test_scheduling_settings_reach_our_rows_alone() -> None:
    rows = {each.key: each for each in with_scheduling(systems((0, 1)), 0.2, {"ceiling_s": "1"})}
    assert rows["fused"].scheduling == {"tpot_slo": 0.2, "policy_options": {"ceiling_s": "1"}}
    assert rows["temporal"].scheduling["policy_options"] == {
        "temporal_only": "true",
        "ceiling_s": "1",
    }
    assert rows["pinned"].scheduling == {}
    assert rows["fused-dpo"].title == "tandem, fused with DPO, objective 200 ms a token"
    assert with_scheduling(systems((0, 1)), None, {}) == systems((0, 1))


def test_unknown_rows_are_refused() -> None:
    rows = systems((0, 1))
    assert [each.key for each in script.choose(rows, ["sft"])] == ["sft"]
    assert "peer-dpo-default" not in [each.key for each in script.choose(rows, None)]
    with pytest.raises(typer.BadParameter, match="no row 'x'; known: fused"):
        script.choose(rows, ["x"])


class _Worker:
    """A worker that writes down what is done to it, and answers at once or at the third slice."""

    def __init__(self, name: str, log: list[tuple[str, object]], answer: dict[str, Any]) -> None:
        self._name, self._log, self._answer = name, log, answer
        self.rss_bytes = 1
        self.waits = 0

    def begin(self, job: dict[str, Any]) -> None:
        self._log.append((self._name, "begin"))

    def end(self) -> dict[str, Any]:
        self._log.append((self._name, "end"))
        return self._answer

    def send(self, number: signal.Signals) -> None:
        self._log.append((self._name, number))

    def interrupt(self) -> None:
        self._log.append((self._name, "interrupt"))

    def answers_within(self, seconds: float) -> bool:
        self.waits += 1
        return self.waits == 2


@pytest.mark.parametrize("key", ["pinned", "slices"])
def test_two_peers_share_as_the_row_says(key: str) -> None:
    log: list[tuple[str, object]] = []
    (row,) = (each for each in systems((0, 1)) if each.key == key)
    assert row.serving is not None and row.training is not None
    served = {
        "serve": {
            "began_s": 0.0,
            "requests": [{"asked_s": 0.0, "token_s": [1.0, 2.0, 3.0], "tpot": True}],
        }
    }
    trained = {"train": {"began_s": 1.5, "ends_s": [3.5], "window_ends_s": 3.5, "step_tokens": 10}}
    workers: Any = {
        row.serving: _Worker("server", log, served),
        row.training: _Worker("trainer", log, trained),
    }
    found = run(row, workers, Times(0.0, 0.0, 0.0), VOCABULARY, 0)
    assert found.training_tokens_per_s == 5.0 and found.output_tokens_per_s == 1.0
    assert found.rss_bytes == 2
    stop, go = signal.SIGSTOP, signal.SIGCONT
    turns = [("server", stop), ("trainer", go), ("trainer", stop), ("server", go)]
    expected = [*turns, *turns[:2], ("server", go)] if key == "slices" else []
    begun = [("server", "begin"), ("trainer", "begin")]
    ended = [("trainer", "end"), ("server", "interrupt"), ("server", "end")]
    assert log == [*begun, *expected, *ended]
