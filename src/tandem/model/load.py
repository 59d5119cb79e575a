"""Loads a decoder-only transformers model and makes it ready to serve.

The order is: refuse by configuration, load, run the self-test's reference in eager mode, switch to
our attention, fuse and pack for the processor, wrap for LoRA, test. Knows no plan and no KV pool.
Invariant: a `LoadedModel` passed its self-test after the last change.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

from tandem.config import ModelConfig
from tandem.core.errors import InvalidRequest, NotFound, UnsupportedModel
from tandem.model import kernels
from tandem.model.attention.base import (
    AttentionContext,
    AttentionKernel,
    LayerShape,
    PaddedContext,
    attend_once,
)
from tandem.model.attention.cpu import CpuKernel
from tandem.model.attention.interface import IMPLEMENTATION, register
from tandem.model.attention.sdpa import SdpaKernel
from tandem.model.capability import exact_model_length, refuse
from tandem.model.content import weights_hash
from tandem.model.fuse import cpp_kernels, fuse_modules
from tandem.model.fused_layer import adapt_layers
from tandem.model.grammars import Grammars
from tandem.model.head import Head
from tandem.model.hub import repository_of
from tandem.model.linear import compiled_rows, pack_linears
from tandem.model.lora import AdapterUpdates, EagerUpdates, LoraLayers, adaptable_linears
from tandem.model.probe import probe_layers
from tandem.model.product_choice import choose_for
from tandem.model.self_test import SelfTest
from tandem.model.stack import LayerStack

logger = logging.getLogger(__name__)

Progress = Callable[[str, float], None]
_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(slots=True)
class LoadedModel:
    """A model that can be served, and what its callers need to know about it."""

    name: str
    source: str  # directory or hub name of the weights
    architecture: str
    prefix: str  # of the backbone's names in the whole model
    backbone: nn.Module  # tokens to hidden states after the final norm
    head: Head
    stack: LayerStack | None  # its decoder layers one at a time; None: cannot be trained
    width: int  # of the hidden states
    layers: tuple[LayerShape, ...]  # KV shape of each decoder layer, in order
    lora: LoraLayers
    grammars: Grammars
    kernel: AttentionKernel
    kernels: str  # what computes, in words
    device: torch.device
    dtype: torch.dtype
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    num_parameters: int
    layer_parameters: int  # without embedding and head
    weight_bytes: int
    weights_hash: str
    pads: bool = False  # products are faster with certain numbers of rows

    def hidden(
        self, tokens: Tensor, positions: Tensor, context: AttentionContext, *, pad: bool = False
    ) -> Tensor:
        """Hidden states [rows, width] of flattened `tokens` and `positions`, int64 [rows].

        `pad` allows the layers to compute more rows if that makes their products faster.
        """
        rows = tokens.numel()
        if pad and self.pads and (more := compiled_rows(rows) - rows):
            tokens = functional.pad(tokens, (0, more))
            positions = functional.pad(positions, (0, more))
            context = PaddedContext(context, rows)
        output = self.backbone(
            input_ids=tokens[None],
            position_ids=positions[None],
            use_cache=False,
            attention_context=context,
        )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden[:rows]


def load_model(config: ModelConfig, progress: Progress = lambda text, share: None) -> LoadedModel:
    """Load `config.model`, a directory that `names.locate` found.

    `progress` gets what happens and the share that is done. Raises `NotFound` if there is no such
    model or its configuration cannot be read, `UnsupportedModel` if it cannot be served exactly,
    `InvalidRequest` for settings.
    """
    device, dtype = choose_device(config.device), _choose_dtype(config.dtype)
    progress("reading the configuration", 0.0)
    try:
        description = AutoConfig.from_pretrained(config.model, trust_remote_code=False)
    except OSError as error:
        raise NotFound(f"cannot load the model {config.model!r}: {error}", param="model") from error
    except Exception as error:  # each architecture checks its settings in its own way
        raise UnsupportedModel(f"cannot serve {config.model}: {_reason(error)}") from error
    refuse(config.model, description)
    exact_model_length(config.model, description.to_dict(), config.max_model_len)
    progress("loading weights", 0.1)
    # Only `progress` reports progress.
    transformers_logging.disable_progress_bar()
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            config.model,
            dtype=dtype,
            attn_implementation="eager",
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below, by name
        )
    except Exception as error:  # a broken index, file or setting may fail anywhere
        raise UnsupportedModel(
            f"cannot load the weights of {config.model}: {_reason(error)}"
        ) from error
    _refuse_incomplete(config.model, report)
    if surplus := sorted(report["unexpected_keys"]):
        logger.warning(
            "%s has %d weights for which the model has no place, such as %s: they are not used",
            config.model,
            len(surplus),
            surplus[0],
        )
    if config.dtype == "auto" and device.type == "cpu" and not computes_in(model.dtype):
        logger.info("this CPU has no arithmetic in %s: it computes in float32", model.dtype)
        model = model.float()
    try:
        model = model.to(device)
    except torch.OutOfMemoryError as error:
        raise UnsupportedModel(
            f"{config.model} does not fit into the memory of {device}"
        ) from error
    return prepare_model(model, config, progress, tokenizer_end=_tokenizer_end(config.model))


def _refuse_incomplete(name: str, report: dict[str, Any]) -> None:
    """Refuse missing weights: transformers would continue with random ones."""
    if missing := sorted(report["missing_keys"]):
        raise UnsupportedModel(f"the checkpoint of {name} lacks weights: {missing[0]}, ...")
    if others := sorted(report["mismatched_keys"]):
        weight, found, expected = others[0]
        raise UnsupportedModel(
            f"the checkpoint of {name} does not fit its config.json: {weight} has the shape "
            f"{list(found)}, expected {list(expected)}"
        )


def prepare_model(
    model: PreTrainedModel,
    config: ModelConfig,
    progress: Progress = lambda text, share: None,
    *,
    tokenizer_end: int | None = None,
) -> LoadedModel:
    """Make a transformers model in memory ready to serve. It is changed in place.

    `tokenizer_end` is the end token of its tokenizer. Raises like `load_model`.
    """
    name = config.served_name or Path(config.model).name
    refuse(name, model.config)
    description = model.config.to_dict()
    limit = exact_model_length(name, description, config.max_model_len)
    if config.threads:
        torch.set_num_threads(config.threads)
    if model.device.type == "cuda":
        # cuDNN plans anew for every shape, which takes a hundred times as long as the attention.
        torch.backends.cuda.enable_cudnn_sdp(False)
    model.eval().requires_grad_(False)
    if model.get_output_embeddings() is None:
        raise UnsupportedModel(f"{name} has no output embedding, so it cannot generate text")
    sizes = [(weight.numel(), weight.nbytes) for weight in model.parameters()]
    layer_parameters = _layer_parameters(model)
    device, dtype = model.device, model.dtype
    digest = weights_hash(model)
    progress("testing the model", 0.5)
    model.set_attn_implementation("eager")
    test = SelfTest(name, model, model.config.vocab_size, limit)
    shapes = probe_layers(name, model)
    register()
    model.set_attn_implementation(IMPLEMENTATION)
    backbone: nn.Module = model.base_model
    prefix = f"{model.base_model_prefix}."
    linears = adaptable_linears(backbone, prefix)
    if _wants_kernels(model, config.kernels) and not kernels.compiled():
        progress("compiling the CPU kernels, once for this machine", 0.7)
        kernels.status()
    progress("packing weights", 0.7)
    kernel, kernel_names, pads = _accelerate(model, config.kernels, config.packing)
    head = Head.of(model.get_output_embeddings(), description)
    lora = LoraLayers(model, linears, _adapter_updates(model, config.kernels))
    adapt_layers(backbone, lora)
    progress("testing what will serve", 0.9)
    test.check(backbone, head, shapes, kernel)
    stack = _stack(name, backbone, len(shapes))
    width, ends = model.get_output_embeddings().out_features, _eos_token_ids(model, tokenizer_end)
    progress("ready", 1.0)
    return LoadedModel(
        name=name,
        source=repository_of(config.model),
        architecture=type(model).__name__,
        prefix=prefix,
        backbone=backbone,
        head=head,
        stack=stack,
        width=model.get_output_embeddings().in_features,
        layers=shapes,
        lora=lora,
        grammars=Grammars(config.model, width, ends),
        kernel=kernel,
        kernels=kernel_names,
        device=device,
        dtype=dtype,
        vocab_size=width,
        max_model_len=limit,
        eos_token_ids=ends,
        num_parameters=sum(count for count, _ in sizes),
        layer_parameters=layer_parameters,
        weight_bytes=sum(size for _, size in sizes),
        weights_hash=digest,
        pads=pads,
    )


def _layer_parameters(model: PreTrainedModel) -> int:
    """Number of parameters outside embedding and head. Tied weights count once."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    outside = {weight for end in ends for weight in end.parameters()}
    return sum(weight.numel() for weight in model.parameters() if weight not in outside)


