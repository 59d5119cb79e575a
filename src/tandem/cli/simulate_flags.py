"""The flags of `tandem simulate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tandem.bench.lengths import FORMS, parse_lengths
from tandem.bench.options import Arrivals, WorkloadOptions
from tandem.bench.workload import Limits
from tandem.cli.output import refusals, with_folder
from tandem.config import resolve
from tandem.core.errors import InvalidRequest

_PROFILE = "A file of `tandem profile`, or DEVICE:SHAPE of a data sheet, as a100-40g:llama-3-8b."
_BATCH = "JSONL of OpenAI's batch API: offline requests, from the beginning on."
_OVERFLOW = (
    "Second engine for the longest requests: a profile as above, or a share of the device, such as "
    "0.5, which the main engine then lacks; lengths are known (docs/overflow.md)."
)
_CURVE = "CSV with step,train_loss, as a job's result file; default: a model of the falling loss."
# The load where no trace is given.
_RATE, _DURATION_S = 2.0, 600.0
_TRACE = "Azure CSV, Mooncake JSONL, vidur or answer lengths (.gz too): lengths, prefixes, times."


def simulate_command(
    profile: Annotated[str, typer.Option(help=_PROFILE)] = "a100-40g:llama-3-8b",
    policy: Annotated[
        list[str] | None, typer.Option(help="As of `tandem serve`; repeatable; default: unified.")
    ] = None,
    policy_option: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE, for all policies; repeatable.")
    ] = None,
    trace: Annotated[Path | None, typer.Option(help=_TRACE)] = None,
    arrivals: Annotated[
        Arrivals | None, typer.Option(help="Default: the trace's, else poisson.")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="Requests/s; stretches a trace; without one: 2.")
    ] = None,
    time_scale: Annotated[float, typer.Option(help="Stretch a trace's times by this.")] = 1.0,
    prompt_tokens: Annotated[str, typer.Option(help=f"Without trace: {FORMS}.")] = "512",
    output_tokens: Annotated[str, typer.Option(help=f"Without trace: {FORMS}.")] = "128",
    max_requests: Annotated[int | None, typer.Option(help="Stop after so many.")] = None,
    duration: Annotated[
        float | None, typer.Option(help="Seconds of arrivals; 600 without trace or --max-requests.")
    ] = None,
    max_prompt_tokens: Annotated[int | None, typer.Option(help="Clip prompts.")] = None,
    max_output_tokens: Annotated[int | None, typer.Option(help="Clip outputs.")] = None,
    batch: Annotated[Path | None, typer.Option(help=_BATCH)] = None,
    overflow: Annotated[str, typer.Option(help=_OVERFLOW)] = "",
    overflow_quantile: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="It gets what is longer than this quantile.")
    ] = 0.9,
    overflow_tokens: Annotated[
        int, typer.Option(min=0, help="It gets what is longer than this; 0: by the quantile.")
    ] = 0,
    retrain_rate: Annotated[float, typer.Option(help="Preference pairs a request.")] = 0.0,
    training_steps: Annotated[
        int, typer.Option(help="Steps that are queued at the beginning.")
    ] = 0,
    pair_tokens: Annotated[int, typer.Option(help="Tokens of each sequence of a pair.")] = 256,
    loss_curve: Annotated[Path | None, typer.Option(help=_CURVE)] = None,
    max_sequences: Annotated[int, typer.Option(help="Sequences of an iteration.")] = 128,
    max_batch_tokens: Annotated[int, typer.Option(help="Rows of an iteration.")] = 1024,
    prefix_caching: Annotated[bool, typer.Option(help="Reuse KV of equal beginnings.")] = True,
    ttft_slo: Annotated[float, typer.Option(help="Seconds to the first token.")] = 1.0,
    tpot_slo: Annotated[float, typer.Option(help="Seconds a token after that.")] = 0.1,
    noise: Annotated[bool, typer.Option(help="With a measured profile: its residuals.")] = True,
    figures: Annotated[bool, typer.Option(help="Draw latency, timeline, occupancy.")] = False,
    seed: Annotated[int, typer.Option(help="Same seed and flags, same run.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            help="JSON report; -POLICY is added for several policies.", callback=with_folder
        ),
    ] = None,
) -> None:
    """Run a load through the real scheduler on a device that is only computed."""
    from tandem.bench.simulation import Training, as_json
    from tandem.bench.timeline_figures import draw_runs
    from tandem.cli.simulate import (
        SimulateOptions,
        compare,
        drawn_of,
        show,
        simulate,
    )
    from tandem.core.slo import Slo
    from tandem.estimators.datasheet import load_profile
    from tandem.scheduling.registry import build_policy

    console = Console(stderr=True)
    chosen = policy or ["unified"]
    with refusals():
        if loss_curve is not None and not (retrain_rate or training_steps):
            raise InvalidRequest("--loss-curve needs --retrain-rate or --training-steps")
        options = dict(_pair(each) for each in policy_option or ())
        for name in chosen:  # a wrong one shall not cost the runs of the others
            build_policy(name, options)
        if trace is None:
            rate = rate if rate is not None else _RATE
            duration = _DURATION_S if duration is None and max_requests is None else duration
        limits = Limits(max_requests, duration, max_prompt_tokens, max_output_tokens)
        found_profile = load_profile(profile)
        default = Arrivals.TRACE if trace is not None else Arrivals.POISSON
        simulated = SimulateOptions(
            profile,
            WorkloadOptions(
                arrivals=arrivals or default,
                prompts=parse_lengths(prompt_tokens),
                outputs=parse_lengths(output_tokens),
                limits=limits,
                rate=rate,
                time_scale=time_scale,
                trace=trace,
                vocabulary=found_profile.info.vocab_size,
                seed=seed,
            ),
            Training(retrain_rate, pair_tokens=pair_tokens, always=training_steps),
            timeline=figures or bool(retrain_rate or training_steps),
            noise=noise,
            loss_curve=loss_curve,
            batch=batch,
            overflow=overflow,
            overflow_quantile=overflow_quantile,
            overflow_tokens=overflow_tokens,
        )
        base = out or Path("simulation.json")
        runs, drawn = [], []
        for name in chosen:
            settings = resolve(
                {
                    "scheduling": {
                        "policy": name,
                        "policy_options": options,
                        "max_sequences": max_sequences,
                        "max_batch_tokens": max_batch_tokens,
                        "ttft_slo": ttft_slo,
                        "tpot_slo": tpot_slo,
                    },
                    "cache": {"prefix_caching": prefix_caching},
                }
            )
            found, report, timeline = simulate(settings, simulated, console)
            show(found, Console())
            runs.append(found)
            path = base if len(chosen) == 1 else base.with_stem(f"{base.stem}-{name}")
            if out is not None or figures:
                path.write_bytes(as_json(found))
                console.print(f"written: {path}")
            if figures:
                drawn.append(drawn_of(found, report, timeline, path.stem))
        if len(runs) > 1:
            compare(runs, Console())
        if figures:
            blocks = found_profile.info.num_blocks
            for picture in draw_runs(drawn, Slo(ttft_slo, tpot_slo), blocks, base.parent):
                console.print(f"written: {picture}")


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise typer.BadParameter(f"{text!r} is not NAME=VALUE", param_hint="--policy-option")
    return name, value
