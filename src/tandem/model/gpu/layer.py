"""A decoder layer of the Llama kind on a CUDA device, in about ten launches.

Queries, keys and values are one product, and so are gate and up projection; adapters are applied to
the joint products. Values are those of the layer's parts, but for the rounding of adapters' last
update. Invariant: nothing here waits for the device or depends on what it computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from tandem.model.attention.base import AttentionParams, PagedContext
from tandem.model.attention.triton_kernel import TritonBatch
from tandem.model.fused import FusedRmsNorm
from tandem.model.fused_layer import LayerParts, Projections, frozen
from tandem.model.gpu.heads import HeadNorms, turn_and_store
from tandem.model.gpu.products import ThinWeight
from tandem.model.gpu.rows import TritonRows
from tandem.model.linear import GroupMember, PackedLinear
from tandem.model.lora import JointUpdate, LoraLinear


@dataclass(frozen=True, slots=True)
class _Product:
    """A frozen product [rows, in] -> [rows, out], and its adapters' updates."""

    layer: PackedLinear
    update: JointUpdate | None

    def of(self, x: Tensor) -> Tensor:
        """The product with all updates."""
        weights = self.layer.weights
        out = weights.multiply(x)
        if self.update is not None:
            settled = isinstance(weights, ThinWeight) and weights.settles(x.shape[0])
            self.update.update(x, out, settled=settled)
        return out

    def onto(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + the product with all updates, in new memory."""
        weights, settled = self.layer.weights, False
        if isinstance(weights, ThinWeight):
            out = weights.multiply_onto(residual, x)
            settled = weights.settles(x.shape[0])
        else:
            out = weights.multiply(x).add_(residual)
        if self.update is not None:
            self.update.update(x, out, settled=settled)
        return out


@dataclass(frozen=True, slots=True)
class _Plan:
    """The products of a layer, valid while its projections are these very modules."""

    projections: Projections
    qkv: _Product
    out: _Product
    gate_up: _Product
    down: _Product


class TritonLayer:
    """A `WholeLayer` over the context of `TritonKernel`."""

    exports_rows = True

    def __init__(self, parts: LayerParts) -> None:
        self._parts = parts
        self._rows = TritonRows()
        self._known: Projections = ()
        self._plan: _Plan | None = None
        attention = parts.attention
        self._params = AttentionParams(attention.scaling, attention.window, attention.softcap)
        self._norms = _head_norms(attention.q_norm, attention.k_norm)
        self._turns = self._norms is not None or attention.q_norm is attention.k_norm is None
        self._gate = self._rows.gelu_tanh_mul if parts.mlp.gelu else self._rows.silu_mul

    def adapt(self, group: Callable[[Sequence[LoraLinear]], JointUpdate]) -> None:
        """See `WholeLayer`."""
        self._known = self._parts.projections()
        self._plan = _plan(self._known, group)

    def run(
        self, hidden: Tensor, angles: tuple[Tensor, Tensor], context: PagedContext
    ) -> Tensor | None:
        """See `WholeLayer`."""
        batch, parts = context.batch, self._parts
        plan = self._current()
        if plan is None or not self._turns or not isinstance(batch, TritonBatch):
            return None
        index, dim = parts.attention.layer_idx, parts.attention.head_dim
        cache = context.layers[index]
        kv_heads = cache.keys.shape[2]
        x, cos, sin = hidden[0], angles[0][0], angles[1][0]
        norm, mlp_norm = parts.norm, parts.mlp_norm
        normal = self._rows.rms_norm(x, norm.weight, norm.eps, norm.shifted)
        qkv = plan.qkv.of(normal)
        heads = qkv.shape[1] // dim - 2 * kv_heads
        query = turn_and_store(qkv, cos, sin, batch.slots, cache, heads, kv_heads, self._norms)
        mixed = batch.attend_stored(query, cache, self._params)
        x, normal = self._rows.add_rms_norm(
            x, plan.out.of(mixed.flatten(1)), mlp_norm.weight, mlp_norm.eps, mlp_norm.shifted
        )
        gate_up = plan.gate_up.of(normal)
        if context.inner_rows is not None:
            context.inner_rows(index, x, gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return plan.down.onto(x, self._gate(gate, up))[None]

    def _current(self) -> _Plan | None:
        projections = self._parts.projections()
        # Modules compare by identity.
        if projections != self._known:
            self._known = projections
            self._plan = _plan(projections, None)
        return self._plan


def _plan(
    projections: Projections, group: Callable[[Sequence[LoraLinear]], JointUpdate] | None
) -> _Plan | None:
    """None if a projection is not the frozen, packed one, or has adapters without `group`."""
    products = []
    for part in (projections[:3], projections[3:4], projections[4:6], projections[6:]):
        product = _product(part, group)
        if product is None:
            return None
        products.append(product)
    return _Plan(projections, *products)


def _product(
    part: Projections, group: Callable[[Sequence[LoraLinear]], JointUpdate] | None
) -> _Product | None:
    wrapped = [each for each in part if isinstance(each, LoraLinear)]
    if wrapped and (group is None or len(wrapped) < len(part)):
        return None
    members = [frozen(each) for each in part]
    layer = members[0]
    if isinstance(layer, GroupMember) and members == list(layer.group.members):
        layer = layer.group.joined
    elif len(members) > 1:
        return None
    if not isinstance(layer, PackedLinear):
        return None
    return _Product(layer, group(wrapped) if wrapped and group is not None else None)


def _head_norms(query: nn.Module | None, key: nn.Module | None) -> HeadNorms | None:
    """Norms of single heads. None without, or if the two differ in more than their weights."""
    if not isinstance(query, FusedRmsNorm) or not isinstance(key, FusedRmsNorm):
        return None
    if (query.eps, query.shifted) != (key.eps, key.shifted):
        return None
    return HeadNorms(query.weight.detach(), key.weight.detach(), query.eps, query.shifted)
