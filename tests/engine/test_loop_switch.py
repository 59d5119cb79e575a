"""With `switch`, requests in flight go on with each new version of their adapter and with the KV
that they have; nobody else reads what they add to it."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from fake_answers import draw_of, expected_score, expected_tokens, link
from fake_executor import FakeExecutor
from tandem.core.clock import VirtualClock
from tandem.core.events import TokenEvent
from tandem.core.plan import Draw, LanePlan
from tandem.core.request import Request
from tandem.core.sampling import SamplingParams
from tandem.core.training import Score, ScoreRequest
from tandem.core.version import AdapterVersion
from tandem.engine.loop import EngineLoop
from tandem.kv.cache import KVCache
from tandem.scheduling.registry import build_policy
from tandem.scheduling.scheduler import Scheduler
from tandem.scheduling.view import Budgets


class Bench:
    """A loop that switches; what was planned, and what became of each choice."""

    def __init__(self, folder: Path, num_blocks: int = 40, max_sequences: int = 4) -> None:
        self.folder = folder
        self.plans: list[LanePlan] = []
        self.versions: dict[str, list[str]] = {}
        self.executor = FakeExecutor(num_blocks, on_submit=self.plans.append)
        self.executor.earlier = self._earlier
        self.cache = KVCache(num_blocks, 4)
        self.scheduler = Scheduler(
            build_policy("priority"), self.cache, Budgets(max_sequences, 16), self.executor.info
        )
        self.loop = EngineLoop(
            self.scheduler, self.executor, VirtualClock(), switch=True, check_every_step=True
        )
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.ended: dict[tuple[str, int], TokenEvent] = {}

    def _earlier(self, seq_id: int) -> set[str]:
        """What a sequence of mixed KV may read beside its own version's: that of those before."""
        seq = self.scheduler.state.all[seq_id]
        return set(self.versions[seq.adapter.name]) if seq.mixed and seq.adapter else set()

    def load(self, name: str, number: int) -> AdapterVersion:
        path = self.folder / name
        path.mkdir(exist_ok=True)
        (path / "adapter_config.json").write_text(json.dumps({"r": 4}))
        (path / "adapter_model.safetensors").write_bytes(f"{name} {number}".encode())
        version = self.loop.adapters.load(name, str(path))
        self.versions.setdefault(name, []).append(version.content_hash)
        return version

    def add(self, name: str, prompt: list[int], adapter: str | None, n: int = 1, urgent: int = 0):
        sampling = SamplingParams(max_tokens=8, ignore_eos=True)
        self.loop.add(Request(name, tuple(prompt), sampling, n=n, priority=urgent, adapter=adapter))

    def step(self) -> None:
        for event in self.loop.step():
            key = (event.request_id, event.index)
            self.tokens.setdefault(key, []).extend(event.tokens)
            if event.finish_reason is not None:
                self.ended[key] = event

    def run(self) -> None:
        for _ in range(2000):
            if not self.loop.has_work:
                break
            self.step()
        assert not self.loop.has_work, "requests never end"
        assert self.cache.held_blocks == 0
        current = {version.content_hash for version in self.loop.adapters.current.values()}
        assert self.executor.adapters == current, "a version nobody uses is still loaded"


def draw(index: int = 0) -> Draw:
    return Draw(0, index, 0, SamplingParams(max_tokens=8, ignore_eos=True))


def test_an_answer_goes_on_under_the_new_version(tmp_path):
    bench = Bench(tmp_path)
    old = bench.load("a", 1)
    bench.add("r", [1, 2, 3], "a")
    for _ in range(4):
        bench.step()
    new = bench.load("a", 2)
    bench.run()
    chain, found = 0, []
    for place, token in enumerate([1, 2, 3, *bench.tokens["r", 0]]):
        if place >= 3:
            found.append(draw_of(chain, draw()).token)
        # The fourth token was drawn under the old version; its KV is written under the new one.
        chain = link(chain, token, (old if place < 6 else new).content_hash)
    assert bench.tokens["r", 0] == found
    assert bench.ended["r", 0].adapter == new.label


def test_nobody_else_reads_mixed_blocks(tmp_path):
    """Not even once the version is back under which the mixed answer began."""
    bench = Bench(tmp_path)
    old = bench.load("a", 1)
    bench.add("r", [1, 2, 3], "a")
    for _ in range(2):
        bench.step()
    bench.load("a", 2)
    for _ in range(5):
        bench.step()
    assert bench.load("a", 1).content_hash == old.content_hash
    said = [1, 2, 3, *bench.tokens["r", 0]]
    assert len(said) > 8 and ("r", 0) not in bench.ended
    bench.add("more", said, "a")
    bench.run()
    alone = expected_tokens(said, draw(), old.content_hash, 8, frozenset())
    assert bench.tokens["more", 0] == alone


