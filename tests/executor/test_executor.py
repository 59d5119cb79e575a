"""The executor against transformers and PEFT, driven by hand-made plans.

Sequences advance in random chunks beside random neighbours over scattered blocks, and every
prediction is compared with the model's own eager forward on the same text.
"""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass, replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import tiny_models
from devices import DEVICES
from tandem.config import AdapterConfig, CacheConfig, ModelConfig, SchedulingConfig
from tandem.core.errors import AdapterError, InvalidRequest
from tandem.core.plan import DEVICE_LANE, BlockCopy, Draw, LanePlan, Span, StepResult
from tandem.core.sampling import SamplingParams
from tandem.core.version import AdapterVersion
from tandem.executor.executor import DeviceExecutor
from tandem.model import fused_layer, kernels
from tandem.model.attention import sdpa
from tandem.model.load import load_model, prepare_model

BLOCK = 4
NUM_BLOCKS = 96
GREEDY = SamplingParams(temperature=0.0)


@dataclass
class Text:
    """A sequence under test: what it says, what should follow each row, how far it is."""

    seq_id: int
    tokens: list[int]
    logits: torch.Tensor
    table: tuple[int, ...]
    adapter: str | None = None
    done: int = 0


def make_executor(model, mode: str = "off") -> DeviceExecutor:
    return wrap(prepare_model(model, ModelConfig(model="tiny", kernels=mode)))


def wrap(loaded, num_blocks: int = NUM_BLOCKS) -> DeviceExecutor:
    bytes_each = sum(2 * s.kv_heads * s.head_dim for s in loaded.layers) * BLOCK * 4
    cache = CacheConfig(block_size=BLOCK, memory_bytes=num_blocks * bytes_each)
    return DeviceExecutor(loaded, cache, SchedulingConfig(max_sequences=64), AdapterConfig())


def run(executor: DeviceExecutor, *spans: Span, copies=(), step: int = 0) -> StepResult:
    executor.submit(LanePlan(step, DEVICE_LANE, spans, tuple(copies)))
    (result,) = executor.poll()
    return result


