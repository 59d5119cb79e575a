"""The answer is transformers' own, whatever runs beside it (float32, teacher-forced).

The whole engine but for its process: policy, admission, blocks, batches, model. At every position
where the reference's two best logits differ by more than 1e-3 the engine must have chosen the same
token, over chunk sizes, neighbours, prefix hits, preemption, and PEFT adapters (against PEFT).
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from devices import DEVICES
from tandem.build import join_loop
from tandem.config import AdapterConfig, CacheConfig, ModelConfig, SchedulingConfig, Settings
from tandem.core.request import Request
from tandem.core.sampling import SamplingParams
from tandem.executor.executor import DeviceExecutor
from tandem.executor.kv_storage import block_bytes
from tandem.model import fused_layer
from tandem.model.attention.base import AttentionParams
from tandem.model.attention.cpu import CpuBatch
from tandem.model.attention.sdpa import SdpaBatch
from tandem.model.load import LoadedModel, prepare_model
from tiny_models import (
    VOCAB,
    clear_rows,
    make_adapted,
    make_model,
    reference_logits,
    save_adapter,
    with_kernels,
)

# Two families, one with a sliding window, have more mixes than the others.
MORE_EXAMPLES = {"llama": 12, "gemma2": 12}


def examples(name: str) -> int:
    """Mixes of a family."""
    return 400 if os.environ.get("TANDEM_TEST_FULL") else MORE_EXAMPLES.get(name, 7)


OUTPUT_TOKENS = 10
# Few different tokens and shared beginnings, so that prefixes are found in the cache.
PROMPTS = st.builds(
    lambda shared, own: [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22][:shared] + own,
    st.integers(0, 12),
    st.lists(st.integers(3, VOCAB - 1), min_size=1, max_size=24),
)


@dataclass
class Mix:
    """One random situation."""

    block_size: int
    blocks: int
    max_batch_tokens: int
    max_sequences: int
    policy: str
    runs_ahead: bool
    requests: list[tuple[list[int], str | None, int, int]] = field(default_factory=list)


@st.composite
def mixes(draw: Any, adapters: tuple[str | None, ...]) -> Mix:
    block_size = draw(st.sampled_from([1, 4, 16]))
    # From barely enough for one sequence (so that others are preempted) to plenty.
    least = -(-(36 + OUTPUT_TOKENS) // block_size)
    mix = Mix(
        block_size=block_size,
        blocks=draw(st.integers(least, least + 2) | st.integers(least, 4 * least)),
        max_batch_tokens=draw(st.integers(4, 80)),
        max_sequences=draw(st.integers(1, 6)),
        policy=draw(st.sampled_from(["fcfs", "priority"])),
        runs_ahead=draw(st.booleans()),
    )
    for _ in range(draw(st.integers(2, 6))):
        # prompt, adapter, priority, iterations before the next request comes
        mix.requests.append(
            (
                draw(PROMPTS),
                draw(st.sampled_from(adapters)),
                draw(st.integers(0, 2)),
                draw(st.integers(0, 5)),
            )
        )
    return mix


# What the examples of this module met, so that no dimension can vanish unnoticed.
SEEN = {"preemptions": 0, "prefix hits": 0}


@cache
def loaded(name: str, kernels: str, device: str = "cpu") -> LoadedModel:
    return prepare_model(make_model(name).to(device), ModelConfig(model=name, kernels=kernels))


@cache
def reference(name: str, adapter: str | None) -> Any:
    return make_model(name) if adapter is None else make_adapted(name, Path(adapter))


def answers(model: LoadedModel, mix: Mix, paths: dict[str, str]) -> list[list[int]]:
    """Run a mix through a fresh engine over `model`."""
    cache_config = CacheConfig(mix.block_size, mix.blocks * block_bytes(model, mix.block_size))
    scheduling = SchedulingConfig(mix.policy, mix.max_sequences, mix.max_batch_tokens)
    config = Settings(cache=cache_config, scheduling=scheduling)
    executor = DeviceExecutor(model, cache_config, scheduling, AdapterConfig())
    loop = join_loop(config, executor, check_every_step=True)
    executor.runs_ahead = mix.runs_ahead
    for name, path in paths.items():
        loop.adapters.load(name, path)
    sampling = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
    found: list[list[int]] = [[] for _ in mix.requests]

    def step() -> None:
        for event in loop.step():
            assert event.error is None, event.error
            found[int(event.request_id)].extend(event.tokens)

    for place, (prompt, adapter, priority, pause) in enumerate(mix.requests):
        request = Request(str(place), tuple(prompt), sampling, adapter=adapter, priority=priority)
        loop.add(request)
        for _ in range(pause):
            step()
    while loop.has_work:
        step()
    for name in paths:
        loop.adapters.unload(name)
    stats = loop.stats()
    SEEN["preemptions"] += stats.preemptions
    SEEN["prefix hits"] += stats.prefix_hits_tokens
    return found


@dataclass
class Agreement:
    """How many positions decide clearly, and where the engine chose otherwise."""

    clear: int = 0
    positions: int = 0
    different: list[tuple[int, int]] = field(default_factory=list)

    def add(self, model: Any, prompt: list[int], answer: list[int]) -> None:
        assert len(answer) == OUTPUT_TOKENS
        logits = reference_logits(model, prompt + answer)[len(prompt) - 1 : -1]
        clear, best = clear_rows(logits), logits.argmax(-1)
        self.positions += len(answer)
        self.clear += int(clear.sum())
        wrong = clear & (best != torch.tensor(answer))
        self.different += [(int(row), answer[int(row)]) for row in wrong.nonzero()]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("name", "kernels"),
    with_kernels(["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3"]),
)
def test_greedy_equals_transformers(name: str, kernels: str, device: str) -> None:
    model, total = loaded(name, kernels, device), Agreement()

    @settings(max_examples=examples(name), database=None, derandomize=True,
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(mix=mixes((None,)))
    def run(mix: Mix) -> None:
        agreement = Agreement()
        for (prompt, *_), answer in zip(mix.requests, answers(model, mix, {}), strict=True):
            agreement.add(reference(name, None), prompt, answer)
        total.positions += agreement.positions
        total.clear += agreement.clear
        assert not agreement.different

    run()
    assert total.clear >= 0.95 * total.positions, "the test model does not decide clearly"


@pytest.fixture(scope="module")
def adapter_paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """Per architecture two PEFT directories of different rank and targets."""
    folder = tmp_path_factory.mktemp("adapters")
    return {
        name: {
            "small": str(save_adapter(folder, name, 1)),
            "large": str(
                save_adapter(folder, name, 2, r=8, lora_alpha=4, target_modules="all-linear")
            ),
        }
        for name in ("llama", "qwen3", "gemma2")
    }


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("name", "kernels"), with_kernels(["llama", "qwen3", "gemma2"], plain=["llama"])
)
def test_greedy_with_adapters_equals_peft(
    name: str, kernels: str, device: str, adapter_paths: dict[str, dict[str, str]]
) -> None:
    model, paths, total = loaded(name, kernels, device), adapter_paths[name], Agreement()

    @settings(max_examples=examples(name), database=None, derandomize=True,
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(mix=mixes((None, "small", "large")))
    def run(mix: Mix) -> None:
        agreement = Agreement()
        found = answers(model, mix, paths)
        for (prompt, adapter, *_), answer in zip(mix.requests, found, strict=True):
            path = paths[adapter] if adapter is not None else None
            agreement.add(reference(name, path), prompt, answer)
        total.positions += agreement.positions
        total.clear += agreement.clear
        assert not agreement.different

    run()
    assert total.clear >= 0.95 * total.positions


def test_the_mixes_met_preemption_and_prefix_hits() -> None:
    """Runs after the tests above (in file order) and looks at what they met."""
    if not any(SEEN.values()):
        pytest.skip("the mixes were not run")
    assert SEEN["preemptions"] > 10 and SEEN["prefix hits"] > 100


def test_generate_itself_agrees() -> None:
    """Free-running `generate`, not teacher-forced, for one prompt that decides clearly."""
    prompt = [11, 12, 13, 14, 40, 41, 42]
    mix = Mix(4, 64, 5, 4, "fcfs", True, [(prompt, None, 0, 0), ([50, 51, 52], None, 0, 0)])
    found = answers(loaded("llama", "auto"), mix, {})[0]
    own = reference("llama", None).generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=OUTPUT_TOKENS,
        min_new_tokens=OUTPUT_TOKENS,
        do_sample=False,
        eos_token_id=None,
    )
    assert found == own[0, len(prompt) :].tolist()


@pytest.mark.parametrize("kernels", ["auto", "off"])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_broken_mask_is_noticed(name: str, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a window that is one token off must show."""
    batch: Any = CpuBatch if loaded(name, kernels).kernel.name == "cpu" else SdpaBatch
    honest, block = batch.attend, fused_layer.attention_block

    def shifted(window: int) -> int:
        return window - 1 if window else 8

    def off_by_one(self: Any, query: Any, key: Any, value: Any, store: Any, params: Any) -> Any:
        other = AttentionParams(params.scale, shifted(params.window), params.softcap)
        return honest(self, query, key, value, store, other)

    def block_off_by_one(x: Any, weights: Any, *others: Any) -> Any:
        return block(x, replace(weights, window=shifted(weights.window)), *others)

    monkeypatch.setattr(batch, "attend", off_by_one)
    monkeypatch.setattr(fused_layer, "attention_block", block_off_by_one)
    mix = Mix(4, 64, 16, 4, "fcfs", True, [(list(range(20, 50)), None, 0, 0)])
    agreement = Agreement()
    for (prompt, *_), answer in zip(
        mix.requests, answers(loaded(name, kernels), mix, {}), strict=True
    ):
        agreement.add(reference(name, None), prompt, answer)
    assert agreement.different
