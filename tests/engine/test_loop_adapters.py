"""Adapters in the loop: what they are called, when they are dropped, and who reads their KV."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loop_bench import Bench, check_answer, prompts, request

from tandem.core.errors import AdapterError, NotFound
from tandem.core.request import Request


def write_adapter(folder: Path, content: str) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"r": 4}))
    (folder / "adapter_model.safetensors").write_bytes(content.encode())
    return str(folder)


@settings(max_examples=60)
@given(
    script=st.lists(
        st.one_of(
            st.tuples(st.just("load"), st.sampled_from("AB"), st.integers(0, 2)),
            st.tuples(st.just("unload"), st.sampled_from("AB")),
            st.tuples(st.just("add"), st.sampled_from(["A", "B", None]), prompts),
            st.tuples(st.just("step"), st.integers(1, 4)),
        ),
        max_size=25,
    ),
    runs_ahead=st.booleans(),
)
def test_no_answer_reads_blocks_of_another_version(script, runs_ahead, tmp_path_factory):
    """Loads in place, unloads and reloads under running requests (see FakeExecutor._read)."""
    folder = tmp_path_factory.mktemp("adapters")
    bench = Bench(num_blocks=30, runs_ahead=runs_ahead)
    asked: list[tuple[Request, str | None]] = []
    for action in script:
        if action[0] == "load":
            path = write_adapter(folder / action[1], f"weights {action[2]}")
            bench.loop.adapters.load(action[1], path)
        elif action[0] == "unload" and action[1] in bench.loop.adapters.current:
            bench.loop.adapters.unload(action[1])
        elif action[0] == "add":
            name = action[1]
            version = bench.loop.adapters.current.get(name) if name else None
            if name is None or version is not None:
                new = request(f"r{len(asked)}", action[2], adapter=name)
                bench.loop.add(new)
                asked.append((new, version.content_hash if version else None))
        elif action[0] == "step":
            for _ in range(action[1]):
                bench.step()
    bench.run()
    for each, content_hash in asked:
        check_answer(bench, each, 0, content_hash)
    current = {version.content_hash for version in bench.loop.adapters.current.values()}
    assert bench.executor.adapters == current, "a version nobody uses is still loaded"


def test_adapter_errors(tmp_path):
    bench = Bench()
    with pytest.raises(NotFound):
        bench.loop.add(request("a", [1], adapter="none"))
    with pytest.raises(NotFound):
        bench.loop.adapters.unload("none")
    with pytest.raises(AdapterError, match="no adapter directory"):
        bench.loop.adapters.load("a", str(tmp_path / "missing"))
    (tmp_path / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(AdapterError, match="pickled"):
        bench.loop.adapters.load("a", str(tmp_path))
    for number in range(4):
        folder = write_adapter(tmp_path / f"{number}", f"{number}")
        bench.loop.adapters.load(f"n{number}", folder)
    with pytest.raises(AdapterError, match="4 adapters"):
        bench.loop.adapters.load("n4", write_adapter(tmp_path / "4", "4"))


def test_version_numbers_and_labels(tmp_path):
    bench = Bench()
    first = bench.loop.adapters.load("a", write_adapter(tmp_path / "a", "1"))
    second = bench.loop.adapters.load("a", write_adapter(tmp_path / "a", "2"))
    assert (first.label, second.label) == ("a@1", "a@2")
    bench.loop.add(request("r", [1, 2], adapter="a"))
    bench.run()
    assert bench.ended["r", 0].adapter == "a@2"