def _accelerate(
    model: PreTrainedModel, name: str, packing: str
) -> tuple[AttentionKernel, str, bool]:
    """Fuse and pack for the processor where that is known to help. Changes `model`.

    Returns the attention kernel, a description for `ModelInfo.kernels`, and whether products are
    faster with certain numbers of rows.
    """
    kernel: AttentionKernel
    if not _wants_kernels(model, name):
        kernel = SdpaKernel() if name == "off" else _device_kernel(model)
        done = [] if isinstance(kernel, SdpaKernel) else _accelerate_device(model)
        return kernel, "+".join([kernel.name, *done]), False
    done, choice = [], choose_for(model, packing)
    # Fuse first: it joins layers that packing would pack one by one.
    if fuse_modules(model, cpp_kernels(choice.pack)).replaced:
        done.append("fused")
    report = pack_linears(model, choice.pack)
    done.append(f"packed:{choice.name}")
    kernel = CpuKernel() if kernels.status().available else SdpaKernel()
    return kernel, "+".join([kernel.name, *done]), report.pads


def _wants_kernels(model: PreTrainedModel, name: str) -> bool:
    if name not in ("auto", "off"):
        raise InvalidRequest(f"model.kernels is {name!r}; use auto or off", param="kernels")
    return name == "auto" and model.device.type == "cpu"


