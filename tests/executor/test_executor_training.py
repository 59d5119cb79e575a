"""Trainers on the device: whole steps against PEFT and torch, files, cancelling, limits."""

from __future__ import annotations

import random
import re
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tiny_models
from devices import DEVICES
from tandem.core.errors import AdapterError, NoMemory, StoreError
from tandem.core.plan import (
    BackwardSlice,
    Discard,
    Draw,
    Span,
    Update,
)
from tandem.core.sampling import SamplingParams
from tandem.core.training import (
    LoraSpec,
    LossKind,
    LossSpec,
    OptimizerSpec,
    Role,
    Schedule,
    TrainerSpec,
)
from tandem.core.version import AdapterVersion
from training_harness import (
    Driver,
    gentle,
    make_executor,
    open_trainer,
    our_gradients,
    peft_model,
    peft_step,
    random_sequences,
)

DOCS = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
ROLES = {
    LossKind.SFT: (Role.TARGET,),
    LossKind.DPO: (Role.CHOSEN, Role.REJECTED),
    LossKind.KTO: (Role.DESIRABLE, Role.UNDESIRABLE, Role.MISMATCHED),
}


@pytest.fixture
def executor():
    return make_executor(tiny_models.make_model("llama"))


def parameters(executor, name="t"):
    snapshot = executor.snapshot_trainer(name)
    return snapshot.layout.named(snapshot.parameters.cpu())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", sorted(ROLES))
def test_ten_steps_end_where_peft_and_torch_end(kind, device):
    rng = random.Random(kind)
    executor = make_executor(gentle("llama").to(device))
    open_trainer(executor, learning_rate=2e-3, weight_decay=0.01)
    adapted = peft_model(gentle("llama"), executor)
    start = {key: value.clone() for key, value in parameters(executor).items()}
    trained = [p for key, p in adapted.named_parameters() if "lora_" in key]
    for p in trained:
        p.requires_grad_(True)
    adam = torch.optim.AdamW(trained, lr=2e-3, weight_decay=0.01)
    driver = Driver(executor, rng)
    for revision in range(10):
        count = 3 if kind is LossKind.KTO else 2
        batches = [random_sequences(rng, count, ROLES[kind]) for _ in range(2)]
        driver.step("t", revision, LossSpec(kind), batches)
        result = driver.update("t", revision)
        assert result.applied and result.revision == revision + 1
        peft_step(adapted, LossSpec(kind), batches)
        norm = torch.nn.utils.clip_grad_norm_(trained, 1.0)
        assert result.grad_norm == pytest.approx(float(norm), rel=1e-2)
        adam.step()
        adam.zero_grad()
    ours = parameters(executor)
    theirs = {
        key.replace(".default", ""): p.detach()
        for key, p in adapted.named_parameters()
        if "lora_" in key
    }
    gap = sum(float((ours[key] - theirs[key]).norm() ** 2) for key in ours) ** 0.5
    distance = sum(float((theirs[key] - start[key]).norm() ** 2) for key in ours) ** 0.5
    assert gap < 1e-3 * distance


