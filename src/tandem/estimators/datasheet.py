"""Profiles of devices that are not at hand, computed from data sheets and a model's shape.

A roofline with efficiency factors: weights and KV are streamed at a share of the bandwidth, and
rows are multiplied at a share of the matrix rate. The results are orders of magnitude, for planning
and for comparing policies; nothing was measured. Peak numbers are the vendors'. The factors are our
assumptions, the same for all devices unless one says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tandem.core.errors import InvalidRequest
from tandem.core.events import ModelInfo
from tandem.estimators.latency import Rates
from tandem.estimators.profile import Ceilings, Profile, read_profile


@dataclass(frozen=True, slots=True)
class Device:
    """A data sheet, and assumed efficiencies of a well-made engine."""

    name: str
    flops: float  # dense 16-bit matrix FLOP/s
    bytes_per_s: float  # memory bandwidth
    memory_bytes: float
    source: str
    compute: float = 0.55  # assumed share of `flops`
    bandwidth: float = 0.8  # assumed share of `bytes_per_s`
    attention: float = 0.3  # assumed share of `flops` in attention
    launch_s: float = 1.5e-3  # assumed time of a pass without work
    rho: float = 0.2  # assumed share of the cheaper part of a mixed pass that adds to its time


DEVICES = {
    device.name: device
    for device in (
        Device(
            "a6000-ada", 364.2e12, 960e9, 48e9,
            "NVIDIA RTX 6000 Ada Generation data sheet: 1,457 TFLOPS FP8 with sparsity, a quarter"
            " of that dense in 16 bits; 960 GB/s; 48 GB",
        ),
        Device(
            "a100-40g", 312e12, 1555e9, 40e9,
            "NVIDIA A100 data sheet: 312 TFLOPS BF16 dense; 1,555 GB/s; 40 GB",
        ),
        Device(
            "agx-orin", 27e12, 204.8e9, 32e9,
            "NVIDIA Jetson AGX Orin Series technical brief, 32 GB module: 108 sparse INT8 TOPS of"
            " the GPU, a quarter of that dense in 16 bits; 204.8 GB/s; 32 GB",
            launch_s=3e-3,
        ),
        Device(
            "h100", 989e12, 3350e9, 80e9,
            "NVIDIA H100 SXM data sheet: 989 TFLOPS BF16 dense; 3.35 TB/s; 80 GB",
        ),
        Device(
            "l4", 121e12, 300e9, 24e9,
            "NVIDIA L4 data sheet: 242 TFLOPS BF16 with sparsity, half of that dense; 300 GB/s;"
            " 24 GB",
        ),
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a decoder. Weights and KV take `itemsize` bytes per number."""

    name: str
    parameters: float
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    context: int
    itemsize: int = 2

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV per token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.itemsize


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("mistral-7b", 7.24e9, 32, 4096, 32, 8, 128, 32_000, 32_768),
        Shape("llama-3-8b", 8.03e9, 32, 4096, 32, 8, 128, 128_256, 8_192),
        Shape("llama-3.2-3b", 3.21e9, 28, 3072, 24, 8, 128, 128_256, 131_072),
        Shape("qwen2.5-0.5b", 0.494e9, 24, 896, 14, 2, 64, 151_936, 32_768),
    )
}

# Share of memory for activations, adapters and the allocator.
_RESERVED_SHARE = 0.15
_RECORDING_SHARE = 0.05
_BLOCK_TOKENS = 16
# A layer is recomputed, then differentiated with frozen weights: two products per forward one.
_BACKWARD_PRODUCTS = 2.0
# Attention is recomputed and differentiated: seven products per two in the forward.
_BACKWARD_PAIRS = 3.5
_LEAST_BLOCKS = 64  # 1,024 tokens: too few to plan with
# Value of terms that a roofline does not know; rates must be above 0.
_NOTHING_S = 1e-9


