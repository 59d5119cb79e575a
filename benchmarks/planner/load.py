"""Recorded requests at any rate, and an engine with objectives: what studies of this machine share.

Invariant: the same trace, rate and context give the same requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tandem.bench.lengths import parse_lengths
from tandem.bench.options import Arrivals, WorkloadOptions, build_workload
from tandem.bench.workload import Limits, PlannedRequest
from tandem.build import resolve_model
from tandem.config import Settings, resolve

TRACE = Path("../shared/data/traces/azure_llm_2023_conv.csv.gz")


def settings_of(model: str, ttft_slo: float, tpot_slo: float, policy: str = "unified") -> Settings:
    """An engine's settings, with objectives in seconds."""
    scheduling = {"policy": policy, "ttft_slo": ttft_slo, "tpot_slo": tpot_slo}
    return resolve_model(resolve({"model": {"model": model}, "scheduling": scheduling}, environ={}))


def loads(
    trace: Path, seconds: float, context: int, vocabulary: int
) -> Callable[[float], list[PlannedRequest]]:
    """The recorded load at a rate: so many seconds of it, each request cut to the context."""
    lengths = parse_lengths("1")  # the trace has them

    def at(rate: float) -> list[PlannedRequest]:
        options = WorkloadOptions(
            Arrivals.TRACE,
            lengths,
            lengths,
            Limits(duration_s=seconds),
            rate=rate,
            trace=trace,
            vocabulary=vocabulary,
        )
        return [
            replace(
                each,
                prompt=each.prompt[: context // 2],
                output_tokens=min(each.output_tokens, context // 4),
            )
            for each in build_workload(options)
        ]

    return at
