"""Finds out what a model's attention layers do, by one forward pass of two tokens.

Each layer must call the attention interface once, with equal key and value heads. The window that
it names must be exactly the mask that the model would have applied. transformers passes that mask
as a function of positions, so it can be evaluated far beyond the length of any affordable text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from tandem.core.errors import UnsupportedModel
from tandem.model.attention.base import AttentionParams, LayerShape
from tandem.model.attention.interface import tandem_attention

_IMPLEMENTATION = "tandem_probe"
# A query position beyond the windows and chunks of present models.
_FAR = 1 << 22

MaskFunction = Callable[[int, int, Tensor, Tensor], Tensor]


def probe_layers(name: str, model: PreTrainedModel) -> tuple[LayerShape, ...]:
    """KV shape of every layer. Leaves the model with the probe's attention implementation.

    Raises `UnsupportedModel` for anything that the kernels would not compute exactly.
    """
    probe = _Probe()
    AttentionInterface.register(_IMPLEMENTATION, probe.attention)
    AttentionMaskInterface.register(_IMPLEMENTATION, probe.mask)
    model.set_attn_implementation(_IMPLEMENTATION)
    tokens = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
    positions = torch.arange(2, device=model.device)[None]
    try:
        with torch.no_grad():
            model.base_model(
                input_ids=tokens, position_ids=positions, use_cache=False, attention_context=probe
            )
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{name}: {error}") from error
    except (TypeError, ValueError, AttributeError, RuntimeError, KeyError) as error:
        raise UnsupportedModel(
            f"{name} cannot run on flattened tokens through transformers' attention interface: "
            f"{error}"
        ) from error
    count = model.config.num_hidden_layers
    if sorted(probe.shapes) != list(range(count)):
        raise UnsupportedModel(
            f"{name}: {len(probe.shapes)} of {count} layers attend through transformers' "
            "attention interface"
        )
    return tuple(probe.shapes[layer] for layer in range(count))


class _Probe:
    """Mask function, attention function and `AttentionContext` of the probing pass."""

    def __init__(self) -> None:
        self.shapes: dict[int, LayerShape] = {}
        # Tensors are kept as well, so that no identity is reused.
        self._masks: dict[int, tuple[Tensor, MaskFunction]] = {}
        self._mask: MaskFunction | None = None

    def mask(self, *, mask_function: MaskFunction, **_: Any) -> Tensor:
        """Called when the model builds a mask. The result stands for `mask_function`."""
        token = torch.zeros(1, 1, 2, 2)
        self._masks[id(token)] = (token, mask_function)
        return token

    def attention(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **arguments: Any,
    ) -> tuple[Tensor, None]:
        """The served attention function. First notes which mask came with the call."""
        known = self._masks.get(id(attention_mask))
        if known is None:
            raise UnsupportedModel(
                f"{type(module).__name__} does not take its mask from transformers' mask interface"
            )
        self._mask = known[1]
        return tandem_attention(module, query, key, value, None, **arguments)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams
    ) -> Tensor:
        """Check the layer's call. The result only has the right shape; it is no attention."""
        rows, heads, dim = query.shape
        if layer in self.shapes:
            raise UnsupportedModel(f"layer {layer} attends more than once")
        if key.shape != value.shape or key.shape[0] != rows or key.shape[2] != dim:
            raise UnsupportedModel(
                f"layer {layer} has keys {tuple(key.shape)} and values {tuple(value.shape)} for "
                f"queries {tuple(query.shape)}; only equal head sizes are served"
            )
        assert self._mask is not None
        _check_mask(self._mask, layer, params.window)
        self.shapes[layer] = LayerShape(key.shape[1], dim)
        return value.repeat_interleave(heads // key.shape[1], dim=1)


def _check_mask(mask: MaskFunction, layer: int, window: int) -> None:
    """Check that the model's mask is causal within `window` (0: unlimited) at every distance."""
    distances = [-1, 0, 1, 2, 100, 1000, 4095, 4096, 8191, 8192, _FAR]
    distances += [window - 1, window, window + 1] if window else []
    pairs = [
        (query, query - distance)
        for query in (1, 7, 1023, 4096, 8193, _FAR - 1, _FAR)
        for distance in distances
        if query >= distance
    ]
    queries, keys = torch.tensor(pairs).unbind(dim=1)
    visible = mask(0, 0, queries, keys).expand(queries.shape)
    expected = keys <= queries
    if window:
        expected &= keys > queries - window
    if not torch.equal(visible.cpu(), expected):
        raise UnsupportedModel(
            f"layer {layer} has a mask that is neither causal nor a sliding window of the "
            f"{window or 'unlimited'} tokens that its attention names"
        )
