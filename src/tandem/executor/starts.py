"""Initial parameters of a trainer: fresh ones by a `LoraSpec`, or those of a PEFT directory.

Knows the model's linear layers and no training. Only linear layers inside decoder layers can be
trained, since backward slices consist of decoder layers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tandem.core.errors import AdapterError
from tandem.core.training import LoraSpec, TrainerSpec
from tandem.model.load import LoadedModel
from tandem.model.lora_files import is_named, read_lora
from tandem.training.checkpoint import read_optimizer
from tandem.training.parameters import LoraShape, ParameterLayout
from tandem.training.trainer import Start


def make_start(
    model: LoadedModel,
    spec: TrainerSpec,
    max_rank: int,
    admit: Callable[[ParameterLayout], None] = lambda layout: None,
) -> Start:
    """The initial parameters of a trainer. Raises `AdapterError` for a source or a shape that does
    not fit the model. `admit` is called once the shape is known, before anything but the adapter
    takes memory; its errors pass through."""
    if spec.source:
        return _from_files(model, spec, max_rank, admit)
    if spec.resume:
        raise AdapterError("a trainer that resumes needs a source", param="source")
    layout = ParameterLayout(_fresh_modules(model, spec.lora, max_rank))
    admit(layout)
    return Start(layout, _targets(model, layout), layout.fresh(spec.lora.seed, model.device))


def trainable_prefixes(model: LoadedModel) -> tuple[str, ...]:
    """Prefixes of the names of each decoder layer's modules."""
    assert model.stack is not None
    return tuple(f"{model.prefix}{prefix}" for prefix in model.stack.prefixes)


def trainable_linears(model: LoadedModel) -> tuple[str, ...]:
    """Names of the linear layers that can be trained; none if the model cannot be trained."""
    if model.stack is None:
        return ()
    inside = trainable_prefixes(model)
    return tuple(name for name in model.lora.linears if name.startswith(inside))


def _from_files(
    model: LoadedModel,
    spec: TrainerSpec,
    max_rank: int,
    admit: Callable[[ParameterLayout], None],
) -> Start:
    adapter = read_lora(
        spec.source,
        model.lora.linears,
        device=model.device,
        dtype=torch.float32,
        max_rank=max_rank,
    )
    outside = [name for name in adapter if not name.startswith(trainable_prefixes(model))]
    if outside:
        raise AdapterError(f"{outside[0]} is outside of the decoder layers and cannot be trained")
    ordered = [name for name in model.lora.linears if name in adapter]
    modules = {
        name: LoraShape(
            adapter[name].a.shape[0],
            adapter[name].a.shape[1],
            adapter[name].b.shape[0],
            adapter[name].scale,
        )
        for name in ordered
    }
    layout = ParameterLayout(modules)
    admit(layout)
    pairs = {name: (adapter[name].a, adapter[name].b) for name in ordered}
    parameters = layout.flatten(pairs, model.device)
    targets = _targets(model, layout)
    saved = read_optimizer(spec.source, layout, model.device)
    if saved is None:
        if spec.resume:
            raise AdapterError(f"{spec.source} has no optimiser state to resume", param="source")
        return Start(layout, targets, parameters)
    begun = saved.schedule_from if spec.resume else saved.revision
    schedule_from = begun if spec.own_schedule else 0
    return Start(layout, targets, parameters, saved.revision, saved.adam, schedule_from)


def _fresh_modules(model: LoadedModel, lora: LoraSpec, max_rank: int) -> dict[str, LoraShape]:
    if lora.rank < 1 or (max_rank and lora.rank > max_rank):
        raise AdapterError(
            f"rank {lora.rank} is outside of 1 to {max_rank or 'any'} (adapters.max_rank)",
            param="rank",
        )
    inside = trainable_prefixes(model)
    modules = {
        name: LoraShape(lora.rank, shape.inputs, shape.outputs, lora.alpha / lora.rank)
        for name, shape in model.lora.linears.items()
        if name.startswith(inside) and (not lora.targets or is_named(name, lora.targets))
    }
    for target in lora.targets:
        if not any(is_named(name, (target,)) for name in modules):
            raise AdapterError(f"no linear layer of the model is called {target}", param="targets")
    if not modules:
        raise AdapterError("the model has no linear layer that can be trained")
    return modules


def _targets(model: LoadedModel, layout: ParameterLayout) -> tuple[str, ...]:
    """The last parts of the modules' names if they select no other module; else whole names."""
    short = sorted({name.rpartition(".")[2] for name in layout.modules})
    chosen = {name for name in model.lora.linears if is_named(name, short)}
    return tuple(short if chosen == set(layout.modules) else sorted(layout.modules))
