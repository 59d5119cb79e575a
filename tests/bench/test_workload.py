from __future__ import annotations

import gzip
import os
from codecs import BOM_UTF8
from itertools import islice, pairwise
from pathlib import Path
from random import Random
from statistics import fmean

import pytest

from tandem.bench import arrivals
from tandem.bench.lengths import Fixed, Lognormal, Uniform, parse_lengths
from tandem.bench.options import Arrivals, WorkloadOptions, build_workload
from tandem.bench.traces import TraceRecord, read_trace
from tandem.bench.workload import WORDS, Limits, Shape, as_text, warmup
from tandem.core.errors import InvalidRequest

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens\r
2023-11-16 18:15:46.6805900,374,44\r
2023-11-16 18:15:50.9951690,396,109\r
"""
MOONCAKE = """{"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]}
{"timestamp": 1500, "input_length": 1300, "output_length": 0, "hash_ids": [0, 1, 9]}
{"timestamp": 2000, "input_length": 900, "output_length": 3, "hash_ids": [7, 1]}
"""
VIDUR = "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n3772,54,3826,69.85\n"


def options(**changes: object) -> WorkloadOptions:
    fields: dict[str, object] = {
        "arrivals": Arrivals.POISSON,
        "prompts": Fixed(8),
        "outputs": Fixed(4),
        "limits": Limits(max_requests=50),
        "rate": 10.0,
    }
    return WorkloadOptions(**(fields | changes))  # type: ignore[arg-type]


def shared_traces() -> Path:
    root = os.environ.get("TANDEM_SHARED_DATA")
    beside = Path(__file__).parents[2].parent / "shared" / "data"
    folder = (Path(root) if root else beside) / "traces"
    if not folder.is_dir():
        pytest.skip("no shared data")
    return folder


def test_poisson_has_its_rate_and_exponential_gaps() -> None:
    times_s = list(islice(arrivals.poisson(5.0, Random(3)), 20000))
    gaps = [b - a for a, b in pairwise(times_s)]
    assert fmean(gaps) == pytest.approx(0.2, rel=0.03)
    assert fmean(gap**2 for gap in gaps) == pytest.approx(2 * 0.2**2, rel=0.08)


def test_constant_burst_and_replay() -> None:
    assert list(islice(arrivals.constant(4.0), 3)) == [0.0, 0.25, 0.5]
    assert list(islice(arrivals.burst(), 3)) == [0.0] * 3
    assert arrivals.replay([5.0, 6.0, 9.0], time_scale=0.5) == [0.0, 0.5, 2.0]
    assert arrivals.replay([5.0, 6.0, 9.0], rate=2.0) == [0.0, 0.25, 1.0]
    with pytest.raises(InvalidRequest):
        arrivals.replay([1.0, 1.0], rate=2.0)
    with pytest.raises(InvalidRequest):
        next(arrivals.poisson(0.0, Random(0)))


def test_lengths() -> None:
    rng = Random(5)
    assert parse_lengths("12") == Fixed(12) == parse_lengths("fixed:12")
    drawn = [parse_lengths("uniform:3:5").draw(rng) for _ in range(200)]
    assert set(drawn) == {3, 4, 5}
    lognormal = parse_lengths("lognormal:100:0.5")
    assert lognormal == Lognormal(100.0, 0.5)
    assert fmean(lognormal.draw(rng) for _ in range(20000)) == pytest.approx(100, rel=0.03)
    assert Uniform(1, 1).draw(rng) == 1
    for bad in ("0", "uniform:5:3", "normal:3", "fixed:", "lognormal:10:-1", "uniform:0:2"):
        with pytest.raises(InvalidRequest, match="lengths"):
            parse_lengths(bad)


def test_traces_parse(tmp_path: Path) -> None:
    plain, packed, table = tmp_path / "a.csv", tmp_path / "m.jsonl.gz", tmp_path / "v.csv"
    plain.write_text(AZURE)
    packed.write_bytes(gzip.compress(MOONCAKE.encode()))
    table.write_text(VIDUR)
    azure = read_trace(plain)
    assert [(r.prompt_tokens, r.output_tokens) for r in azure] == [(374, 44), (396, 109)]
    assert azure[0].at_s is not None and azure[1].at_s is not None
    assert azure[1].at_s - azure[0].at_s == pytest.approx(4.314579, abs=1e-5)
    assert read_trace(packed)[1] == TraceRecord(1.5, 1300, 1, (0, 1, 9))
    assert len(read_trace(packed, limit=2)) == 2
    assert read_trace(table) == [TraceRecord(None, 3772, 54)]
    for file, content in ((plain, AZURE), (packed, MOONCAKE), (table, VIDUR)):
        before, marked = read_trace(file), BOM_UTF8 + content.encode()
        file.write_bytes(gzip.compress(marked) if file is packed else marked)
        assert read_trace(file) == before, "a byte order mark changes nothing"
    (tmp_path / "x.csv").write_text("a,b\n1,2\n")
    whole = gzip.compress(MOONCAKE.encode())
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[:-9])
    (tmp_path / "damaged.jsonl.gz").write_bytes(whole[:12] + b"\xff" * 9 + whole[21:])
    for bad in (
        tmp_path / name for name in ("x.csv", "no.csv", "cut.jsonl.gz", "damaged.jsonl.gz")
    ):
        with pytest.raises(InvalidRequest, match="cannot read the trace"):
            read_trace(bad)


def test_shared_traces_parse() -> None:
    folder = shared_traces()
    for name, rows in (
        ("azure_llm_2023_conv.csv.gz", 15606),
        ("azure_llm_2023_code.csv.gz", 7717),
        ("mooncake_conversation.jsonl.gz", 8940),
        ("mooncake_synthetic.jsonl.gz", 2952),
        ("vidur_arxiv_summarization_lengths.csv.gz", 12000),
    ):
        assert len(read_trace(folder / name)) == rows


def test_named_blocks_are_shared_prompt_prefixes(tmp_path: Path) -> None:
    trace = tmp_path / "m.jsonl"
    trace.write_text(MOONCAKE)
    asked = options(arrivals=Arrivals.TRACE, trace=trace, rate=None)
    one, two, three = build_workload(asked)
    assert [r.at_s for r in (one, two, three)] == [0.0, 1.5, 2.0]
    assert [len(r.prompt) for r in (one, two, three)] == [1100, 1300, 900]
    assert one.prompt[:1024] == two.prompt[:1024]
    assert one.prompt[1024:1100] != two.prompt[1024:1100]
    assert three.prompt[:512] != one.prompt[:512]
    scaled = build_workload(
        options(
            arrivals=Arrivals.TRACE,
            trace=trace,
            rate=None,
            time_scale=2.0,
            limits=Limits(length_scale=0.1, max_prompt_tokens=120),
        )
    )
    assert [len(r.prompt) for r in scaled] == [110, 120, 90]
    assert scaled[0].prompt[:102] == scaled[1].prompt[:102]
    assert scaled[1].at_s == 3.0


def test_a_trace_of_lengths_needs_arrivals(tmp_path: Path) -> None:
    table = tmp_path / "v.csv"
    table.write_text(VIDUR)
    with pytest.raises(InvalidRequest, match="no times"):
        build_workload(options(arrivals=Arrivals.TRACE, trace=table))
    (request,) = build_workload(options(trace=table))
    assert len(request.prompt) == 3772 and request.output_tokens == 54


def test_same_seed_same_workload_and_no_prompt_twice() -> None:
    first, again = build_workload(options(seed=3)), build_workload(options(seed=3))
    assert first == again != build_workload(options(seed=4))
    warm = warmup(5, Shape(8, 4), 1000, seed=3)
    prompts = [request.prompt for request in (*first, *warm)]
    assert len(set(prompts)) == len(prompts) == 55
    assert all(0 <= token < 1000 for prompt in prompts for token in prompt)


def test_limits_and_refusals() -> None:
    timed = build_workload(options(limits=Limits(duration_s=2.0), arrivals=Arrivals.CONSTANT))
    assert len(timed) == 21
    for changes, match in (
        ({"limits": Limits()}, "never ends"),
        ({"limits": Limits(duration_s=1.0), "arrivals": Arrivals.BURST}, "never ends"),
        ({"rate": float("nan")}, "positive and finite"),
        ({"rate": float("inf")}, "positive and finite"),
        ({"rate": None}, "--rate"),
        ({"arrivals": Arrivals.TRACE}, "--trace"),
        ({"vocabulary": 0}, "vocabulary"),
        ({"limits": Limits(max_requests=0)}, "empty"),
    ):
        with pytest.raises(InvalidRequest, match=match):
            build_workload(options(**changes))


def test_text_has_a_word_a_token() -> None:
    assert as_text((0, 1, len(WORDS))) == f"{WORDS[0]} {WORDS[1]} {WORDS[0]}"
