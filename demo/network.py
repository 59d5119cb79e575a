"""The demo model's network: a Llama from transformers, and a leaner forward pass to train it.

The lean pass reads the same parameters, so saving needs no conversion. It takes whole batches of
one length, padded on the right (a causal mask hides the padding), and multiplies in bfloat16 where
the CPU computes in it, while parameters, residual stream and normalisation stay in float32.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from demo.tokenizer import CONTEXT_TOKENS, VOCABULARY_SIZE
from tandem.model.load import computes_in

NORM_EPSILON = 1e-6
PRODUCTS = torch.bfloat16 if computes_in(torch.bfloat16) else torch.float32


def build(pad_id: int, end_id: int) -> LlamaForCausalLM:
    """A fresh network of about 4.3 million parameters."""
    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=5,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=True,
        pad_token_id=pad_id,
        bos_token_id=None,
        eos_token_id=end_id,
        rms_norm_eps=NORM_EPSILON,
    )
    return LlamaForCausalLM(config)


def rotary(length_tokens: int, config: LlamaConfig) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary angles, each [length, head size / 2]."""
    half = config.hidden_size // config.num_attention_heads // 2
    theta = config.rope_parameters["rope_theta"]
    angles = torch.outer(torch.arange(length_tokens), theta ** -(torch.arange(half) / half))
    return angles.cos(), angles.sin()


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = heads.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x.to(PRODUCTS), weight.to(PRODUCTS))


def _layer(
    x: Tensor, weights: Sequence[Tensor], shape: tuple[int, int], cos: Tensor, sin: Tensor
) -> Tensor:
    """One layer; `shape` is heads and key-value heads, `weights` come in module order."""
    wq, wk, wv, wo, gate, up, down, first_norm, second_norm = weights
    (heads, kv_heads), (batch, length, size) = shape, x.shape
    shared, head_size = heads // kv_heads, size // heads
    mask = torch.full((length, length), float("-inf"), dtype=PRODUCTS).triu(1)
    mask = mask.repeat(shared, 1)[None]
    normed = F.rms_norm(x, (size,), first_norm, NORM_EPSILON).to(PRODUCTS)
    q = _linear(normed, wq).view(batch, length, heads, -1).transpose(1, 2)
    k = _linear(normed, wk).view(batch, length, kv_heads, -1).transpose(1, 2)
    v = _linear(normed, wv).view(batch, length, kv_heads, -1).transpose(1, 2)
    q = _rotate(q, cos, sin).reshape(batch * kv_heads, shared * length, head_size)
    k = _rotate(k, cos, sin).reshape(batch * kv_heads, length, head_size)
    v = v.reshape(batch * kv_heads, length, head_size)
    q = q.to(PRODUCTS) * head_size**-0.5
    scores = torch.baddbmm(mask, q, k.to(PRODUCTS).transpose(1, 2))
    mixed = torch.bmm(scores.softmax(-1), v).view(batch, heads, length, head_size)
    x = x + _linear(mixed.transpose(1, 2).reshape(batch, length, size), wo)
    normed = F.rms_norm(x, (size,), second_norm, NORM_EPSILON).to(PRODUCTS)
    return x + _linear(F.silu(_linear(normed, gate)) * _linear(normed, up), down)


class LeanPass:
    """The forward pass over a model's own parameters, compiled layer by layer where possible."""

    def __init__(self, model: LlamaForCausalLM, compiled: bool) -> None:
        self._embedding = model.model.embed_tokens.weight
        self._norm = model.model.norm.weight
        self._layers = [list(layer.parameters()) for layer in model.model.layers]
        self._config = model.config
        self._run = torch.compile(_layer, dynamic=False) if compiled else _layer

    def loss(self, tokens: Tensor, places: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy of `targets` at `places`, flat indices into tokens [batch, length]."""
        config = self._config
        cos, sin = rotary(tokens.shape[1], config)
        x = F.embedding(tokens, self._embedding)
        shape = (config.num_attention_heads, config.num_key_value_heads)
        for weights in self._layers:
            x = self._run(x, weights, shape, cos, sin)
        x = x.view(-1, config.hidden_size)[places]
        x = F.rms_norm(x, (config.hidden_size,), self._norm, NORM_EPSILON)
        return F.cross_entropy(_linear(x, self._embedding).float(), targets)
