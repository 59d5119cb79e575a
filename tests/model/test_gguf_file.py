"""GGUF files: what they hold is what transformers reads, and what it would lose is refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import tiny_gguf
from serving import DEMO_MODEL
from tandem.core.errors import UnsupportedModel
from tandem.core.sampling import SamplingParams
from tandem.llm import LLM
from tandem.model import gguf_file
from tandem.model.gguf_file import read_contents, write_checkpoint
from tandem.model.names import locate
from tandem.services.answering.tokenizer import Tokenizer
from tiny_models import reference_logits

WRITTEN = [Type.F32, Type.F16, Type.BF16, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0]
WRITTEN += [Type.TQ1_0, Type.TQ2_0, Type.MXFP4]
PROMPT = [5, 60, 61, 7, 200, 30, 31, 90, 4, 4, 150, 8, 77]
ANSWERED = SamplingParams(max_tokens=4, temperature=0.0, prompt_logprobs=0, ignore_eos=True)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TANDEM_MODEL_CACHE", str(tmp_path / "cache"))


def checkpoint_of(file, folder):
    folder.mkdir()
    write_checkpoint(file, read_contents(file), folder, lambda stage, done: None)
    return folder


def same_weights(left, right):
    ours, theirs = left.state_dict(), right.state_dict()
    assert ours.keys() == theirs.keys()
    return all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("kind", [*WRITTEN, *tiny_gguf.UNWRITTEN], ids=lambda kind: kind.name)
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_every_type_is_unpacked_as_transformers_does(tmp_path, architecture, kind):
    file = tiny_gguf.write(tmp_path / "tiny.gguf", tiny_gguf.make(architecture), kind)
    dtype = torch.float32 if kind is Type.F32 else torch.bfloat16
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=file.name, quantization_config=GgufConfig(dequantize=True), dtype=dtype
    )
    ours = AutoModelForCausalLM.from_pretrained(checkpoint_of(file, tmp_path / "c"), dtype="auto")
    assert ours.dtype is dtype
    assert same_weights(ours, theirs)
    logits = reference_logits(theirs.float(), PROMPT)
    assert logits.std() > 0.05 and logits.isfinite().all()
    assert torch.equal(reference_logits(ours.float(), PROMPT), logits)


@pytest.mark.parametrize("architecture", tiny_gguf.ARCHITECTURES)
def test_what_is_served_is_the_model_that_was_written(tmp_path, architecture):
    """Against the model itself, which the reader cannot have changed."""
    model = tiny_gguf.make(architecture)
    file = tiny_gguf.write(tmp_path / "tiny.gguf", model)
    llm = LLM(str(file), threads=1, memory_bytes=4 << 20, accustom_s=0.0, kernels="off")
    output = llm.generate([PROMPT], ANSWERED)[0]
    model.set_attn_implementation("eager")
    expected = reference_logits(model, PROMPT).log_softmax(-1)
    for place, found in enumerate(output.prompt_logprobs):
        assert found.logprob == pytest.approx(expected[place, PROMPT[place + 1]].item(), abs=2e-4)
    assert output.choices[0].tokens[0] == expected[-1].argmax().item()


@pytest.mark.parametrize("kind", [Type.Q4_1, Type.Q8_0, Type.Q6_K], ids=lambda kind: kind.name)
def test_what_is_served_is_what_transformers_unpacks(tmp_path, kind):
    file = tiny_gguf.write(tmp_path / "tiny.gguf", tiny_gguf.make("llama"), kind)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path,
        gguf_file=file.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    llm = LLM(
        str(file), threads=1, memory_bytes=4 << 20, accustom_s=0.0, kernels="off", dtype="float32"
    )
    expected = reference_logits(theirs.float(), PROMPT).log_softmax(-1)
    for place, found in enumerate(llm.generate([PROMPT], ANSWERED)[0].prompt_logprobs):
        assert found.logprob == pytest.approx(expected[place, PROMPT[place + 1]].item(), abs=2e-4)


def test_an_output_layer_of_its_own_is_kept(tmp_path):
    model = tiny_gguf.make("llama", tie_word_embeddings=False)
    file = tiny_gguf.write(tmp_path / "tiny.gguf", model)
    ours = AutoModelForCausalLM.from_pretrained(checkpoint_of(file, tmp_path / "c"))
    assert same_weights(ours, model)


def test_tokenizer_template_and_ends_come_with_it(tmp_path):
    """The file's end is that of a text; the template ends turns with another token."""
    file = tiny_gguf.write(tmp_path / "tiny.gguf", tiny_gguf.make("qwen2"))
    folder = checkpoint_of(file, tmp_path / "c")
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    ours = Tokenizer.load(folder)
    text = "hello, he said: 17 \u00e9\u4e2d\n\n<|im_end|>"
    assert list(ours.encode(text)) == theirs.encode(text)
    assert ours.decode(ours.encode("hello \u4e2d")) == "hello \u4e2d"
    chat = ours.render_chat([{"role": "user", "content": "hi"}])
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    llm = LLM(str(folder), threads=1, memory_bytes=4 << 20, accustom_s=0.0, kernels="off")
    assert set(llm.info.eos_token_ids) == {tiny_gguf.END_OF_TEXT, tiny_gguf.END_OF_TURN}
    assert "somebody" not in (folder / "config.json").read_text()


