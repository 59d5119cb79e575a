"""Training on the real executor beside requests: answers do not change, losses fall, versions hold.

A tiny float32 model through the whole engine but for its process. Greedy answers must be the same
with and without training beside them wherever the reference decides clearly (tests/tiny_models).
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from learning_bench import sft_step
from safetensors.torch import load_file

from tandem.adapters.files import inspect_adapter
from tandem.build import join_loop
from tandem.config import (
    AdapterConfig,
    CacheConfig,
    LearningConfig,
    ModelConfig,
    SchedulingConfig,
    Settings,
)
from tandem.core.plan import LanePlan, working_key
from tandem.core.ports import Urgent, never
from tandem.core.request import Request
from tandem.core.sampling import SamplingParams
from tandem.core.training import (
    LoraSpec,
    LossKind,
    LossSpec,
    OptimizerSpec,
    Role,
    Score,
    ScoreRequest,
    StepOutcome,
    TrainerSpec,
    TrainingSequence,
    TrainingStep,
)
from tandem.core.version import AdapterVersion
from tandem.engine.loop import EngineLoop
from tandem.executor.executor import DeviceExecutor
from tandem.executor.kv_storage import block_bytes
from tandem.model.load import LoadedModel, prepare_model
from tiny_models import CLEAR_GAP, VOCAB, make_model, reference_logits

OUTPUT_TOKENS = 24
PROMPTS = [[11 + i, 12, 13, 14 + i, 15, 16 + 3 * i] for i in range(4)]


@cache
def model() -> LoadedModel:
    return prepare_model(make_model("llama"), ModelConfig(model="llama", dtype="float32"))


class Engine:
    """A loop and everything it said."""

    def __init__(
        self, policy: str = "unified", blocks: int = 64, ttft_slo: float = 1.0, **options: str
    ) -> None:
        cache_config = CacheConfig(16, blocks * block_bytes(model(), 16))
        scheduling = SchedulingConfig(policy, 8, 48, policy_options=options, ttft_slo=ttft_slo)
        learning = LearningConfig(recording_tokens=160)
        executor = DeviceExecutor(model(), cache_config, scheduling, AdapterConfig(), learning)
        settings = Settings(cache=cache_config, scheduling=scheduling)
        self.executor = executor
        self.working_rows = 0
        self.opened: list[tuple[int, ...]] = []
        submit = executor.submit

        def counted(plan: LanePlan, urgent: Urgent = never) -> int:
            rows = [len(span.tokens) for span in plan.spans if span.adapter == working_key("t")]
            self.working_rows += sum(rows)
            self.opened += [each.lengths for each in plan.opens]
            return submit(plan, urgent)

        executor.submit = counted  # type: ignore[method-assign]
        self.loop: EngineLoop = join_loop(settings, executor, check_every_step=True)
        self.tokens: dict[str, list[int]] = {}
        self.adapters: dict[str, set[str | None]] = {}
        self.outcomes: dict[str, StepOutcome] = {}
        self.scores: dict[str, Score] = {}

    def open(self, name: str, *, eps: float = 1e-8, **spec: object) -> None:
        optimizer = OptimizerSpec(learning_rate=5e-3, eps=eps)
        self.loop.teaching.open_trainer(
            TrainerSpec(name, LoraSpec(rank=4, seed=len(name)), optimizer,
                        **spec)  # type: ignore[arg-type]
        )  # fmt: skip

    def ask(self, name: str, prompt: list[int], adapter: str | None = None) -> None:
        sampling = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
        self.loop.add(Request(name, tuple(prompt), sampling, adapter=adapter))

    def step(self) -> None:
        for event in self.loop.step():
            assert event.error is None, event.error
            self.tokens.setdefault(event.request_id, []).extend(event.tokens)
            self.adapters.setdefault(event.request_id, set()).add(event.adapter)
        for learned in self.loop.teaching.take_learned():
            if isinstance(learned, StepOutcome):
                assert learned.applied, learned.problem
                self.outcomes[learned.step_id] = learned
            else:
                assert isinstance(learned, Score), learned
                self.scores[learned.request_id] = learned

    def run(self) -> None:
        while self.loop.has_work:
            self.step()
        stats = self.loop.stats()
        assert stats.running == stats.kv_blocks_used == stats.training_waiting == 0
        self.executor.training.check()

    def score(self, tokens: tuple[int, ...], **under: str) -> float:
        name = f"score{len(self.scores)}"
        self.loop.teaching.add_score(ScoreRequest(name, tokens, 4, **under))
        self.run()
        return self.scores[name].logprob


def pairs(rng: random.Random, count: int) -> tuple[TrainingSequence, ...]:
    """Chosen completions of small tokens, rejected ones of large tokens."""
    found = []
    for _ in range(count):
        prompt = [rng.randrange(3, VOCAB) for _ in range(4)]
        for role, low in ((Role.CHOSEN, 3), (Role.REJECTED, VOCAB // 2)):
            completion = [rng.randrange(low, low + 20) for _ in range(rng.randrange(4, 12))]
            found.append(TrainingSequence(tuple(prompt + completion), 4, role, reference=-40.0))
    return tuple(found)


def dpo(name: str, trainer: str, rng: random.Random) -> TrainingStep:
    return TrainingStep(
        name, trainer, LossSpec(LossKind.DPO, beta=0.1), (pairs(rng, 2), pairs(rng, 2))
    )


@pytest.mark.parametrize("policy", ["unified", "temporal", "fcfs", "adainf"])
def test_greedy_answers_are_the_same_beside_training(policy):
    found = []
    for training in (False, True):
        options = {"temporal_only": "true"} if policy == "temporal" else {}
        engine = Engine("unified" if policy == "temporal" else policy, **options)
        for name in "tu":
            engine.open(name * (1 + (name == "u")))
        for place, prompt in enumerate(PROMPTS):
            engine.ask(f"r{place}", prompt)
            if training:
                for name in ("t", "uu"):
                    rng = random.Random(place)
                    engine.loop.teaching.add_step(dpo(f"{name}{place}", name, rng))
            for _ in range(3):
                engine.step()
        engine.run()
        assert len(engine.outcomes) == (8 if training else 0)
        found.append([engine.tokens[f"r{place}"] for place in range(len(PROMPTS))])
    for prompt, alone, beside in zip(PROMPTS, *found, strict=True):
        assert len(beside) == OUTPUT_TOKENS
        logits = reference_logits(make_model("llama"), [*prompt, *beside])
        for place, token in enumerate(beside):
            best = logits[len(prompt) + place - 1].topk(2).values
            if best[0] - best[1] <= CLEAR_GAP:
                break  # from here on both may differ
            assert alone[place] == token


def test_a_micro_batch_in_parts_teaches_the_same(tmp_path: Path, monkeypatch):
    """Cut anywhere, pairs and KTO's mismatched sequences included: same losses and parameters."""
    rng = random.Random(11)
    mismatched, *others = (replace(each, role=Role.MISMATCHED) for each in pairs(rng, 1))
    desirable = [replace(each, role=Role.DESIRABLE) for each in pairs(rng, 3)]
    kto = (mismatched, *desirable, *others)
    steps = [
        sft_step("sft", "t", [40, 41, 20]),
        dpo("dpo", "t", rng),
        TrainingStep("kto", "t", LossSpec(LossKind.KTO), (kto,)),
    ]
    trained, losses, opened = [], [], []
    for rows in (160, 20, 1):
        monkeypatch.setattr("tandem.scheduling.learning.recording_rows", lambda *_, r=rows: r)
        engine = Engine()
        engine.open("t", eps=1e-5)  # or the sign of what is only rounding counts as much as any
        engine.loop.teaching.snapshot_trainer("t").write(str(tmp_path / f"{rows}-start"))
        opened.append([])
        for step in steps:
            engine.loop.teaching.add_step(step)
            engine.run()
            opened[-1].append(len(engine.opened))
        path = tmp_path / str(rows)
        engine.loop.teaching.snapshot_trainer("t").write(str(path))
        trained.append(load_file(path / "adapter_model.safetensors"))
        losses.append([engine.outcomes[step.step_id].loss for step in steps])
    assert opened[0] == [1, 3, 4] and opened[2] == [3, 11, 17]
    assert all(a < b for a, b in pairwise([0, *opened[1]]))
    assert opened[0][1] < opened[1][1] < opened[2][1]
    start = load_file(tmp_path / "1-start" / "adapter_model.safetensors")
    for other, found in zip(trained[1:], losses[1:], strict=True):
        assert found == pytest.approx(losses[0], rel=1e-5)
        for name, whole in trained[0].items():
            travelled = (whole - start[name]).norm()
            assert (other[name] - whole).norm() <= 1e-3 * travelled, name