def test_files_load_in_peft_with_the_same_logits_and_training_goes_on(executor, tmp_path):
    from peft import PeftModel

    driver = Driver(executor)
    open_trainer(executor, learning_rate=1e-3)
    batches = [random_sequences(random.Random(1), 2, ROLES[LossKind.SFT])]
    driver.step("t", 0, LossSpec(LossKind.SFT), batches)
    driver.update("t", 0)
    snapshot = executor.snapshot_trainer("t")
    path = tmp_path / "version"
    snapshot.write(str(path))
    with pytest.raises(AdapterError, match="exists"):
        snapshot.write(str(path))
    (tmp_path / "full").write_bytes(b"")
    with pytest.raises(StoreError, match="cannot write"):
        snapshot.write(str(tmp_path / "full" / "v"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = PeftModel.from_pretrained(tiny_models.make_model("llama"), path).eval()
    tokens = list(range(5, 15))
    expected = tiny_models.reference_logits(adapted, tokens).log_softmax(-1)
    executor.adopt(snapshot, "memory")
    executor.read_adapter(AdapterVersion("a", 1, "files", str(path)))()
    for key in ("memory", "files"):
        span = Span(1, 0, tuple(tokens), ((0, 1, 2),), key, score_targets=tuple(tokens[1:]))
        (score,) = driver.run(span).scores
        wanted = sum(float(expected[i, t]) for i, t in enumerate(tokens[1:]))
        assert score.total == pytest.approx(wanted, rel=1e-5, abs=1e-3)
    spec = TrainerSpec("again", optimizer=OptimizerSpec(learning_rate=1e-3), source=str(path),
                       resume=True)  # fmt: skip
    assert executor.open_trainer(spec).revision == 1
    for name in ("t", "again"):
        driver.step(name, 1, LossSpec(LossKind.SFT), batches)
        driver.update(name, 1)
    for key, value in parameters(executor).items():
        assert torch.equal(value, parameters(executor, "again")[key])


def test_a_schedule_of_its_own_counts_from_the_opening(executor, tmp_path):
    """A job that goes on with an adapter warms up and decays by its own updates, also resumed."""
    driver = Driver(executor)
    batches = [random_sequences(random.Random(1), 2, ROLES[LossKind.SFT])]

    def rates(name, first, count):
        found = []
        for revision in range(first, first + count):
            driver.step(name, revision, LossSpec(LossKind.SFT), batches)
            result = driver.update(name, revision)
            assert result.applied
            found.append(result.learning_rate)
        executor.snapshot_trainer(name).write(str(tmp_path / name))
        return found

    open_trainer(executor, "adapter", learning_rate=1e-3)
    assert rates("adapter", 0, 3) == [1e-3] * 3
    linear = OptimizerSpec(
        learning_rate=1e-3, schedule=Schedule.LINEAR, warmup_steps=2, total_steps=6
    )
    spec = TrainerSpec("job", optimizer=linear, source=str(tmp_path / "adapter"), own_schedule=True)
    assert executor.open_trainer(spec).revision == 3
    assert rates("job", 3, 3) == pytest.approx([0.0, 0.5e-3, 1e-3])
    resumed = replace(spec, name="resumed", source=str(tmp_path / "job"), resume=True)
    assert executor.open_trainer(resumed).revision == 6
    assert rates("resumed", 6, 3) == pytest.approx([0.75e-3, 0.5e-3, 0.25e-3])
    # Learning from feedback counts the adapter's updates: the warm-up is over, whoever made them.
    feedback = replace(spec, name="feedback", source=str(tmp_path / "resumed"), own_schedule=False)
    feedback = replace(feedback, optimizer=OptimizerSpec(learning_rate=1e-3, warmup_steps=10))
    executor.open_trainer(feedback)
    assert rates("feedback", 9, 2) == pytest.approx([0.9e-3, 1e-3])


@pytest.mark.parametrize(
    "changed", [{"weight_decay": 0.5}, {"max_grad_norm": 1e-9}, {"warmup_steps": 4}]
)
def test_the_optimisers_settings_change_the_result(executor, changed):
    driver = Driver(executor)
    batches = [random_sequences(random.Random(1), 2, ROLES[LossKind.SFT])]
    for name, options in (("plain", {}), ("changed", changed)):
        open_trainer(executor, name, learning_rate=1e-3, **options)
        for revision in range(2):
            driver.step(name, revision, LossSpec(LossKind.SFT), batches)
            driver.update(name, revision)
    theirs = parameters(executor, "changed")
    assert not all(
        torch.allclose(value, theirs[key], atol=1e-5)
        for key, value in parameters(executor, "plain").items()
    )


def test_an_adapter_trained_by_peft_is_taken_over(executor, tmp_path):
    path = tiny_models.save_adapter(tmp_path, "llama", 1)
    spec = TrainerSpec("t", LoraSpec(rank=99), source=str(path))
    state = executor.open_trainer(spec)
    assert state.revision == 0
    assert executor.snapshot_trainer("t").targets == ("q_proj", "v_proj")
    with pytest.raises(AdapterError, match="optimiser"):
        executor.open_trainer(TrainerSpec("u", source=str(path), resume=True))


def test_discard_forgets_and_other_trainers_go_on(executor):
    driver = Driver(executor)
    open_trainer(executor, "t")
    open_trainer(executor, "u", rank=2)
    batch = random_sequences(random.Random(2), 2, ROLES[LossKind.SFT])
    first, _ = driver.record("t", 0, batch)
    second, _ = driver.record("u", 0, batch)
    driver.run(slices=(BackwardSlice(first, 3, 1, (1.0, 1.0)),))
    driver.run(slices=(BackwardSlice(second, 3, 2, (1.0, 1.0)),))
    driver.run(discards=(Discard("t", (first, 99)),))
    assert executor.training._trainers["t"]._gradient is None
    driver.run(slices=(BackwardSlice(second, 2, 0, (1.0, 1.0)),))
    executor.close_trainer("t")
    executor.training.check()
    found = our_gradients(executor, "u")
    open_trainer(executor, "alone", rank=2)
    driver.backward(driver.record("alone", 0, batch)[0], (1.0, 1.0))
    for key, value in our_gradients(executor, "alone").items():
        assert torch.allclose(found[key], value, rtol=1e-4, atol=1e-6)


def test_the_account_names_every_purpose(executor):
    driver = Driver(executor)
    empty = executor.memory_bytes()
    assert empty["recordings"] == empty["trainers"] == empty["adapters"] == 0 < empty["weights"]
    open_trainer(executor)
    driver.record("t", 0, random_sequences(random.Random(5), 2, ROLES[LossKind.SFT]))
    account = executor.memory_bytes()
    assert account["recordings"] > 0 and account["trainers"] > 0 and account["adapters"] == 0
    executor.close_trainer("t")
    assert executor.memory_bytes()["trainers"] == 0
    documented = re.findall(r"^\| `([a-z_]+)` \| (?!gauge|counter|histogram)", DOCS, re.MULTILINE)
    assert set(documented) == set(account)


def test_trainers_are_refused_before_they_take_more_than_their_share():
    model = tiny_models.make_model("llama")
    executor = make_executor(model)
    open_trainer(executor)
    size = executor.snapshot_trainer("t").layout.size
    most = (4 + 1) * 4 * size  # masters, gradient, two moments; what passes read is float32 here

    executor = make_executor(model, trainer_bytes=most)
    open_trainer(executor)
    driver = Driver(executor)
    for _ in range(2):  # the second time there are moments beside a gradient
        batch = random_sequences(random.Random(5), 2, ROLES[LossKind.SFT])
        revision = executor.training._trainers["t"].revision
        number, _ = driver.record("t", revision, batch)
        driver.backward(number, (1.0, 1.0))
        executor.training.check()
        driver.run(updates=(Update("t", revision),))
    with pytest.raises(NoMemory, match="open trainers need"):
        open_trainer(executor, name="u")
    open_trainer(executor)  # in place of its namesake
    executor.close_trainer("t")
    open_trainer(executor, name="u")

    with pytest.raises(AdapterError, match="trainers may have") as refused:
        open_trainer(make_executor(model, trainer_bytes=most - 1))
    assert not isinstance(refused.value, NoMemory)


def test_trainers_whose_sources_were_read_at_the_same_time_take_no_more_than_their_share(tmp_path):
    executor = make_executor(tiny_models.make_model("llama"))
    open_trainer(executor)
    snapshot = executor.snapshot_trainer("t")
    snapshot.write(str(tmp_path / "source"))
    most = (4 + 1) * 4 * snapshot.layout.size
    executor = make_executor(tiny_models.make_model("llama"), trainer_bytes=most)
    first, second = (
        executor.read_trainer(TrainerSpec(name, source=str(tmp_path / "source")))
        for name in ("first", "second")
    )
    assert first().name == "first"
    with pytest.raises(NoMemory, match="open trainers need"):
        second()
    executor.training.check()


def test_more_than_fits_drops_recorded_inputs_and_gives_the_same_gradient():
    batch = random_sequences(random.Random(6), 2, ROLES[LossKind.SFT])
    rows = sum(len(s.tokens) - 1 for s in batch)
    found = []
    for room in (2 * rows, rows + 1):
        executor = make_executor(tiny_models.make_model("llama"), recording_tokens=room)
        open_trainer(executor)
        driver = Driver(executor)
        numbers = [driver.record("t", 0, batch)[0] for _ in range(2)]
        executor.training.check()
        for number in numbers:
            driver.backward(number, (1.0, 0.5))
        found.append(our_gradients(executor))
    for key, value in found[0].items():
        assert torch.allclose(found[1][key], value, rtol=1e-3, atol=1e-5 * float(value.abs().max()))


class Beside(Driver):
    """Puts one span of another sequence into the next plan, and keeps what it drew."""

    def run(self, *spans, **parts):
        waiting, self.waiting = self.waiting, []
        result = super().run(*spans, *waiting, **parts)
        self.drawn.extend(result.draws)
        return result

    waiting: list[Span]
    drawn: list


def test_neighbours_answer_the_same_with_training_beside_them(executor):
    driver = Beside(executor)
    driver.waiting, driver.drawn = [], []
    open_trainer(executor)
    batch = random_sequences(random.Random(7), 2, ROLES[LossKind.SFT])
    table = tuple(range(240, 250))

    def answer(busy: bool) -> list[int]:
        tokens, done = [5, 9, 11, 40, 7], 0
        for _ in range(12):
            draw = Draw(1, 0, 0, SamplingParams(temperature=0.0))
            driver.waiting = [Span(1, done, tuple(tokens[done:]), (table,), draws=(draw,))]
            done = len(tokens)
            if busy:
                driver.backward(driver.record("t", 0, batch)[0], (1.0, 1.0))
            else:
                driver.run()
            tokens.append(driver.drawn.pop().token)
        return tokens

    assert answer(True) == answer(False)