def make_texts(reference, count: int, rng: random.Random, adapter=None, first_id=0, pool=None):
    """Texts continued greedily by `reference`, with block tables scattered over the pool."""
    pool = pool if pool is not None else rng.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    texts = []
    for number in range(count):
        prompt = [rng.randrange(3, tiny_models.VOCAB) for _ in range(rng.randint(2, 30))]
        ids = reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=8,
            do_sample=False,
            eos_token_id=None,
        )[0].tolist()
        table = tuple(pool.pop() for _ in range(-(-len(ids) // BLOCK)))
        logits = tiny_models.reference_logits(reference, ids)
        texts.append(Text(first_id + number, ids, logits, table, adapter))
    return texts


def advance(executor: DeviceExecutor, texts: list[Text], rng: random.Random) -> tuple[int, int]:
    """Run all texts to their ends; returns how many rows were clear and how many disagreed."""
    clear = wrong = 0
    while pending := [text for text in texts if text.done < len(text.tokens)]:
        chosen = rng.sample(pending, rng.randint(1, len(pending)))
        spans = [_next_span(text, rng) for text in chosen]
        result = run(executor, *spans)
        assert result.failed == ()
        draws = {draw.seq_id: draw for draw in result.draws}
        assert [draw.seq_id for draw in result.draws] == [s.seq_id for s in spans if s.draws]
        scores = {score.seq_id: score for score in result.scores}
        for text, span in zip(chosen, spans, strict=True):
            rows = text.logits[span.start : span.end]
            decided = tiny_models.clear_rows(rows)
            clear += int(decided.sum())
            if decided[-1]:
                wrong += draws[text.seq_id].token != int(rows[-1].argmax())
            if span.score_targets:
                found = scores[text.seq_id].logprobs
                expected = rows.log_softmax(-1)
                for row, logprob in enumerate(found):
                    assert logprob.token == span.score_targets[row]
                    wrong += abs(logprob.logprob - float(expected[row, logprob.token])) > 2e-4
                    wrong += bool(decided[row]) and logprob.top[0][0] != int(rows[row].argmax())
            text.done = span.end
    return clear, wrong


def _next_span(text: Text, rng: random.Random) -> Span:
    left = len(text.tokens) - text.done
    count = rng.choice([1, 1, rng.randint(1, left), left])
    end = text.done + count
    scored = rng.random() < 0.5
    return Span(
        text.seq_id,
        text.done,
        tuple(text.tokens[text.done : end]),
        (text.table,),
        adapter=text.adapter,
        draws=(Draw(text.seq_id, 0, 0, GREEDY),),
        score_targets=tuple(text.tokens[text.done + 1 : end + 1]) if scored else (),
        score_top=2,
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", ["off", "auto"])
@pytest.mark.parametrize("name", sorted(tiny_models.ARCHITECTURES))
def test_equals_generate_in_any_chunks_beside_any_neighbours(name, mode, device):
    rng = random.Random(name)
    reference = tiny_models.make_model(name)
    executor = make_executor(tiny_models.make_model(name).to(device), mode)
    texts = make_texts(reference, 7, rng)
    for text in texts:
        for position in range(len(text.tokens) - 8, len(text.tokens)):
            row = text.logits[position - 1]
            if tiny_models.clear_rows(row[None])[0]:
                assert text.tokens[position] == int(row.argmax()), "the reference disagrees"
    clear, wrong = advance(executor, texts, rng)
    assert clear >= 0.95 * sum(len(text.tokens) for text in texts)
    assert wrong == 0


def blur_sdpa(monkeypatch):
    """Shift what each row may see by one key."""
    build = sdpa._GroupBuilder._bias

    def shifted(self, seen):
        seen = seen.copy()
        seen[..., 1:] = seen[..., :-1]
        return build(self, seen)

    monkeypatch.setattr(sdpa._GroupBuilder, "_bias", shifted)


def blur_cpu(monkeypatch):
    """Hide one key that the window still shows; give a short window where there is none."""
    attend, block = kernels.paged_attention, fused_layer.attention_block

    def shorter(window):
        return window - 1 if window else 12

    def shortened(*tensors, window, **options):
        return attend(*tensors, window=shorter(window), **options)

    def shortened_block(x, weights, *others):
        return block(x, replace(weights, window=shorter(weights.window)), *others)

    monkeypatch.setattr(kernels, "paged_attention", shortened)
    monkeypatch.setattr(fused_layer, "attention_block", shortened_block)


@pytest.mark.parametrize(("mode", "blur"), [("off", blur_sdpa), ("auto", blur_cpu)])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_a_broken_mask_is_noticed(name, mode, blur, monkeypatch):
    """Negative control of the comparison above."""
    if mode == "auto" and not kernels.status().available:
        pytest.skip("no C++ kernels on this machine")
    rng = random.Random(5)
    texts = make_texts(tiny_models.make_model(name), 5, rng)
    executor = make_executor(tiny_models.make_model(name), mode)
    blur(monkeypatch)
    _, wrong = advance(executor, texts, rng)
    assert wrong > 0


@pytest.mark.parametrize("device", DEVICES)
def test_half_precision_drifts_within_bounds(device):
    """Log-probabilities in bfloat16, through every kernel, against float32."""
    config = {"initializer_range": 0.05, "num_hidden_layers": 4}
    torch.manual_seed(1)
    reference = LlamaForCausalLM(LlamaConfig(**tiny_models._COMMON | config)).eval()
    executor = make_executor(copy.deepcopy(reference).to(device, torch.bfloat16), "auto")
    tokens = torch.randint(3, tiny_models.VOCAB, (60,)).tolist()
    table = (tuple(range(20, 35)),)
    drifts = []
    expected = tiny_models.reference_logits(reference, tokens).log_softmax(-1)
    for start, end in [(0, 30), (30, 55), (55, 59)]:
        span = Span(
            1, start, tuple(tokens[start:end]), table,
            score_targets=tuple(tokens[start + 1 : end + 1]),
        )  # fmt: skip
        for row, found in enumerate(run(executor, span).scores[0].logprobs, start):
            drifts.append(abs(found.logprob - float(expected[row, found.token])))
    assert len(drifts) == 59
    assert max(drifts) < 0.1 and sum(drifts) / len(drifts) < 0.02


@pytest.mark.parametrize("mode", ["off", "auto"])
def test_adapters_equal_peft_in_one_mixed_batch(tmp_path, mode):
    rng = random.Random(11)
    settings = {
        1: {"r": 4, "target_modules": ["q_proj", "v_proj"]},
        2: {
            "r": 3,
            "lora_alpha": 5,
            "use_rslora": True,
            "target_modules": r".*\.(o_proj|up_proj|down_proj)",
            "rank_pattern": {"layers.1.mlp.up_proj": 7},
            "alpha_pattern": {"down_proj": 2},
        },
    }
    executor = make_executor(tiny_models.make_model("llama"), mode)
    pool = rng.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    texts = make_texts(tiny_models.make_model("llama"), 2, rng, pool=pool)
    for seed, lora in settings.items():
        path = tiny_models.save_adapter(tmp_path, "llama", seed, **lora)
        adapted = tiny_models.make_adapted("llama", path)
        executor.read_adapter(AdapterVersion("a", 1, f"hash{seed}", str(path)))()
        texts += make_texts(adapted, 2, rng, f"hash{seed}", first_id=10 * seed, pool=pool)
    clear, wrong = advance(executor, texts, rng)
    assert clear >= 0.95 * sum(len(text.tokens) for text in texts)
    assert wrong == 0
    executor.drop_adapter("hash1")
    text = texts[2]
    result = run(executor, Span(10, 0, (5,), (text.table,), adapter="hash1"))
    assert result.failed == ((10, "adapter hash1 is not loaded"),)


def test_an_adapter_changes_the_answer(tmp_path):
    executor = make_executor(tiny_models.make_model("llama"))
    path = tiny_models.save_adapter(tmp_path, "llama", 3)
    executor.read_adapter(AdapterVersion("a", 1, "h", str(path)))()
    spans = [
        Span(i, 0, (9, 8, 7), ((i,),), adapter=adapter, score_targets=(8, 7))
        for i, adapter in enumerate([None, "h"])
    ]
    base, adapted = run(executor, *spans).scores
    assert base.logprobs[1].logprob != pytest.approx(adapted.logprobs[1].logprob, abs=1e-3)


def test_a_bad_adapter_changes_nothing(tmp_path):
    executor = make_executor(tiny_models.make_model("llama"))
    with pytest.raises(AdapterError, match=r"no adapter_config\.json"):
        executor.read_adapter(AdapterVersion("a", 1, "h", str(tmp_path)))()
    assert run(executor, Span(0, 0, (5,), ((0,),), adapter="h")).failed


def test_many_draws_from_one_prompt_follow_plan_order():
    executor = make_executor(tiny_models.make_model("qwen2"))
    sampling = SamplingParams(temperature=1.0, seed=3)
    forks = tuple(Draw(10 + i, i, 0, sampling) for i in range(3))
    long = Span(1, 0, (4, 5, 6, 7), ((0,),), draws=forks)
    short = Span(2, 0, (9,), ((1,),), draws=(Draw(2, 0, 0, GREEDY),))
    together = run(executor, long, short)
    assert [draw.seq_id for draw in together.draws] == [10, 11, 12, 2]
    alone = [run(executor, Span(1, 0, (4, 5, 6, 7), ((0,),), draws=(f,))).draws[0] for f in forks]
    assert list(together.draws[:3]) == alone


def test_copied_blocks_continue_a_sequence():
    executor = make_executor(tiny_models.make_model("llama"))
    run(executor, Span(1, 0, (4, 5, 6, 7, 8), ((3, 4),)))
    nine = {"draws": (Draw(2, 0, 0, SamplingParams(temperature=0.0, logprobs=1)),)}
    copied = run(
        executor, Span(2, 5, (9,), ((3, 7),), **nine), copies=[BlockCopy(0, source=4, target=7)]
    )
    original = run(executor, Span(2, 5, (9,), ((3, 4),), **nine))
    assert copied.draws[0].logprob.logprob == pytest.approx(original.draws[0].logprob.logprob)


@pytest.mark.parametrize(
    ("span", "reason"),
    [
        (Span(1, 0, (4, 5), ((),)), "0 blocks do not hold 2 tokens"),
        (Span(1, 0, (4,), ((NUM_BLOCKS,),)), "block that does not exist"),
        (Span(1, 0, (4,), ((-1,),)), "block that does not exist"),
        (Span(1, 0, (tiny_models.VOCAB,), ((0,),)), "outside of the vocabulary"),
        (Span(1, 0, (), ((0,),)), "no tokens"),
        (Span(1, 0, (4,), ((0,), (0,))), "KV groups"),
        (Span(1, tiny_models.MAX_LENGTH, (4,), (tuple(range(64)),)), "past the model's"),
        (Span(1, 0, (4, 5, 6), ((0,),), score_targets=(5,)), "scores were asked"),
    ],
)
def test_an_impossible_span_fails_alone(span, reason):
    executor = make_executor(tiny_models.make_model("llama"))
    good = Span(2, 0, (4, 5), ((1,),), draws=(Draw(2, 0, 0, GREEDY),))
    result = run(executor, span, good)
    assert [seq_id for seq_id, _ in result.failed] == [1]
    assert reason in result.failed[0][1]
    assert result.draws == run(executor, good).draws


def test_non_finite_logits_fail_alone_and_leave_no_trace(tmp_path):
    """A huge adapter overflows; its blocks are then reused by another sequence."""
    from safetensors.torch import load_file, save_file

    path = tiny_models.save_adapter(tmp_path, "llama", 1, target_modules=["v_proj", "k_proj"])
    weights = {k: v * 1e30 for k, v in load_file(path / "adapter_model.safetensors").items()}
    save_file(weights, path / "adapter_model.safetensors")
    executor = make_executor(tiny_models.make_model("llama"))
    executor.read_adapter(AdapterVersion("a", 1, "huge", str(path)))()
    draws = (Draw(2, 0, 0, GREEDY),)
    good = Span(2, 0, (4, 5, 6), ((1,),), draws=draws)
    expected = run(executor, good).draws
    bad = Span(1, 0, (4, 5, 6, 7), ((0,),), adapter="huge", draws=(Draw(1, 0, 0, GREEDY),))
    result = run(executor, bad, good)
    assert [seq_id for seq_id, _ in result.failed] == [1]
    assert result.draws == expected
    reused = Span(3, 0, (4, 5, 6), ((0,),))
    run(executor, reused)
    again = run(executor, Span(2, 2, (6,), ((0,),), draws=draws))
    assert again.draws == expected and not again.failed


def test_a_crash_in_the_forward_pass_is_charged_to_its_span(monkeypatch):
    executor = make_executor(tiny_models.make_model("llama"))
    hidden = type(executor._model).hidden

    def crash_on_nine(self, tokens, *others, **how):
        if 9 in tokens.tolist():
            raise RuntimeError("the kernel failed")
        return hidden(self, tokens, *others, **how)

    monkeypatch.setattr(type(executor._model), "hidden", crash_on_nine)
    good = Span(2, 0, (4, 5), ((1,),), draws=(Draw(2, 0, 0, GREEDY),))
    result = run(executor, Span(1, 0, (9,), ((0,),)), good)
    assert result.failed == ((1, "the forward pass failed: the kernel failed"),)
    assert len(result.draws) == 1


def test_only_wanted_rows_meet_the_head(monkeypatch):
    executor = make_executor(tiny_models.make_model("llama"))
    heights = []
    linear = executor._model.head.linear
    linear.register_forward_hook(lambda _m, inputs, _out: heights.append(inputs[0].shape[0]))
    spans = [Span(i, 0, tuple(range(4, 16)), ((3 * i, 3 * i + 1, 3 * i + 2),)) for i in range(2)]
    run(executor, *spans)
    assert heights == []
    drawing = Span(5, 0, tuple(range(4, 16)), ((8, 9, 10),), draws=(Draw(5, 0, 0, GREEDY),))
    run(executor, spans[0], drawing)
    assert heights == [1]


def test_info_and_cache_size_follow_the_configuration(tmp_path):
    path = tiny_models.save_model(tmp_path, "qwen2")
    loaded = load_model(ModelConfig(model=str(path), dtype="float32", max_model_len=50))
    executor = DeviceExecutor(
        loaded,
        CacheConfig(block_size=8, memory_bytes=1 << 40),
        SchedulingConfig(max_sequences=3),
        AdapterConfig(),
    )
    info = executor.info
    assert (info.max_model_len, info.num_blocks, info.block_size) == (50, 3 * 7, 8)
    assert (info.architecture, info.dtype, info.vocab_size) == ("Qwen2ForCausalLM", "float32", 160)
    assert info.eos_token_ids == (2,)
    with pytest.raises(InvalidRequest, match=r"cache\.memory_bytes"):
        wrap(loaded, num_blocks=0.5)


def test_a_cpu_computes_with_the_cores_that_others_leave(monkeypatch):
    left, before = [3], torch.get_num_threads()
    monkeypatch.setattr("tandem.executor.executor.FreeCores", lambda most: Left(most, left))
    loaded = prepare_model(tiny_models.make_model("llama"), ModelConfig(model="tiny"))
    torch.set_num_threads(3)
    try:
        executor = DeviceExecutor(
            loaded,
            CacheConfig(block_size=BLOCK, memory_bytes=1 << 16),
            SchedulingConfig(max_sequences=4),
            AdapterConfig(),
            share_cores=True,
        )
        for cores, share, threads in ((3, 1.0, 3), (1, 1.0, 1), (2, 1.0, 2), (3, 0.3, 1)):
            left[0] = cores
            executor.submit(LanePlan(0, DEVICE_LANE, (), share=share))
            assert torch.get_num_threads() == threads
        assert executor.info.threads == 3
    finally:
        torch.set_num_threads(before)


class Left:
    def __init__(self, most, left):
        assert most == 3
        self._left = left

    def count(self):
        return self._left[0]
