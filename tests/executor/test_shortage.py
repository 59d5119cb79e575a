"""An executor that cannot allocate says so, and computes again when it can."""

from __future__ import annotations

import pytest
import torch
from test_executor import GREEDY, make_executor, run

import tiny_models
from tandem.core.errors import OutOfMemory
from tandem.core.plan import NO_MEMORY, BlockCopy, Draw, Span
from tandem.executor import executor as module
from tandem.executor.shortage import lacks_memory


@pytest.mark.parametrize(
    ("error", "short"),
    [
        (RuntimeError("could not create a primitive"), True),
        (MemoryError(), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate"), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (RuntimeError("std::bad_alloc"), True),
        (RuntimeError("could not create a primitive descriptor for a matmul"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
    ],
)
def test_a_shortage_is_told_from_other_errors(error: Exception, short: bool) -> None:
    assert lacks_memory(error) is short


def span(seq_id: int) -> Span:
    draw = Draw(seq_id, 0, 0, GREEDY)
    return Span(seq_id, 0, (3, 4, 5), ((seq_id,),), draws=(draw,))


def test_a_shortage_is_charged_as_one_and_heals(monkeypatch: pytest.MonkeyPatch) -> None:
    executor, whole = make_executor(tiny_models.make_model("llama")), module.run_batch
    short = [True]

    def run_batch(*given):
        if short[0]:
            raise RuntimeError("could not create a primitive")
        return whole(*given)

    monkeypatch.setattr(module, "run_batch", run_batch)
    result = run(executor, span(1), span(2))
    assert dict(result.failed) == {1: NO_MEMORY, 2: NO_MEMORY}
    short[0] = False
    result = run(executor, span(1), span(2))
    assert result.failed == () and len(result.draws) == 2


def test_a_shortage_that_concerns_the_whole_plan_is_raised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    executor = make_executor(tiny_models.make_model("llama"))

    def copy(*given: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(executor._storage, "copy", copy)
    with pytest.raises(OutOfMemory):
        run(executor, span(1), copies=[BlockCopy(0, 1, 2)])