def test_a_slow_device_records_in_parts():
    """An objective that no layer keeps leaves 128 rows together, or what one sequence has."""
    found = []
    for ttft_slo in (1.0, 1e-9):
        engine = Engine(ttft_slo=ttft_slo)
        engine.open("t")
        engine.loop.teaching.add_step(sft_step("sft", "t", [40, 41, 42, 20]))
        engine.run()
        found.append(engine.opened)
    assert found == [[(39, 40, 41, 19)], [(39, 40, 41), (19,)]]


def test_losses_fall_for_two_trainers_of_different_losses():
    engine = Engine()
    engine.open("dpo")
    engine.open("sft")
    rng = random.Random(1)
    fixed = (pairs(rng, 3),)
    for number in range(8):
        engine.loop.teaching.add_step(
            TrainingStep(f"d{number}", "dpo", LossSpec(LossKind.DPO, beta=0.1), fixed)
        )
        engine.loop.teaching.add_step(sft_step(f"s{number}", "sft", [20, 30], [12]))
        engine.step()
    engine.run()
    for name in "ds":
        losses = [engine.outcomes[f"{name}{number}"].loss for number in range(8)]
        assert losses[-1] < 0.9 * losses[0]
        assert [engine.outcomes[f"{name}{number}"].revision for number in range(8)] == list(
            range(1, 9)
        )
    assert engine.loop.stats().memory_bytes["trainers"] > 0


