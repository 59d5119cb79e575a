"""The decoder layers of a model one at a time, over recorded rows.

Each layer is tapped where the backbone calls it. Its arguments (rotary angles, masks, whatever the
architecture passes) are therefore the backbone's own, for any architecture. Knows no trainer and no
gradient. Invariant: without a mode, a tap only calls the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tandem.core.errors import UnsupportedModel
from tandem.model.attention.base import AttentionContext
from tandem.model.attention.dense import DenseContext

# Takes the rows [rows, width] that enter layer i. i = number of layers: output of the last one.
RowSink = Callable[[int, Tensor], None]
# Computes layer i for rows [rows, width], in consecutive parts. None if it does not.
LayerStandIn = Callable[[int, Tensor], list[Tensor] | None]
_HIDDEN = "hidden_states"
_PROBE_LENGTHS = (2, 3)
_TOLERANCE = 1e-3


class _Mode(Protocol):
    """What the taps do during one pass."""

    def call(self, tap: _Tap, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replaces the layer's forward."""
        ...


@dataclass(slots=True)
class _Shared:
    mode: _Mode | None = None
    before_layer: Callable[[], None] | None = None


class _Tap:
    """Replaces the `forward` of one layer, whose name, type and attributes stay."""

    def __init__(self, index: int, layer: Any, shared: _Shared) -> None:
        self.index = index
        self.module = layer
        self.inner: Callable[..., Any] = layer.forward
        self.returns_tuple = False
        self._shared = shared
        layer.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's own forward, unless a mode is set."""
        mode, before_layer = self._shared.mode, self._shared.before_layer
        if before_layer is not None:
            before_layer()
        if mode is None:
            return self.inner(*args, **kwargs)
        return mode.call(self, args, kwargs)

    def wrap(self, hidden: Tensor) -> Any:
        """`hidden` in the form that the layer returns."""
        return (hidden,) if self.returns_tuple else hidden