def llama3_factors(model):
    """What llama.cpp stores for Llama 3's rotary scaling: by how much each frequency is slower."""
    head = model.config.head_dim
    base = model.config.rope_parameters["rope_theta"] ** -(np.arange(0, head, 2) / head)
    return (base / ROPE_INIT_FUNCTIONS["llama3"](model.config, "cpu")[0].numpy()).astype(np.float32)


def test_the_rotary_scaling_of_llama_3_is_taken_over(tmp_path):
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    model = tiny_gguf.make("llama", rope_parameters=scaling, max_position_embeddings=131072)
    factors = llama3_factors(model)
    assert [factors.min(), factors.max()] == pytest.approx([1.0, 32.0])
    file = tiny_gguf.write(tmp_path / "tiny.gguf", model, tensors={"rope_freqs.weight": factors})
    ours = AutoModelForCausalLM.from_pretrained(checkpoint_of(file, tmp_path / "c"))
    assert torch.allclose(reference_logits(ours, PROMPT), reference_logits(model, PROMPT))
    others = tiny_gguf.write(
        tmp_path / "other.gguf", model, tensors={"rope_freqs.weight": factors**0.5}
    )
    with pytest.raises(UnsupportedModel, match="rotary factors"):
        read_contents(others)


def same_logits(file, model, folder):
    ours = AutoModelForCausalLM.from_pretrained(checkpoint_of(file, folder))
    assert torch.allclose(reference_logits(ours, PROMPT), reference_logits(model, PROMPT))
    return ours.config


def test_the_largest_gemma_scales_its_attention_in_its_own_way(tmp_path, monkeypatch):
    """Which the file does not say."""
    monkeypatch.setattr(gguf_file, "_LARGE_GEMMA", {"gemma2": 2})
    model = tiny_gguf.make("gemma2", query_pre_attn_scalar=64)
    file = tiny_gguf.write(tmp_path / "tiny.gguf", model)
    assert same_logits(file, model, tmp_path / "c").query_pre_attn_scalar == 64


def test_a_file_without_a_window_has_none_whatever_its_name_is(tmp_path):
    model = tiny_gguf.make("llama")
    file = tiny_gguf.write(tmp_path / "tiny.gguf", model, name="mistral")
    config = same_logits(file, model, tmp_path / "c")
    assert not config.to_dict().get("sliding_window")


def test_a_window_of_0_is_none(tmp_path):
    model = tiny_gguf.make("phi3", sliding_window=None)
    fields = {"phi3.attention.sliding_window": 0}
    file = tiny_gguf.write(tmp_path / "tiny.gguf", model, fields=fields)
    assert same_logits(file, model, tmp_path / "c").sliding_window is None


