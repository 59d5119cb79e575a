"""Losses against TRL's and transformers' values, and against their derivatives."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, logsigmoid
from transformers.loss.loss_utils import ForCausalLMLoss

from tandem.core.errors import InvalidRequest
from tandem.core.training import LossKind, LossSpec, Role, TrainingSequence
from tandem.training.losses import micro_batch_loss, step_items

LENGTH = 7
PROMPT = 3


def sequence(role: Role, reference: float = 0.0, weight: float = 1.0) -> TrainingSequence:
    return TrainingSequence(tuple(range(LENGTH)), PROMPT, role, reference, weight)


def pairs(references: list[float], weights: list[float] | None = None) -> list[TrainingSequence]:
    roles = [Role.CHOSEN, Role.REJECTED]
    weights = weights or [1.0] * len(references)
    return [
        sequence(roles[at % 2], reference, weights[at]) for at, reference in enumerate(references)
    ]


def labelled(roles: list[Role], references: list[float]) -> list[TrainingSequence]:
    return [sequence(role, value) for role, value in zip(roles, references, strict=True)]


def per_token(sums: Tensor) -> Tensor:
    """[n, LENGTH - 1] whose rows sum to `sums`, as TRL's models give them (zeros at the prompt)."""
    spread = torch.linspace(0.5, 1.5, LENGTH - PROMPT, dtype=sums.dtype)
    values = sums[:, None] * (spread / spread.sum())
    return torch.cat([values.new_zeros(sums.shape[0], PROMPT - 1), values], dim=1)


def answer(sums: Tensor) -> SimpleNamespace:
    """What a model of TRL's returns with its fused head."""
    rows = per_token(sums)
    other = torch.zeros_like(rows)
    return SimpleNamespace(
        log_probs=rows, entropy=other, mean_logits=other, is_top1=torch.zeros_like(rows) > 0
    )


def accelerator() -> MagicMock:
    fake = MagicMock()
    fake.gather.side_effect = fake.gather_for_metrics.side_effect = lambda value: value
    fake.device = torch.device("cpu")
    return fake


