"""The hook into transformers: an attention function named `tandem`.

Models written for transformers' attention interface call it once per layer, with rotated queries
and keys. It passes them to the `AttentionContext` of the forward pass. Invariant: it refuses every
argument that it would otherwise have to ignore.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from tandem.core.errors import UnsupportedModel
from tandem.model.attention.base import AttentionContext, AttentionParams

IMPLEMENTATION = "tandem"
# Keyword arguments that attention itself does not depend on.
_HARMLESS = frozenset({"position_ids", "use_cache", "cache_position", "output_attentions"})


def tandem_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer. Tensors are [1, heads, rows, d], the result is [1, rows, heads, d].

    Raises `UnsupportedModel` if the model passes an argument that no kernel here knows.
    """
    context: AttentionContext | None = arguments.pop("attention_context", None)
    scaling: float | None = arguments.pop("scaling", None)
    window: int | None = arguments.pop("sliding_window", None)
    softcap: float | None = arguments.pop("softcap", None)
    dropout: float = arguments.pop("dropout", 0.0)
    if context is None:
        raise UnsupportedModel(
            f"{type(module).__name__} does not pass keyword arguments on to its attention"
        )
    if attention_mask is not None:
        raise UnsupportedModel(f"{type(module).__name__} brings an attention mask of its own")
    unknown = [
        name
        for name, given in arguments.items()
        if name not in _HARMLESS and given is not None and not (name == "is_causal" and given)
    ]
    if unknown or dropout:
        named = ", ".join(sorted(unknown)) or "dropout"
        raise UnsupportedModel(f"{type(module).__name__} uses attention arguments: {named}")
    params = AttentionParams(
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=window or 0,
        softcap=softcap or 0.0,
    )
    rows, keys, values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    layer: Any = module.layer_idx
    return context.attend(layer, rows, keys, values, params).unsqueeze(0), None


def register() -> None:
    """Register the function with transformers. May be repeated."""
    AttentionInterface.register(IMPLEMENTATION, tandem_attention)