@pytest.mark.parametrize(
    ("fields", "begins"),
    [
        ({}, False),
        ({"tokenizer.ggml.pre": "llama-bpe"}, True),
        ({"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": False}, False),
        ({"tokenizer.ggml.add_bos_token": True}, True),
    ],
    ids=str,
)
def test_texts_begin_as_llama_cpp_begins_them(tmp_path, fields, begins):
    beginning = {"tokenizer.ggml.bos_token_id": tiny_gguf.END_OF_TEXT}
    file = tiny_gguf.write(tmp_path / "t.gguf", tiny_gguf.make(), fields=beginning | fields)
    found = Tokenizer.load(checkpoint_of(file, tmp_path / "c")).encode("hello")
    assert (found[0] == tiny_gguf.END_OF_TEXT) is begins
    assert len(found) > begins


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"general.type": "mmproj"}, "no language model"),
        ({"split.count": 3}, "part of a model"),
        ({"llama.rope.scaling.type": "yarn"}, "yarn rotary scaling"),
        ({"llama.attention.key_length": 128}, "would not be the same model"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_would_not_be_the_same_model_is_refused(tmp_path, fields, message):
    file = tiny_gguf.write(tmp_path / "tiny.gguf", tiny_gguf.make(), fields=fields)
    with pytest.raises(UnsupportedModel, match=message):
        read_contents(file)


def test_a_tensor_that_has_no_place_in_the_model_is_refused(tmp_path):
    bias = {"blk.0.attn_q.bias": np.zeros(256, np.float32)}
    file = tiny_gguf.write(tmp_path / "tiny.gguf", tiny_gguf.make(), tensors=bias)
    with pytest.raises(UnsupportedModel, match="would not be the same model"):
        read_contents(file)


def test_a_type_that_cannot_be_unpacked_is_refused_by_name(tmp_path):
    whole = {"blk.0.extra.weight": np.zeros(256, np.int32)}
    file = tiny_gguf.write(tmp_path / "tiny.gguf", tiny_gguf.make(), tensors=whole)
    with pytest.raises(UnsupportedModel, match="type I32"):
        read_contents(file)


@pytest.mark.parametrize("architecture", ["rwkv6", "bert", "lfm2"])
def test_an_architecture_that_is_not_served_is_refused_by_name(tmp_path, architecture):
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", architecture)
    writer.add_token_list(tiny_gguf.TOKENS)
    writer.add_tensor("token_embd.weight", np.zeros((4, 256), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel, match=architecture):
        read_contents(tmp_path / "other.gguf")


@pytest.mark.parametrize("share", [0.0005, 0.01, 0.3, 0.9, 0.9999])
def test_a_file_that_was_cut_is_refused_in_one_line(tmp_path, share):
    file = tiny_gguf.write(tmp_path / "tiny.gguf", tiny_gguf.make(), Type.Q8_0)
    content = file.read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(content[: int(share * len(content))])
    with pytest.raises(UnsupportedModel, match="damaged or not complete") as refused:
        locate(str(cut))
    assert "\n" not in str(refused.value)
    assert not [path for path in (tmp_path / "cache").iterdir() if path.name != ".lock"]


def test_files_beside_it_change_nothing(tmp_path, monkeypatch):
    """Nor does a file of its name where the process runs: transformers would look there first."""
    model = tiny_gguf.make("qwen2")
    alone, beside, here = (tmp_path / name for name in ("alone", "beside", "here"))
    for folder in (alone, beside, here):
        folder.mkdir()
    file = tiny_gguf.write(alone / "tiny.gguf", model)
    expected = checkpoint_of(file, tmp_path / "expected")
    tiny_gguf.write(here / file.name, tiny_gguf.make("qwen2"))
    shutil.copy(DEMO_MODEL / "tokenizer.json", beside)
    (beside / "tokenizer_config.json").write_text('{"eos_token": "<|strange|>"}')
    (beside / "adapter_config.json").write_text('{"base_model_name_or_path": "elsewhere"}')
    (beside / "config.json").write_text('{"model_type": "llama"}')
    moved = file.rename(beside / file.name)
    monkeypatch.chdir(here)
    found = checkpoint_of(Path("../beside") / moved.name, tmp_path / "found")
    assert {path.name for path in found.iterdir()} == {path.name for path in expected.iterdir()}
    for path in expected.iterdir():
        assert (found / path.name).read_bytes() == path.read_bytes(), path.name
