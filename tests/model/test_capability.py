"""What is refused at load, by name, and what is served within limits."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma3nTextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    NemotronConfig,
    NemotronForCausalLM,
    T5Config,
)

import tiny_models
from tandem.config import ModelConfig
from tandem.core.errors import InvalidRequest, NotFound, UnsupportedModel
from tandem.model import self_test
from tandem.model.attention.base import LayerShape
from tandem.model.attention.sdpa import SdpaKernel
from tandem.model.capability import exact_model_length
from tandem.model.load import load_model, prepare_model

OFF = ModelConfig(model="tiny", kernels="off")


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (T5Config(), "encoder-decoder|no causal language model"),
        (MambaConfig(), "recurrent state"),
        (Gemma3nTextConfig(), "shares KV between layers"),
        (Llama4TextConfig(), "chunked_attention"),
    ],
)
def test_configurations_are_refused_before_weights_are_read(tmp_path, config, reason):
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=reason):
        load_model(ModelConfig(model=str(tmp_path)))


def test_attention_outside_of_the_interface_is_refused():
    alibi = BloomForCausalLM(BloomConfig(vocab_size=99, hidden_size=32, n_layer=1, n_head=2))
    with pytest.raises(UnsupportedModel, match="0 of 1 layers attend"):
        prepare_model(alibi, ModelConfig(model="bloom", max_model_len=64))


def test_attention_without_keyword_arguments_is_refused():
    config = NemotronConfig(**tiny_models._COMMON)
    with pytest.raises(UnsupportedModel, match="does not pass keyword arguments"):
        prepare_model(NemotronForCausalLM(config), OFF)


def test_attention_sinks_are_refused():
    config = GptOssConfig(
        **tiny_models._COMMON,
        head_dim=16,
        num_local_experts=4,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    with pytest.raises(UnsupportedModel, match="s_aux"):
        prepare_model(GptOssForCausalLM(config), OFF)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
        {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0] * 8,
            "long_factor": [4.0] * 8,
            "original_max_position_embeddings": 48,
            "factor": 2.0,
        },
    ],
    ids=["dynamic", "longrope"],
)
def test_rotary_embeddings_that_depend_on_the_batch(rope):
    """Served only up to the length where neighbours begin to matter."""
    exact = 128 if rope["rope_type"] == "dynamic" else 48
    model = tiny_models.make_model("llama", rope_parameters=rope)
    if exact < tiny_models.MAX_LENGTH:
        with pytest.raises(UnsupportedModel, match=f"longrope.*max_model_len to {exact}"):
            prepare_model(model, OFF)
    loaded = prepare_model(model, ModelConfig(model="tiny", max_model_len=exact, kernels="off"))
    assert loaded.max_model_len == exact
    # What is refused beyond that length does change: the same row, alone and beside a long text.
    rotary = loaded.backbone.rotary_emb
    hidden = torch.zeros(1, 1, 1)
    own = torch.arange(4)[None]
    alone = rotary(hidden, own)[0]
    within = rotary(hidden, torch.cat([own, torch.full((1, 1), exact - 1)], dim=1))[0][:, :4]
    beside = rotary(hidden, torch.cat([own, torch.full((1, 1), exact)], dim=1))[0][:, :4]
    assert torch.equal(alone, within)
    assert not torch.equal(alone, beside)


def test_model_length_is_bounded_by_the_model():
    assert exact_model_length("m", {"max_position_embeddings": 100}, 0) == 100
    assert exact_model_length("m", {"max_position_embeddings": 100}, 40) == 40
    with pytest.raises(InvalidRequest, match="at most 100"):
        exact_model_length("m", {"max_position_embeddings": 100}, 101)
    with pytest.raises(InvalidRequest, match=r"set model\.max_model_len"):
        exact_model_length("m", {}, 0)


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("device", "tpu", InvalidRequest),
        ("dtype", "int8", InvalidRequest),
        ("model", "/there/is/no/model", NotFound),
    ],
)
def test_settings_are_checked(field, value, error):
    with pytest.raises(error, match=value):
        load_model(ModelConfig(**{"model": "x", field: value}))


def test_a_mask_other_than_the_window_is_refused(monkeypatch):
    """A model whose mask slides while its attention names no window."""
    model = tiny_models.make_model("mistral")
    for layer in model.model.layers:
        forward = layer.self_attn.forward
        layer.self_attn.config = LlamaConfig(**tiny_models._COMMON, attn_implementation="eager")
        assert forward is not None

    def keep_in_step(name):
        type(model).set_attn_implementation(model, name)
        for layer in model.model.layers:
            layer.self_attn.config._attn_implementation = name

    monkeypatch.setattr(model, "set_attn_implementation", keep_in_step)
    with pytest.raises(UnsupportedModel, match="neither causal nor a sliding window"):
        prepare_model(model, OFF)


def test_the_self_test_notices_a_wrong_kernel():
    model = tiny_models.make_model("llama")
    test = self_test.SelfTest("tiny", model, tiny_models.VOCAB, 128)
    loaded = prepare_model(model, OFF)
    test.check(loaded.backbone, loaded.head, loaded.layers, SdpaKernel())

    class Forgetful(SdpaKernel):
        def prepare(self, layout):
            layout.starts[:] = 0
            return super().prepare(layout)

    with pytest.raises(UnsupportedModel, match="logits differ from its own forward"):
        test.check(loaded.backbone, loaded.head, loaded.layers, Forgetful())


def test_a_head_that_scales_otherwise_is_refused(monkeypatch):
    model = tiny_models.make_model("granite")
    monkeypatch.setattr(type(model), "forward", LlamaForCausalLM.forward)
    with pytest.raises(UnsupportedModel, match="logits differ"):
        prepare_model(model, OFF)


def test_shapes_and_counts_are_those_of_the_model():
    model = tiny_models.make_model("qwen3")
    count = sum(weight.numel() for weight in model.parameters())
    loaded = prepare_model(model, OFF)
    assert loaded.layers == (LayerShape(kv_heads=2, head_dim=24),) * 3
    assert (loaded.num_parameters, loaded.weight_bytes) == (count, 4 * count)
    assert loaded.layer_parameters == count - 2 * tiny_models.VOCAB * loaded.width


def test_a_tied_embedding_is_left_out_of_the_layers_once():
    model = tiny_models.make_model("llama", tie_word_embeddings=True)
    count = sum(weight.numel() for weight in model.parameters())
    loaded = prepare_model(model, OFF)
    assert loaded.layer_parameters == count - tiny_models.VOCAB * loaded.width


def test_one_decoder_layer_runs_alone():
    """Training will call layers one at a time with explicit arguments."""

    class Plain:
        def attend(self, layer, query, key, value, params):
            heads = query.shape[1] // key.shape[1]
            keys, values = (x.repeat_interleave(heads, 1).transpose(0, 1) for x in (key, value))
            return torch.nn.functional.scaled_dot_product_attention(
                query.transpose(0, 1), keys, values, is_causal=True, scale=params.scale
            ).transpose(0, 1)

    loaded = prepare_model(tiny_models.make_model("llama"), OFF)
    hidden = torch.randn(1, 6, 64, requires_grad=True)
    positions = torch.arange(6)[None]
    out = loaded.backbone.layers[1](
        hidden,
        position_embeddings=loaded.backbone.rotary_emb(hidden, positions),
        position_ids=positions,
        attention_context=Plain(),
    )
    out.sum().backward()
    assert out.shape == hidden.shape and hidden.grad.abs().sum() > 0
