"""A loop over the fake executor, with a clock, for tests of learning: steps, scores, trainers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fake_answers import expected_tokens
from fake_executor import Costs, FakeExecutor
from tandem.core.clock import VirtualClock
from tandem.core.events import TokenEvent
from tandem.core.plan import DEVICE_LANE, Draw, LanePlan, StepPlan
from tandem.core.request import Request
from tandem.core.sampling import SamplingParams
from tandem.core.slo import Slo
from tandem.core.training import (
    LoraSpec,
    LossKind,
    LossSpec,
    Role,
    Score,
    StepOutcome,
    TrainerSpec,
    TrainingSequence,
    TrainingStep,
)
from tandem.engine.loop import EngineLoop
from tandem.kv.cache import KVCache
from tandem.scheduling.registry import build_policy
from tandem.scheduling.scheduler import Scheduler
from tandem.scheduling.scores import ScoreFailed
from tandem.scheduling.view import Budgets

SMALL = Costs(iteration_s=0.02, token_s=0.001, slice_s=0.002, layer_token_s=0.0005, update_s=0.01)
# Prompts take longer than an iteration beside learning may.
SLOW = replace(SMALL, token_s=0.02)

# Those that train. The last ones are policies with options: see `bench_of`.
POLICIES = ["fcfs", "priority", "adainf", "ekya", "unified", "mace", "static", "temporal",
            "overdue", "mace_bin"]  # fmt: skip


class Bench:
    """Everything that was planned and everything that was said."""

    def __init__(
        self,
        policy: str = "unified",
        options: Mapping[str, str] | None = None,
        *,
        num_blocks: int = 64,
        max_sequences: int = 8,
        max_batch_tokens: int = 32,
        recording_tokens: int = 64,
        costs: Costs = SMALL,
        prefix_caching: bool = True,
        lanes: tuple[str, ...] = (DEVICE_LANE,),
        executor: type[FakeExecutor] = FakeExecutor,
    ) -> None:
        self.plans: list[LanePlan] = []
        self.clock = VirtualClock()
        self.executor = executor(
            num_blocks,
            on_submit=self.plans.append,
            recording_tokens=recording_tokens,
            clock=self.clock,
            costs=costs,
        )
        self.budgets = Budgets(max_sequences, max_batch_tokens)
        self.cache = KVCache(num_blocks, 4, prefix_caching=prefix_caching)
        self.scheduler = Scheduler(
            build_policy(policy, options),
            self.cache,
            self.budgets,
            self.executor.info,
            default_slo=Slo(ttft_s=1.0, tpot_s=0.1),
            lanes=lanes,
        )
        self.loop = EngineLoop(self.scheduler, self.executor, self.clock, check_every_step=True)
        self.tokens: dict[str, list[int]] = {}
        self.times: dict[str, list[float]] = {}
        self.ended: dict[str, TokenEvent] = {}
        self.outcomes: dict[str, StepOutcome] = {}
        self.scores: dict[str, Score] = {}
        self.failures: dict[str, str] = {}
        self.cancelled: set[str] = set()

    def open(self, name: str, seed: int = 0) -> None:
        self.loop.teaching.open_trainer(TrainerSpec(name, LoraSpec(seed=seed)))

    def step(self) -> None:
        """One iteration, or the wait for the next one. No policy lets requests wait for nothing."""
        pause_s = self.loop.pause_s
        assert pause_s < 1e9, "nothing will ever happen"
        self.clock.advance(max(pause_s, 1e-6))
        for event in self.loop.step():
            assert event.request_id not in self.ended, "an event after the last one"
            self.tokens.setdefault(event.request_id, []).extend(event.tokens)
            self.times.setdefault(event.request_id, []).append(self.clock.now())
            if event.finish_reason is not None:
                self.ended[event.request_id] = event
        assert self.scheduler.next_decision.stalled_s(self.clock.now()) == 0.0, (
            "the policy runs nothing"
        )
        self.collect()

    def collect(self) -> None:
        for learned in self.loop.teaching.take_learned():
            if isinstance(learned, StepOutcome):
                assert learned.step_id not in self.outcomes
                assert learned.step_id not in self.cancelled
                self.outcomes[learned.step_id] = learned
            elif isinstance(learned, Score):
                assert learned.request_id not in self.scores
                self.scores[learned.request_id] = learned
            else:
                assert isinstance(learned, ScoreFailed)
                self.failures[learned.request_id] = learned.reason

    def cancel(self, trainer: str) -> None:
        self.cancelled |= set(self.loop.teaching.cancel_steps(trainer))

    def run(self, limit: int = 4000) -> None:
        """Until nothing is left that the policy would ever run."""
        for _ in range(limit):
            if self.loop.pause_s > 1e9:
                break
            self.step()
        else:
            raise AssertionError("work never ends")
        assert self.cache.held_blocks == 0
        assert not self.executor.recordings, "a recording is left over"
        for plan in self.plans:
            assert plan.num_tokens <= self.budgets.max_batch_tokens
            assert len(plan.spans) <= self.budgets.max_sequences

    @property
    def plan_text(self) -> str:
        """All plans, to compare two runs."""
        return "\n".join(repr(StepPlan(plan.step, (plan,))) for plan in self.plans)


def request(name: str, prompt: tuple[int, ...], max_tokens: int = 8, **more: object) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return Request(name, prompt, sampling, **more)  # type: ignore[arg-type]


def target(length: int, prompt: int = 2, seed: int = 0) -> TrainingSequence:
    tokens = tuple((seed + place) % 40 for place in range(length))
    return TrainingSequence(tokens, prompt, Role.TARGET)


def sft_step(name: str, trainer: str, *batches: list[int], urgency: float = 0.69) -> TrainingStep:
    """Micro-batches of sequences of the given lengths in tokens."""
    micro = tuple(
        tuple(target(length, seed=place + number) for place, length in enumerate(lengths))
        for number, lengths in enumerate(batches)
    )
    return TrainingStep(name, trainer, LossSpec(LossKind.SFT), micro, urgency)


def dpo_step(name: str, trainer: str, lengths: list[int]) -> TrainingStep:
    """One micro-batch of pairs."""
    sequences = tuple(
        TrainingSequence(target(length, seed=place).tokens, 2, role, reference=-5.0)
        for place, length in enumerate(lengths)
        for role in (Role.CHOSEN, Role.REJECTED)
    )
    return TrainingStep(name, trainer, LossSpec(LossKind.DPO), (sequences,))


def kto_step(name: str, trainer: str, lengths: list[int]) -> TrainingStep:
    """One micro-batch: labelled sequences in turn, each with a mismatched one."""
    labels = (Role.DESIRABLE, Role.UNDESIRABLE)
    sequences = tuple(
        TrainingSequence(target(length, seed=place).tokens, 2, role, reference=-5.0)
        for place, length in enumerate(lengths)
        for role in (labels[place % 2], Role.MISMATCHED)
    )
    return TrainingStep(name, trainer, LossSpec(LossKind.KTO), (sequences,))


def bench_of(policy: str, **more) -> Bench:
    if policy == "temporal":
        return Bench("unified", {"temporal_only": "true"}, **more)
    if policy == "overdue":
        return Bench("unified", {"patience_s": "0.05"}, **more)
    if policy == "mace_bin":
        return Bench("mace", {"bins": "false"}, **more)
    if policy == "ekya":
        return Bench("ekya", {"interval_s": "0.5"}, **more)
    return Bench(policy, **more)


def check_answer(bench: Bench, asked) -> None:
    draw = Draw(0, 0, 0, asked.sampling)
    wanted = expected_tokens(asked.prompt, draw, None, asked.sampling.max_tokens, frozenset())
    assert bench.tokens[asked.request_id] == wanted