def _device_kernel(model: PreTrainedModel) -> AttentionKernel:
    """The kernel off the CPU. Most of torch's CUDA builds come with Triton. It needs a C compiler
    at run time."""
    if model.device.type != "cuda" or model.dtype.itemsize > 4:
        return SdpaKernel()
    try:
        from tandem.model.attention.triton_kernel import TritonKernel

        kernel = TritonKernel()
        attend_once(kernel, model.device, model.dtype)
    except Exception as error:  # compilers may fail in any way
        logger.warning("Triton's attention is not available, using torch's (slower): %s", error)
        return SdpaKernel()
    return kernel


def _accelerate_device(model: PreTrainedModel) -> list[str]:
    """Fuse and pack for a CUDA device whose Triton works. Returns what was done."""
    from tandem.model.gpu.prepare import accelerate

    return accelerate(model)


def _adapter_updates(model: PreTrainedModel, name: str) -> AdapterUpdates:
    """All adapters in two kernel launches on a CUDA device with Triton; elsewhere one by one."""
    if name == "off" or model.device.type != "cuda" or model.dtype.itemsize > 4:
        return EagerUpdates()
    try:
        from tandem.model.gpu.adapters import tried

        return tried(model.device, model.dtype)
    except Exception as error:  # compilers may fail in any way
        logger.warning("adapters are applied one by one, which is slower: %s", error)
        return EagerUpdates()


def _stack(name: str, backbone: nn.Module, count: int) -> LayerStack | None:
    """The layers one at a time. A model without a stack can still be served."""
    try:
        return LayerStack(backbone, count)
    except (UnsupportedModel, RuntimeError, ValueError, TypeError, KeyError) as error:
        logger.warning("%s cannot be trained: %s", name, error)
        return None


def choose_device(name: str) -> torch.device:
    """The device by name. `auto` is CUDA if available. Raises `InvalidRequest`."""
    if name not in ("auto", "cpu", "cuda"):
        raise InvalidRequest(f"model.device is {name!r}; use auto, cpu or cuda", param="device")
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise InvalidRequest("model.device is cuda, but torch finds no CUDA device", param="device")
    return torch.device("cuda" if available and name != "cpu" else "cpu")


def _choose_dtype(name: str) -> torch.dtype | str:
    if name == "auto":
        return "auto"
    if name not in _DTYPES:
        known = ", ".join(_DTYPES)
        raise InvalidRequest(f"model.dtype is {name!r}; use auto or {known}", param="dtype")
    return _DTYPES[name]


def computes_in(dtype: torch.dtype) -> bool:
    """Whether products in this type are about as fast as in float32 on this CPU (or faster)."""
    if dtype.itemsize < 4 and not torch.backends.mkldnn.is_available():
        return False
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype is torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return True


def _eos_token_ids(model: PreTrainedModel, tokenizer_end: int | None) -> tuple[int, ...]:
    """Every end token that a file of the model names, those of `generation_config` first. Chat
    models may name the end of a turn in one file and the end of a text in another."""
    generation: Any = model.generation_config
    named = [
        None if generation is None else generation.eos_token_id,
        model.config.eos_token_id,
        tokenizer_end,
    ]
    lists = [each if isinstance(each, list) else [each] for each in named]
    return tuple(dict.fromkeys(int(each) for one in lists for each in one if each is not None))


def _tokenizer_end(source: str) -> int | None:
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
    except Exception as error:  # it may have none; later users report problems
        logger.info("no end token is known from the tokenizer of %s: %s", source, _reason(error))
        return None
    # Without files, transformers makes a tokenizer of special tokens only.
    invented = len(tokenizer) <= len(tokenizer.all_special_ids)
    end: int | None = None if invented else tokenizer.eos_token_id
    return end


def _reason(error: Exception) -> str:
    """A foreign error on one line. Its type tells more than a bare key or number."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
