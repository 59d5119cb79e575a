"""Where tests compute: on the CPU always, on a CUDA device where `pytest -m gpu` asks for it.

Without a CUDA device, Triton's kernels run in its interpreter, on CPU tensors. That is decided
here, before Triton is imported (`conftest` imports this first).
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
DEVICES = ["cpu", CUDA]

HAS_TRITON = importlib.util.find_spec("triton") is not None
if HAS_TRITON and not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"
TRITON = "triton" if INTERPRETED else pytest.param("triton", marks=pytest.mark.gpu)
# Where kernels written in Triton are tested.
TRITON_DEVICE = "cpu" if INTERPRETED else pytest.param("cuda", marks=pytest.mark.gpu)


def _count_with_any_numpy() -> None:
    """Triton 3.6's interpreter turns a bound of a loop, an array of one element, into a number by
    `int`. NumPy refuses that since 2.4."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched


if INTERPRETED:
    _count_with_any_numpy()