def trl_dpo(
    policy: Tensor, reference: Tensor, weights: tuple[float, ...] = (1.0,), **settings: object
) -> Tensor:
    trl = pytest.importorskip("trl", reason="skipped: trl is not installed")
    count = policy.shape[0]
    mask = torch.tensor([[0] * PROMPT + [1] * (LENGTH - PROMPT)] * count)
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=accelerator(),
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_weights=list(weights),
        use_weighting=False,
        _tp_size=1,
        _total_train_tokens=0,
        _metrics={"train": defaultdict(list)},
        **settings,
    )
    inputs = {
        "input_ids": torch.zeros(count, LENGTH, dtype=torch.int64),
        "attention_mask": torch.ones(count, LENGTH, dtype=torch.int64),
        "completion_mask": mask,
        "ref_chosen_logps": reference[: count // 2],
        "ref_rejected_logps": reference[count // 2 :],
    }
    loss = trl.DPOTrainer._compute_loss(
        trainer, lambda **given: answer(policy), inputs, return_outputs=False
    )
    assert isinstance(loss, Tensor)
    return loss


def trl_kto(
    policy: Tensor,
    reference: Tensor,
    labels: list[bool],
    kl: Tensor,
    ref_kl: Tensor,
    spec: LossSpec,
) -> Tensor:
    trl = pytest.importorskip("trl", reason="skipped: trl is not installed")
    count = policy.shape[0]
    mask = torch.tensor([[0] * PROMPT + [1] * (LENGTH - PROMPT)] * count)
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=accelerator(),
        aux_loss_enabled=False,
        precompute_ref_logps=True,
        calculate_KL=True,
        loss_type="kto",
        beta=spec.beta,
        desirable_weight=spec.desirable_weight,
        undesirable_weight=spec.undesirable_weight,
        _compute_kl_logps=lambda model, batch: kl,
        _tp_size=1,
        _total_train_tokens=0,
        _metrics={"train": defaultdict(list)},
    )
    inputs = {
        "input_ids": torch.zeros(count, LENGTH, dtype=torch.int64),
        "attention_mask": torch.ones(count, LENGTH, dtype=torch.int64),
        "completion_mask": mask,
        "label": torch.tensor(labels),
        "ref_logps": reference,
        "ref_KL_logps": ref_kl,
    }
    loss = trl.KTOTrainer._compute_loss(
        trainer, lambda **given: answer(policy), inputs, return_outputs=False
    )
    assert isinstance(loss, Tensor)
    return loss


CHOSEN = torch.tensor([-20.0, -31.5, -7.25], dtype=torch.float64)
REJECTED = torch.tensor([-22.0, -25.0, -7.5], dtype=torch.float64)
REF_CHOSEN = torch.tensor([-21.0, -30.0, -8.0], dtype=torch.float64)
REF_REJECTED = torch.tensor([-21.5, -26.0, -6.0], dtype=torch.float64)


def interleave(first: Tensor, second: Tensor) -> list[float]:
    return torch.stack([first, second], dim=1).flatten().tolist()


@pytest.mark.parametrize("beta", [0.05, 0.1, 0.7])
def test_dpo_has_the_value_and_gradient_of_trl(beta: float) -> None:
    policy = torch.cat([CHOSEN, REJECTED]).requires_grad_()
    theirs = trl_dpo(
        policy,
        torch.cat([REF_CHOSEN, REF_REJECTED]),
        loss_types=["sigmoid"],
        beta=beta,
        label_smoothing=0.0,
    )
    theirs.backward()
    sequences = pairs(interleave(REF_CHOSEN, REF_REJECTED))
    spec = LossSpec(LossKind.DPO, beta=beta)
    ours = micro_batch_loss(spec, sequences, interleave(CHOSEN, REJECTED), 3)
    assert ours.loss == pytest.approx(theirs.item(), rel=1e-6)
    assert policy.grad is not None
    wanted = interleave(policy.grad[:3], policy.grad[3:])
    assert ours.coefficients == pytest.approx(wanted, rel=1e-6)
    assert sum(ours.item_losses) / 3 == pytest.approx(ours.loss)


def test_dpo_label_smoothing_is_conservative_dpo() -> None:
    beta, smooth = 0.3, 0.2
    policy = torch.cat([CHOSEN, REJECTED]).requires_grad_()
    z = beta * ((policy[:3] - REF_CHOSEN) - (policy[3:] - REF_REJECTED))
    (-(1 - smooth) * logsigmoid(z) - smooth * logsigmoid(-z)).mean().backward()
    spec = LossSpec(LossKind.DPO, beta=beta, label_smoothing=smooth)
    sequences = pairs(interleave(REF_CHOSEN, REF_REJECTED))
    ours = micro_batch_loss(spec, sequences, interleave(CHOSEN, REJECTED), 3)
    assert policy.grad is not None
    wanted = interleave(policy.grad[:3], policy.grad[3:])
    assert ours.coefficients == pytest.approx(wanted, rel=1e-9)


def test_dpo_label_smoothing_of_one_pair_is_that_of_trls_aot() -> None:
    """TRL's `sigmoid` ignores smoothing; its `aot` is the same formula on sorted differences."""
    spec = LossSpec(LossKind.DPO, beta=0.3, label_smoothing=0.2)
    policy, reference = torch.tensor([-5.0, -9.0]), torch.tensor([-6.0, -8.0])
    theirs = trl_dpo(policy, reference, loss_types=["aot"], beta=0.3, label_smoothing=0.2)
    ours = micro_batch_loss(spec, pairs([-6.0, -8.0]), [-5.0, -9.0], 1)
    assert ours.loss == pytest.approx(theirs.item(), rel=1e-6)


def test_the_likelihood_term_is_trls_sum_of_dpo_and_sft() -> None:
    policy = torch.cat([CHOSEN, REJECTED]).requires_grad_()
    theirs = trl_dpo(
        policy,
        torch.cat([REF_CHOSEN, REF_REJECTED]),
        (1.0, 5.0),
        loss_types=["sigmoid", "sft"],
        beta=0.1,
        label_smoothing=0.0,
    )
    theirs.backward()
    sequences = pairs(interleave(REF_CHOSEN, REF_REJECTED))
    spec = LossSpec(LossKind.DPO, beta=0.1, rpo_alpha=5.0)
    ours = micro_batch_loss(spec, sequences, interleave(CHOSEN, REJECTED), 3)
    assert ours.loss == pytest.approx(theirs.item(), rel=1e-6)
    assert policy.grad is not None
    wanted = interleave(policy.grad[:3], policy.grad[3:])
    assert ours.coefficients == pytest.approx(wanted, rel=1e-6)
    alone = micro_batch_loss(
        LossSpec(LossKind.DPO, beta=0.1), sequences, interleave(CHOSEN, REJECTED), 3
    )
    assert ours.item_losses == alone.item_losses  # a sample is learned by DPO's measure


def test_only_liked_answers_have_a_likelihood_term() -> None:
    sequences = labelled([Role.DESIRABLE, Role.UNDESIRABLE], [-20.0, -10.0])
    given = [-21.0, -9.0]
    plain, pulled = (
        micro_batch_loss(LossSpec(LossKind.KTO, rpo_alpha=alpha), sequences, given, 2)
        for alpha in (0.0, 5.0)
    )
    tokens = LENGTH - PROMPT
    assert pulled.loss - plain.loss == pytest.approx(5.0 * 21.0 / tokens / 2)
    change = [b - a for a, b in zip(plain.coefficients, pulled.coefficients, strict=True)]
    assert change == pytest.approx([-5.0 / tokens / 2, 0.0])
    assert pulled.item_losses == plain.item_losses


@pytest.mark.parametrize("shift", [-3.0, 3.0])
def test_kto_has_the_value_and_gradient_of_trl(shift: float) -> None:
    """With a KL estimate below zero (clamped) and one above."""
    spec = LossSpec(LossKind.KTO, beta=0.2, desirable_weight=1.3, undesirable_weight=0.7)
    labels = [True, False, True, False]
    policy = torch.tensor([-20.0, -31.5, -7.25, -9.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-21.0, -30.0, -8.0, -8.5], dtype=torch.float64)
    ref_kl = torch.tensor([-40.0, -41.0, -39.0, -50.0], dtype=torch.float64)
    kl = ref_kl + shift + torch.tensor([0.5, -0.25, 0.125, 0.0], dtype=torch.float64)
    theirs = trl_kto(policy, reference, labels, kl, ref_kl, spec)
    theirs.backward()
    roles = [Role.DESIRABLE if label else Role.UNDESIRABLE for label in labels]
    sequences = labelled(roles, reference.tolist())
    sequences += labelled([Role.MISMATCHED] * 4, ref_kl.tolist())
    ours = micro_batch_loss(spec, sequences, policy.tolist() + kl.tolist(), 4)
    assert policy.grad is not None
    assert ours.loss == pytest.approx(theirs.item(), rel=1e-6)
    assert ours.coefficients == pytest.approx([*policy.grad.tolist(), 0, 0, 0, 0], rel=1e-6)
    assert len(ours.item_losses) == 4


def test_kto_without_mismatched_sequences_has_no_kl_term() -> None:
    spec = LossSpec(LossKind.KTO)
    ours = micro_batch_loss(spec, [sequence(Role.DESIRABLE, -4.0)], [-4.0], 1)
    assert ours.loss == pytest.approx(0.5)


def test_sft_is_transformers_token_mean_over_the_whole_step() -> None:
    """Two micro-batches with one normaliser, as gradient accumulation has it."""
    torch.manual_seed(0)
    logits = torch.randn(3, LENGTH, 11, dtype=torch.float64)
    tokens = torch.randint(11, (3, LENGTH))
    labels = tokens.clone()
    labels[:, :PROMPT] = -100
    items = 3 * (LENGTH - PROMPT)
    theirs = sum(
        ForCausalLMLoss(part, some, 11, num_items_in_batch=torch.tensor(items))
        for part, some in ((logits[:2], labels[:2]), (logits[2:], labels[2:]))
    )
    sums = [
        -cross_entropy(row[PROMPT - 1 : -1], line[PROMPT:], reduction="sum").item()
        for row, line in zip(logits, tokens, strict=True)
    ]
    spec = LossSpec(LossKind.SFT)
    batches = [[sequence(Role.TARGET)] * 2, [sequence(Role.TARGET)]]
    assert step_items(spec, batches) == items
    parts = [
        micro_batch_loss(spec, batches[0], sums[:2], items),
        micro_batch_loss(spec, batches[1], sums[2:], items),
    ]
    assert sum(part.loss for part in parts) == pytest.approx(float(theirs), rel=1e-6)
    assert parts[0].coefficients == pytest.approx([-1 / items] * 2)


@pytest.mark.parametrize("kind", list(LossKind))
def test_coefficients_are_derivatives(kind: LossKind) -> None:
    """Weights included, by central differences."""
    spec = LossSpec(kind, beta=0.4, label_smoothing=0.1 if kind is LossKind.DPO else 0.0)
    roles = {
        LossKind.SFT: [Role.TARGET] * 4,
        LossKind.DPO: [Role.CHOSEN, Role.REJECTED] * 2,
        LossKind.KTO: [Role.DESIRABLE, Role.UNDESIRABLE, Role.DESIRABLE, Role.UNDESIRABLE],
    }[kind]
    weights = [0.5, 0.5, 2.0, 2.0]
    sequences = [sequence(role, -5.0, weight) for role, weight in zip(roles, weights, strict=True)]
    logprobs = [-4.0, -5.5, -6.0, -4.5]
    ours = micro_batch_loss(spec, sequences, logprobs, 5)
    step = 1e-5
    for at in range(4):
        ends = []
        for sign in (1, -1):
            moved = list(logprobs)
            moved[at] += sign * step
            ends.append(micro_batch_loss(spec, sequences, moved, 5).loss)
        assert ours.coefficients[at] == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-5)


def test_extreme_log_ratios_stay_finite() -> None:
    for logprobs in ([0.0, -1e6], [-1e6, 0.0]):
        value = micro_batch_loss(LossSpec(LossKind.DPO, beta=1.0), pairs([0.0, 0.0]), logprobs, 1)
        assert value.loss >= 0.0 and all(abs(number) <= 1.0 for number in value.coefficients)


@pytest.mark.parametrize(
    ("kind", "roles"),
    [
        (LossKind.SFT, [Role.CHOSEN]),
        (LossKind.DPO, [Role.CHOSEN]),
        (LossKind.DPO, [Role.REJECTED, Role.CHOSEN]),
        (LossKind.KTO, [Role.TARGET]),
    ],
)
def test_a_micro_batch_of_the_wrong_form_is_refused(kind: LossKind, roles: list[Role]) -> None:
    with pytest.raises(InvalidRequest):
        step_items(LossSpec(kind), [[sequence(role) for role in roles]])


def test_a_sequence_without_completion_is_refused() -> None:
    empty = TrainingSequence((1, 2), 2, Role.TARGET)
    with pytest.raises(InvalidRequest):
        step_items(LossSpec(LossKind.SFT), [[empty]])