class _Record:
    """Runs every layer and passes its input, and the last one's output, to a sink.

    The input of layer 0 is left out, since `LayerStack.replay` makes it from the tokens.
    """

    def __init__(self, sink: RowSink, count: int, stand_in: LayerStandIn | None = None) -> None:
        self._sink = sink
        self._stand_in = stand_in
        self._last = count - 1

    def call(self, tap: _Tap, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the layer, or its stand-in, and record its rows."""
        hidden = _hidden(args, kwargs)
        if tap.index:
            self._sink(tap.index, hidden[0])
        parts = self._stand_in(tap.index, hidden[0]) if self._stand_in is not None else None
        if parts is not None:
            output = tap.wrap((parts[0] if len(parts) == 1 else torch.cat(parts))[None])
        else:
            output = tap.inner(*args, **kwargs)
            tap.returns_tuple = isinstance(output, tuple)
        if tap.index == self._last:
            self._sink(tap.index + 1, (output[0] if tap.returns_tuple else output)[0])
        return output


class _Capture:
    """Runs no layer, but keeps the arguments of each call."""

    def __init__(self) -> None:
        self.embedded: Tensor | None = None
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def call(self, tap: _Tap, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Keep the arguments and return the input."""
        hidden = _hidden(args, kwargs)
        if tap.index == 0:
            self.embedded = hidden[0]
        rest = {name: value for name, value in kwargs.items() if name != _HIDDEN}
        self.calls.append((args[1:], rest))
        return tap.wrap(hidden)


class _Finish:
    """Runs no layer. The last one returns the given hidden states."""

    def __init__(self, hidden: Tensor, count: int) -> None:
        self._hidden = hidden
        self._last = count - 1

    def call(self, tap: _Tap, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the input, or the given states for the last layer."""
        return tap.wrap(self._hidden if tap.index == self._last else _hidden(args, kwargs))


class Replay:
    """The layers over some rows only. Differentiable if autograd is on.

    `embedded` [rows, width] is the input of layer 0.
    """

    def __init__(self, stack: LayerStack, inputs: dict[str, Any], captured: _Capture) -> None:
        self._stack = stack
        self._inputs = inputs
        self._calls = captured.calls
        assert captured.embedded is not None
        self.embedded = captured.embedded

    def layer(self, index: int, hidden: Tensor) -> Tensor:
        """[rows, width] through layer `index`."""
        args, kwargs = self._calls[index]
        output = self._stack.taps[index].inner(hidden[None], *args, **kwargs)
        result: Tensor = output[0] if isinstance(output, tuple) else output
        return result[0]

    def called(self, index: int) -> tuple[nn.Module, dict[str, Any]] | None:
        """Layer `index` and its keyword arguments; None if it has positional ones too."""
        args, kwargs = self._calls[index]
        return None if args else (self._stack.taps[index].module, kwargs)

    def finish(self, hidden: Tensor) -> Tensor:
        """[rows, width] through the final norm, which follows the layers."""
        mode = _Finish(hidden[None], len(self._stack.taps))
        return self._stack.run(mode, self._inputs)


class LayerStack:
    """All decoder layers of `backbone`, which computes through the taps from now on."""

    def __init__(self, backbone: nn.Module, count: int) -> None:
        """`count` is the number of layers that attend. Raises `UnsupportedModel`."""
        path, layers = _find_layers(backbone, count)
        self._backbone = backbone
        self._shared = _Shared()
        self.prefixes = tuple(f"{path}.{index}." for index in range(count))
        self.taps = [_Tap(index, layer, self._shared) for index, layer in enumerate(layers)]
        self._check(next(backbone.parameters()).device)

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.taps)

    @contextmanager
    def recording(self, sink: RowSink, stand_in: LayerStandIn | None = None) -> Iterator[None]:
        """Pass the rows of the passes inside to `sink`. `stand_in` may compute layers."""
        self._shared.mode = _Record(sink, len(self.taps), stand_in)
        try:
            yield
        finally:
            self._shared.mode = None

    @contextmanager
    def watching(self, before_layer: Callable[[], None]) -> Iterator[None]:
        """Call `before_layer` before every layer of the passes inside; its exceptions end them."""
        self._shared.before_layer = before_layer
        try:
            yield
        finally:
            self._shared.before_layer = None

    def replay(self, tokens: Tensor, positions: Tensor, context: AttentionContext) -> Replay:
        """The layers over `tokens` at `positions`, int64 [rows], with attention by `context`."""
        inputs = {
            "input_ids": tokens[None],
            "position_ids": positions[None],
            "use_cache": False,
            "attention_context": context,
        }
        captured = _Capture()
        with torch.no_grad():
            self.run(captured, inputs)
        return Replay(self, inputs, captured)

    def run(self, mode: _Mode, inputs: dict[str, Any]) -> Tensor:
        """One pass of the backbone in `mode`; returns hidden states [rows, width]."""
        self._shared.mode = mode
        try:
            hidden: Tensor = self._backbone(**inputs).last_hidden_state[0]
        finally:
            self._shared.mode = None
        return hidden

    def _check(self, device: torch.device) -> None:
        """Check that the layers one by one equal the backbone. Also notes what they return."""
        positions = torch.cat([torch.arange(length) for length in _PROBE_LENGTHS]).to(device)
        context = DenseContext(_PROBE_LENGTHS)
        inputs = {
            "input_ids": positions[None],
            "position_ids": positions[None],
            "use_cache": False,
            "attention_context": context,
        }
        entered: dict[int, Tensor] = {}
        with torch.no_grad():
            mode = _Record(lambda layer, rows: entered.update({layer: rows}), len(self.taps))
            expected = self.run(mode, inputs)
            replay = self.replay(positions, positions, context)
            hidden = replay.embedded
            for index in range(len(self.taps)):
                hidden = replay.layer(index, hidden)
                _compare(hidden, entered[index + 1])
            _compare(replay.finish(hidden), expected)


def _find_layers(backbone: nn.Module, count: int) -> tuple[str, nn.ModuleList]:
    found = [
        (name, module)
        for name, module in backbone.named_children()
        if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    if len(found) != 1:
        raise UnsupportedModel(
            f"{type(backbone).__name__} has {len(found)} lists of {count} layers, not one"
        )
    return found[0]


def _hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """[1, rows, width]: the input that the backbone passes to a layer."""
    hidden: Tensor = args[0] if args else kwargs[_HIDDEN]
    return hidden


def _compare(found: Tensor, expected: Tensor) -> None:
    distance = (found.double() - expected.double()).norm()
    if not distance <= _TOLERANCE * expected.double().norm():
        raise UnsupportedModel("the layers one by one do not give what the model gives")
