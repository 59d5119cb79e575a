"""A loop over an executor that notices every wrong block, and everything it ever said."""

from __future__ import annotations

from hypothesis import strategies as st

from fake_answers import expected_tokens
from fake_executor import EOS, FakeExecutor
from tandem.core.clock import VirtualClock
from tandem.core.events import TokenEvent
from tandem.core.plan import Draw, LanePlan
from tandem.core.request import Request
from tandem.core.sampling import SamplingParams
from tandem.core.sequence import FinishReason
from tandem.engine.loop import EngineLoop
from tandem.kv.cache import KVCache
from tandem.scheduling.registry import build_policy
from tandem.scheduling.scheduler import Scheduler
from tandem.scheduling.view import Budgets


class Bench:
    """A loop with its fake parts, and everything it ever said."""

    def __init__(
        self,
        *,
        num_blocks: int = 32,
        policy: str = "fcfs",
        max_sequences: int = 8,
        max_batch_tokens: int = 16,
        prefix_caching: bool = True,
        runs_ahead: bool = False,
    ) -> None:
        self.plans: list[LanePlan] = []
        self.executor = FakeExecutor(num_blocks, on_submit=self.plans.append)
        self.executor.runs_ahead = runs_ahead
        self.budgets = Budgets(max_sequences, max_batch_tokens)
        self.cache = KVCache(num_blocks, 4, prefix_caching=prefix_caching)
        self.clock = VirtualClock()
        self.scheduler = Scheduler(
            build_policy(policy), self.cache, self.budgets, self.executor.info
        )
        self.loop = EngineLoop(
            self.scheduler, self.executor, self.clock, max_loaded_adapters=4, check_every_step=True
        )
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.ended: dict[tuple[str, int], TokenEvent] = {}
        self.scored: dict[str, list[int]] = {}

    def step(self) -> None:
        self.clock.advance(0.1)
        for event in self.loop.step():
            key = (event.request_id, event.index)
            assert key not in self.ended, "an event after the last one"
            self.tokens.setdefault(key, []).extend(event.tokens)
            self.scored.setdefault(event.request_id, []).extend(
                logprob.token for logprob in event.prompt_logprobs
            )
            if event.finish_reason is not None:
                self.ended[key] = event

    def run(self, limit: int = 3000) -> None:
        for _ in range(limit):
            if not self.loop.has_work:
                break
            self.step()
        assert not self.loop.has_work, "requests never end"
        assert self.cache.held_blocks == 0
        for plan in self.plans:
            assert plan.num_tokens <= self.budgets.max_batch_tokens
            assert len(plan.spans) <= self.budgets.max_sequences


def request(name: str, prompt: list[int], *, n: int = 1, priority: int = 0, tenant: str = "",
            adapter: str | None = None, **sampling: object) -> Request:  # fmt: skip
    params = SamplingParams(**{"max_tokens": 8, **sampling})  # type: ignore[arg-type]
    return Request(
        name, tuple(prompt), params, n=n, priority=priority, tenant=tenant, adapter=adapter
    )


def check_answer(bench: Bench, asked: Request, index: int, adapter: str | None = None) -> None:
    stop = frozenset() if asked.sampling.ignore_eos else frozenset({EOS})
    draw = Draw(0, index, 0, asked.sampling)
    wanted = expected_tokens(asked.prompt, draw, adapter, asked.sampling.max_tokens, stop)
    key = (asked.request_id, index)
    assert bench.tokens[key] == wanted
    reason = FinishReason.STOP if wanted[-1] in stop else FinishReason.LENGTH
    assert bench.ended[key].finish_reason is reason


prompts = st.lists(st.integers(0, 3), min_size=1, max_size=30)