def test_a_score_under_working_parameters_is_what_the_step_saw():
    engine = Engine()
    engine.open("t")
    sequence = pairs(random.Random(3), 1)[0]
    base = engine.score(sequence.tokens)
    fresh = engine.score(sequence.tokens, trainer="t")
    assert fresh == pytest.approx(base, abs=1e-4), "B starts at zero"
    target = TrainingSequence(sequence.tokens, 4, Role.TARGET)
    for number in range(3):
        engine.loop.teaching.add_step(
            TrainingStep(f"s{number}", "t", LossSpec(LossKind.SFT), ((target,),))
        )
    engine.run()
    seen = [engine.outcomes[f"s{number}"].logprobs[0][0] for number in range(3)]
    assert seen[0] == pytest.approx(base, abs=1e-4) and seen[0] < seen[1] < seen[2]
    assert engine.score(sequence.tokens, trainer="t") > seen[2]
    assert engine.score(sequence.tokens) == pytest.approx(base, abs=1e-4)


def test_cancelled_steps_leave_the_trainer_as_it_was():
    trained = []
    for cancel in (False, True):
        engine = Engine()
        engine.open("t")
        rng = random.Random(5)
        first, other, last = (dpo(name, "t", rng) for name in ("first", "other", "last"))
        engine.loop.teaching.add_step(first)
        engine.run()
        if cancel:
            engine.loop.teaching.add_step(other)
            for _ in range(3):
                engine.step()
            assert engine.loop.teaching.cancel_steps("t") == ["other"]
        engine.loop.teaching.add_step(last)
        engine.run()
        trained.append(engine.score(first.micro_batches[0][0].tokens, trainer="t"))
    assert trained[0] == pytest.approx(trained[1], abs=1e-4)


def test_a_staged_version_is_adopted_under_running_requests(tmp_path: Path):
    engine = Engine()
    engine.open("t")
    rng = random.Random(7)
    versions = []
    for number in (1, 2):
        for each in range(4):
            engine.loop.teaching.add_step(dpo(f"s{number}{each}", "t", rng))
        engine.run()
        path = str(tmp_path / f"v{number}")
        snapshot = engine.loop.teaching.snapshot_trainer("t")
        snapshot.write(path)
        digest = inspect_adapter(path).content_hash
        engine.loop.adapters.adopt(snapshot, "candidate", path, digest)
        versions.append(AdapterVersion("formal", number, digest, path))
    engine.loop.adapters.publish(versions[0])
    engine.ask("old", PROMPTS[0], "formal")
    for _ in range(4):
        engine.step()
    engine.loop.adapters.publish(versions[1])
    engine.ask("new", PROMPTS[0], "formal")
    engine.run()
    assert engine.adapters == {"old": {"formal@1"}, "new": {"formal@2"}}

    fresh = Engine()  # the same files, read from disk by an engine that never trained
    for version in versions:
        fresh.loop.adapters.publish(version)
        fresh.ask(f"r{version.number}", PROMPTS[0], "formal")
    fresh.run()
    assert fresh.tokens == {"r1": engine.tokens["old"], "r2": engine.tokens["new"]}
    tokens = (*PROMPTS[1], 20, 21)
    working = engine.score(tokens, trainer="t")
    assert engine.score(tokens, adapter="candidate") == pytest.approx(working, abs=1e-3)
    assert fresh.score(tokens, adapter="formal") == pytest.approx(working, abs=1e-3)


def test_training_survives_memory_pressure():
    """Requests take the blocks of training, which begins its forwards again; nothing changes."""
    found, forwarded = [], []
    for blocks, requests in ((64, 0), (7, len(PROMPTS))):
        engine = Engine("priority", blocks)
        engine.open("t")
        rng = random.Random(9)
        for number in range(2):
            engine.loop.teaching.add_step(sft_step(f"x{number}", "t", [90]))
            engine.loop.teaching.add_step(dpo(f"s{number}", "t", rng))
            engine.step()
            for place, prompt in enumerate(PROMPTS[:requests]):
                engine.ask(f"r{number}{place}", prompt)
        engine.run()
        found.append([outcome.logprobs for _, outcome in sorted(engine.outcomes.items())])
        forwarded.append(engine.working_rows)
    assert forwarded[1] > forwarded[0], "nothing was preempted"
    for roomy, tight in zip(*found, strict=True):
        for one, other in zip(roomy, tight, strict=True):
            assert one == pytest.approx(other, rel=1e-4)