def test_preempted_answers_are_computed_anew_under_the_new_version(tmp_path):
    bench = Bench(tmp_path, max_sequences=1)
    bench.load("a", 1)
    bench.add("r", [1, 2, 3], "a", urgent=1)
    for _ in range(3):
        bench.step()
    said = [1, 2, 3, *bench.tokens["r", 0]]
    new = bench.load("a", 2)
    bench.step()
    said.append(bench.tokens["r", 0][-1])
    bench.add("urgent", [5], None, urgent=0)
    bench.run()
    chain, found = 0, []
    for token in said:
        chain = link(chain, token, new.content_hash)
    while len(said) + len(found) < 11:
        found.append(draw_of(chain, draw()).token)
        chain = link(chain, found[-1], new.content_hash)
    assert bench.tokens["r", 0] == [*said[3:], *found]


def test_what_is_loaded_after_an_unload_is_a_new_version_too(tmp_path):
    bench = Bench(tmp_path)
    bench.load("a", 1)
    bench.add("r", [1, 2, 3], "a")
    bench.step()
    bench.loop.adapters.unload("a")
    bench.step()
    new = bench.load("a", 2)
    bench.run()
    assert bench.ended["r", 0].adapter == new.label


def test_choices_share_a_prompt_of_two_versions(tmp_path):
    """The prompt is longer than an iteration: half of it is computed when the version changes."""
    bench = Bench(tmp_path)
    prompt = [number % 5 for number in range(20)]
    bench.load("a", 1)
    bench.add("r", prompt, "a", n=2)
    bench.step()
    bench.load("a", 2)
    bench.run()
    assert all(len(bench.tokens["r", index]) == 8 for index in range(2))


def test_who_has_not_begun_is_answered_by_the_new_version_alone(tmp_path):
    bench = Bench(tmp_path, max_sequences=1)
    bench.load("a", 1)
    bench.add("first", [9, 8], "a")
    bench.add("second", [1, 2, 3, 4, 5, 6], "a", n=2)
    bench.step()
    new = bench.load("a", 2)
    bench.run()
    for index in range(2):
        alone = expected_tokens([1, 2, 3, 4, 5, 6], draw(index), new.content_hash, 8, frozenset())
        assert bench.tokens["second", index] == alone


def test_scores_and_other_adapters_keep_their_version(tmp_path):
    bench = Bench(tmp_path)
    old, other = bench.load("a", 1), bench.load("b", 1)
    tokens = tuple(range(30))
    bench.loop.teaching.add_score(ScoreRequest("s", tokens, 1, adapter="a"))
    bench.add("r", [1, 2, 3], "b")
    bench.add("base", [1, 2, 3], None)
    bench.step()
    bench.load("a", 2)
    scores = []
    while bench.loop.has_work:
        bench.step()
        scores += [each for each in bench.loop.teaching.take_learned() if isinstance(each, Score)]
    assert scores[0].logprob == expected_score(tokens, 1, old.content_hash)
    for name, content in (("r", other.content_hash), ("base", None)):
        assert bench.tokens[name, 0] == expected_tokens([1, 2, 3], draw(), content, 8, frozenset())
    bench.run()


actions = st.one_of(
    st.tuples(st.just("load"), st.sampled_from("AB"), st.integers(0, 2)),
    st.tuples(st.just("unload"), st.sampled_from("AB")),
    st.tuples(
        st.just("add"),
        st.sampled_from(["A", "B", None]),
        st.lists(st.integers(0, 3), min_size=1, max_size=20),
        st.integers(1, 2),
        st.integers(0, 2),
    ),
    st.tuples(st.just("step"), st.integers(1, 5)),
    st.tuples(st.just("abort"), st.integers(0, 8)),
)


@settings(max_examples=150)
@given(script=st.lists(actions, max_size=30), num_blocks=st.integers(14, 40))
def test_any_mix_of_versions(script, num_blocks, tmp_path_factory):  # noqa: C901
    """Preemption, forks, aborts and prefix hits among switches (`FakeExecutor._read` judges)."""
    bench = Bench(tmp_path_factory.mktemp("adapters"), num_blocks)
    asked: dict[str, tuple[list[int], str | None, int]] = {}
    switched: set[str] = set()
    aborted: set[str] = set()
    for action in script:
        if action[0] == "load":
            version = bench.load(action[1], action[2])
            for seq in bench.scheduler.state.all.values():
                if seq.adapter is not None and seq.adapter.name == version.name:
                    assert seq.adapter == version, "a sequence was left behind"
                    switched.add(seq.request.request_id)
        elif action[0] == "unload" and action[1] in bench.loop.adapters.current:
            bench.loop.adapters.unload(action[1])
        elif action[0] == "add":
            _, adapter, prompt, n, urgent = action
            if adapter is None or adapter in bench.loop.adapters.current:
                name = f"r{len(asked)}"
                bench.add(name, prompt, adapter, n, urgent)
                content = bench.loop.adapters.current[adapter].content_hash if adapter else None
                asked[name] = (prompt, content, n)
        elif action[0] == "step":
            for _ in range(action[1]):
                bench.step()
        elif action[0] == "abort" and f"r{action[1]}" in asked:
            bench.loop.abort(f"r{action[1]}")
            aborted.add(f"r{action[1]}")
    bench.run()
    for name, (prompt, content, n) in asked.items():
        for index in range(n):
            if name in aborted:
                continue
            assert len(bench.tokens[name, index]) == 8
            if name not in switched:
                alone = expected_tokens(prompt, draw(index), content, 8, frozenset())
                assert bench.tokens[name, index] == alone