def datasheet_profile(device: str, shape: str) -> Profile:
    """A profile of `SHAPES[shape]` on `DEVICES[device]`. Raises `InvalidRequest`."""
    if device not in DEVICES:
        raise InvalidRequest(
            f"there is no data sheet of {device!r}; known: {', '.join(DEVICES)}", param="device"
        )
    if shape not in SHAPES:
        raise InvalidRequest(
            f"there is no model shape {shape!r}; known: {', '.join(SHAPES)}", param="model"
        )
    return compute_profile(DEVICES[device], SHAPES[shape])


def compute_profile(device: Device, shape: Shape) -> Profile:
    """The roofline of a shape on a device. Raises `InvalidRequest` if the weights do not fit."""
    weights = shape.parameters * shape.itemsize
    kv_memory = device.memory_bytes * (1.0 - _RESERVED_SHARE) - weights
    blocks = int(kv_memory // (shape.kv_bytes * _BLOCK_TOKENS))
    if blocks < _LEAST_BLOCKS:
        raise InvalidRequest(f"{shape.name} does not fit into {device.name}", param="model")
    flops, bandwidth = device.flops * device.compute, device.bytes_per_s * device.bandwidth
    # Of an untied model, the input embedding counts as multiplied: up to 8% too much a row.
    head = shape.vocabulary * shape.hidden
    row_s = 2.0 * (shape.parameters - head) / flops
    pair_s = 4.0 * shape.layers * shape.heads * shape.head_dim / (device.flops * device.attention)
    scored_s = 2.0 * head / flops
    recorded_bytes = shape.layers * shape.hidden * shape.itemsize
    layer_bytes = (shape.parameters - head) * shape.itemsize / shape.layers
    # Each product streams the layer's weights, but the form adds streaming and products where a
    # roofline takes the larger. Streaming once is half of what the shortest slices take. The
    # estimate is up to 50% too high where both take equally long, and exact for long slices.
    layer_s = layer_bytes / bandwidth + device.launch_s / shape.layers
    layer_row_s = _BACKWARD_PRODUCTS * row_s / shape.layers
    kv_s = 1e3 * shape.kv_bytes / bandwidth
    rates = Rates(
        forward=(
            device.launch_s + weights / bandwidth,
            row_s,
            kv_s,
            _NOTHING_S,
            _NOTHING_S,
            row_s,
            pair_s * 1e6,
            scored_s,
            2.0 * scored_s,
            device.launch_s / 2,
            recorded_bytes / bandwidth + _NOTHING_S,
            *(_NOTHING_S,) * 3,  # nothing is kept, and caches hold almost none of the weights
        ),
        slices=(
            device.launch_s / 4,
            layer_s,
            layer_row_s,
            _BACKWARD_PAIRS * pair_s * 1e6 / shape.layers,
            *(_NOTHING_S,) * 7,  # recomputation is part of the row and the pairs already
        ),
        update_s=2.0 * device.launch_s,
        rho=device.rho,
    )
    info = ModelInfo(
        model=shape.name,
        architecture="data sheet",
        device=device.name,
        dtype="bfloat16",
        vocab_size=shape.vocabulary,
        max_model_len=min(shape.context, blocks * _BLOCK_TOKENS),
        eos_token_ids=(),
        block_size=_BLOCK_TOKENS,
        num_blocks=blocks,
        num_parameters=int(shape.parameters),
        weight_bytes=int(weights),
        kernels="data sheet",
        num_layers=shape.layers,
        recording_tokens=int(device.memory_bytes * _RECORDING_SHARE / recorded_bytes),
        weights_hash=f"shape:{shape.name}",
    )
    return Profile(info, rates, Ceilings(device.flops, device.bytes_per_s), device.source)


def load_profile(name: str) -> Profile:
    """A profile file, or `DEVICE:SHAPE` from data sheets. Raises `InvalidRequest`."""
    device, colon, shape = name.partition(":")
    if colon and not Path(name).exists():
        return datasheet_profile(device, shape)
    return read_profile(Path(name))
