"""Compiles the variants of grouped LoRA that an 8B model and a small one launch on an H100."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

import torch

from hopper import compiled
from tandem.model.gpu.adapters import TableUpdates
from tandem.model.gpu.lora import Joint, add_updates
from tandem.model.gpu.thin import Cut, Stripe, Workspace, multiply
from tandem.model.lora import Tiles

# inputs of joint projections, and outputs of their members
PROJECTIONS = (
    (4096, (4096, 1024, 1024)),
    (4096, (14336, 14336)),
    (14336, (4096,)),
    (896, (896, 128, 128)),
)


def launches(
    dtype: torch.dtype, rank: int, height: int, tiles: int, *, settled: bool = True
) -> None:
    """What the table's updates launch for tiles of one pass."""
    table = TableUpdates(torch.device("cpu"), dtype).table()
    entries = torch.zeros(8, 1, 3, 4, dtype=torch.int64)
    table = replace(table, entries=entries, rank=rank, overlap=True)
    places = Tiles(height, torch.zeros(tiles, 4, dtype=torch.int32))
    for inputs, widths in PROJECTIONS:
        x, out = torch.zeros(32, inputs, dtype=dtype), torch.zeros(32, sum(widths), dtype=dtype)
        add_updates(x, out, places, table, Joint(0, widths), settled=settled)


def all_launches() -> None:
    """Both heights, small and large ranks; float32 at one rank."""
    for height, tiles in ((16, 1), (16, 32), (64, 24)):
        for rank in (16, 64):
            launches(torch.bfloat16, rank, height, tiles)
        launches(torch.float32, 16, height, tiles)


def order(ptx: str) -> list[str]:
    """The stores of a kernel, and what it says to the kernels around it."""
    found = re.findall(r"griddepcontrol.wait|griddepcontrol.launch_dependents|st.global", ptx)
    return [each.removeprefix("griddepcontrol.") for each in found]


# A shrink beside our product reads `x`, which is complete once the product lets it begin, and ends
# after the product.
x, weight = torch.zeros(32, 896, dtype=torch.bfloat16), torch.zeros(64, 896, dtype=torch.bfloat16)
cut = Cut(Stripe(64, 128, 3, 4))
workspace = Workspace(x.device)
(product,) = compiled(lambda: multiply(x, weight, None, None, cut, workspace))
assert order(product.ptx)[:2] == ["wait", "launch_dependents"]
for settled in (False, True):
    run = partial(launches, torch.bfloat16, 16, 16, 32, settled=settled)
    for variant in compiled(run):
        if variant.name == "_shrink":
            waits = order(variant.ptx).index("wait")
            assert (waits > order(variant.ptx).index("st.global")) is settled
for variant in compiled(all_launches):
    sizes = (variant.name, variant.shared, variant.registers, variant.spilled)
    print(*sizes)
    assert variant.shared <= 227 << 10, sizes
    # A few bytes with ranks over 16, where the compiler aims at a round number of registers.
    assert variant.spilled <= 32, sizes
    assert "griddepcontrol.wait" in variant.ptx, sizes
