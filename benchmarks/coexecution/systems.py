"""The systems that are compared: which workers take part, on which cores, and how they share.

A description only; `arrangement` runs it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from benchmarks.peers.driver import ALLOCATOR, WorkerSpec, vllm_environ

KV_GIB = 1


class Sharing(StrEnum):
    """How two workers use the machine."""

    BESIDE = "beside"
    SLICES = "slices"


@dataclass(frozen=True)
class System:
    """One row of the table. With one worker in both roles, that engine shares by itself.

    `scheduling` has settings of ours; the engine is started anew when they change.
    """

    key: str
    title: str
    serving: str | None = None
    training: str | None = None
    loss: str = "sft"
    training_cores: tuple[int, ...] = ()
    sharing: Sharing = Sharing.BESIDE
    optional: bool = False
    scheduling: Mapping[str, Any] = field(default_factory=dict)


TANDEM = "tandem"
TEMPORAL_ONLY = {"temporal_only": "true"}
# Answers then have about the TPOT of the pinned peers; the default of 0.1 s leaves learning less.
OBJECTIVE_S = 0.14
PEFT, PEFT_DEFAULT = "peft", "peft default"
TRL, TRL_DEFAULT = "trl", "trl default"
PINNED, WIDE = "serving, first core", "serving, all cores"


@dataclass(frozen=True)
class Setting:
    """Number type of all engines, and the file of the pairs of DPO steps; empty: random tokens."""

    dtype: str = "bfloat16"
    pairs: str = ""


AS_BEFORE = Setting()


def systems(cores: tuple[int, ...]) -> list[System]:
    """All rows, in the order of the table; `cores` is what the machine has, split in halves."""
    half = cores[(len(cores) + 1) // 2 :] or cores
    return [
        System(
            "fused",
            "(a) tandem, fused",
            TANDEM,
            TANDEM,
            training_cores=cores,
            scheduling={"tpot_slo": OBJECTIVE_S},
        ),
        System(
            "fused-default",
            "(a) tandem, fused, default objective",
            TANDEM,
            TANDEM,
            training_cores=cores,
        ),
        System(
            "temporal",
            "(b) tandem, temporal only",
            TANDEM,
            TANDEM,
            training_cores=cores,
            scheduling={"tpot_slo": OBJECTIVE_S, "policy_options": TEMPORAL_ONLY},
        ),
        System("pinned", "(c) {peer} and PEFT, own cores", PINNED, PEFT, training_cores=half),
        System(
            "slices",
            "(d) {peer} and PEFT, time slices",
            WIDE,
            PEFT,
            training_cores=cores,
            sharing=Sharing.SLICES,
        ),
        System("serve", "tandem, serving alone", TANDEM),
        System("peer-serve", "{peer} alone", WIDE),
        System("sft", "tandem, SFT alone", None, TANDEM, training_cores=cores),
        System("peer-sft", "PEFT loop alone", None, PEFT, training_cores=cores),
        System(
            "peer-sft-default",
            "PEFT loop alone, default malloc",
            None,
            PEFT_DEFAULT,
            training_cores=cores,
            optional=True,
        ),
        System(
            "fused-dpo",
            "tandem, fused with DPO, default objective",
            TANDEM,
            TANDEM,
            "dpo",
            cores,
            optional=True,
        ),
        System("dpo", "tandem, DPO alone", None, TANDEM, "dpo", cores),
        System("peer-dpo", "TRL DPO alone, reference known", None, TRL, "dpo", cores),
        System(
            "peer-dpo-default",
            "TRL DPO alone, as it comes",
            None,
            TRL_DEFAULT,
            "dpo",
            cores,
            optional=True,
        ),
    ]


def with_scheduling(
    rows: list[System], tpot_slo: float | None, options: Mapping[str, str]
) -> list[System]:
    """The rows with another objective and more options of the policy where ours takes part."""
    slo = {} if tpot_slo is None else {"tpot_slo": tpot_slo}
    changed = []
    for row in rows:
        if TANDEM in (row.serving, row.training) and (slo or options):
            own = row.scheduling.get("policy_options", {})
            scheduling = {**row.scheduling, **slo, "policy_options": {**own, **options}}
            title = row.title if tpot_slo is None else _with_objective(row.title, tpot_slo)
            row = replace(row, scheduling=scheduling, title=title)
        changed.append(row)
    return changed


def _with_objective(title: str, tpot_slo: float) -> str:
    return title.replace("default objective", f"objective {1e3 * tpot_slo:g} ms a token")


def workers_of(chosen: list[System]) -> list[str]:
    """Names of the workers that these systems need, each once."""
    names = [name for each in chosen for name in (each.serving, each.training) if name]
    return list(dict.fromkeys(names))


def warm_up(chosen: list[System]) -> list[System]:
    """The fewest systems in which each worker does, alone, all that it will do in these."""
    found: dict[object, System] = {}
    for each in sorted(chosen, key=lambda system: len(system.training_cores)):
        if each.serving is not None:
            found[each.serving] = System("warm-up", "", serving=each.serving)
        if each.training is not None:
            cores = each.training_cores  # the most come last
            alone = System("warm-up", "", None, each.training, each.loss, cores)
            found[each.training, each.loss] = alone
    return list(found.values())


def worker_spec(
    name: str, cores: tuple[int, ...], vllm_env: Path | None, setting: Setting = AS_BEFORE
) -> WorkerSpec:
    """How to start a worker."""
    shared: dict[str, Any] = {"dtype": setting.dtype, "pairs": setting.pairs}
    if name == TANDEM:
        own = {"threads": len(cores), **shared}
        return WorkerSpec(name, "benchmarks.coexecution.engine_tandem", options=own)
    if name in (PEFT, PEFT_DEFAULT):
        environ = ALLOCATOR if name == PEFT else {}
        return WorkerSpec(
            name, "benchmarks.coexecution.engine_peft", options=shared, environ=environ
        )
    if name in (TRL, TRL_DEFAULT):
        options = {"precompute": name == TRL, "tokens": 512, **shared}
        return WorkerSpec(
            name, "benchmarks.coexecution.engine_trl", options=options, environ=ALLOCATOR
        )
    served = cores[: (len(cores) + 1) // 2] if name == PINNED else cores
    options = {"cores": served, "threads": len(served)}
    if vllm_env is None:
        return WorkerSpec(
            name, "benchmarks.coexecution.engine_transformers", options=options, environ=ALLOCATOR
        )
    environ = ALLOCATOR | vllm_environ(vllm_env, served, KV_GIB)
    python = str(vllm_env / "bin" / "python")
    return WorkerSpec(name, "benchmarks.coexecution.engine_vllm", python, options, environ)


def machine_cores() -> tuple[int, ...]:
    """The cores that this process may use."""
    return tuple(sorted(os.sched_getaffinity(0)))
