"""Memory of a loaded model: its weights in every packing, and kernels compiled for them.

Knows modules, no device. Invariant: a tensor that several modules share counts once.
"""

from __future__ import annotations

from torch import nn

from tandem.model.linear import GroupMember, PackedLinear, kernel_bytes
from tandem.model.load import LoadedModel


def model_bytes(model: LoadedModel) -> dict[str, int]:
    """Bytes by purpose: `weights` (forward), `backward_weights` (transposed packings), `kernels`
    (oneDNN's cache)."""
    modules: set[nn.Module] = {*model.backbone.modules(), *model.head.linear.modules()}
    packed = {each for each in modules if isinstance(each, PackedLinear)}
    packed |= {each.group.joined for each in modules if isinstance(each, GroupMember)}
    plain = {parameter for each in modules for parameter in each.parameters(recurse=False)}
    forward = sum(each.weights.nbytes for each in packed)
    return {
        "weights": forward + sum(parameter.nbytes for parameter in plain),
        "backward_weights": sum(each.nbytes for each in packed) - forward,
        "kernels": kernel_bytes(packed),
    }
