"""The page of the MACE comparison: a table for each of the paper's figures, and its claims.

Knows figures only. Invariant: what is not measured is said, with the place where it is, and what is
measured with the machine.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.mace.claims import Claim, Results, claims
from benchmarks.mace.measured import CROWD, FULL_RATE
from benchmarks.mace.runs import FIFO_SEQUENCES, FIFO_VARIANTS, SLO_FACTOR, VARIANTS, Variant
from benchmarks.mace.sweep import PARTS, unrest

# Table 1 of the paper, ms and MB; of its three columns of ablations, the least and the most.
_PAPER_OVERHEADS = {
    "ekya": ("0.03", "0.6"),
    "adainf": ("0.08", "2"),
    "mace": ("0.11 to 0.15", "3.5 to 4.5"),
}
LEARNING_NOTE = (
    "Win rate and CLPD (figures 2 and 9, the middle of figure 12) are a model's and not to be had "
    "from a simulation: `python -m benchmarks learning` measures them while a real one serves and "
    "learns, under `no_retrain`, `ekya`, `adainf` and `unified`: `learning-DEVICE.md`. Of `mace` "
    "and its ablations there are none; what they let learning wait is a fine-tuning job's time."
)


def as_page(found: Sequence[Results]) -> str:
    """The whole page, of one scale or more."""
    simulated = {results.measured is None for results in found}
    kinds = {True: "at the paper's scale, simulated", False: "at a small scale, measured"}
    heading = "; ".join(text for kind, text in kinds.items() if kind in simulated)
    return "\n".join([f"# MACE {heading}", "", LEARNING_NOTE, "", *map(as_markdown, found)])


def as_markdown(results: Results) -> str:
    """All tables of one scale, and what became of the paper's claims."""
    scale, profile = results.scale, results.profile
    lines = [
        f"## {scale.name}: {scale.profile}",
        "",
        f"{scale.rate:g} requests/s for {scale.duration_s:g} s; prompts of {scale.prompt_tokens} "
        f"tokens on average, {scale.shared_tokens} of them one of {scale.templates} beginnings; "
        f"answers of {scale.output_tokens}; a job is a pair of two sequences of "
        f"{scale.pair_tokens} tokens. A request asks for its first token within {SLO_FACTOR:g} "
        "times its prompt's own forward by the profile, which is what attainment counts, and for "
        f"the others within {SLO_FACTOR:g} times a decode each. Profile: {profile.source}.",
        *_measured(results),
        "",
        "| retrain rate | policy | output tokens/s | TTFT mean / p95, ms | TBT, ms | "
        "fine-tuning, s | attainment | iterations | ms each | utilisation | jobs done |",
        "|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in results.rates:
        lines.append(
            f"| {row.retrain_rate:.0%} | `{row.variant}` | {row.throughput:.0f} | "
            f"{1e3 * row.ttft_s:.0f} / {1e3 * row.ttft_p95_s:.0f} | {1e3 * row.tbt_s:.1f} | "
            f"{row.fine_tune_s:.1f} | {row.attainment:.1%} | {row.iterations} | "
            f"{1e3 * row.iteration_s:.1f} | {row.utilisation:.1%} | "
            f"{row.jobs_done} of {row.jobs} |"
        )
    for part in (_unfinished, _loads, _fifo, _overheads):
        lines += part(results)
    lines += _claims(claims(results))
    return "\n".join([*lines, ""])


def _measured(results: Results) -> list[str]:
    """On what, under which load and objectives, and how sure the figures are."""
    how = results.measured
    if how is None:
        return []
    capacity = how.capacity
    return [
        "",
        f"Measured on the real engine; {', '.join(f'{k}: {v}' for k, v in how.machine.items())}. "
        f"Its matrix ceiling is {results.profile.ceilings.flops / 1e9:.0f} GFLOP/s, of which the "
        f"utilisation counts products of the layers. Other processes took {how.others:.1%} of the "
        "cores. The paper's claims are judged at its own scale only.",
        "",
        f"A request alone has its first token after {1e3 * capacity.ttft_s:.0f} ms (its forward: "
        f"{1e3 * capacity.forward_s:.0f} ms by the profile) and then one every "
        f"{1e3 * capacity.tpot_s:.1f} ms. One of a crowd of {CROWD} takes "
        f"{1e3 * capacity.request_s:.0f} ms of the machine, a job that is alone "
        f"{1e3 * capacity.job_s:.0f} ms: at a retrain rate of {FULL_RATE:.0%} the load asks for "
        f"all of it. `ekya` opens a window every {how.window_s:.2g} s. "
        f"{_rounds(results, how.rounds)}",
    ]


def _rounds(results: Results, count: int) -> str:
    """What becomes of them, and by how much they differ."""
    if count == 1:
        return "Figures are of one round."
    groups = [group for part in PARTS for group in results.runs[part]]
    names = {"throughput": "output tokens/s", "ttft_s": "mean TTFT", "tbt_s": "TBT"}
    differ = ", ".join(f"{unrest(groups, name):.0%} in {text}" for name, text in names.items())
    return (
        f"Figures are of {count} rounds: counts are sums, the others means. Rounds of the same run "
        f"differ by {differ} (medians)."
    )


def _unfinished(results: Results) -> list[str]:
    """Whose figures are of fewer requests than came; nothing if there are none."""
    found = [
        f"`{row.variant}` {row.unfinished} at {row.request_rate:g}/s and {row.retrain_rate:.0%}"
        for row in (*results.rates, *results.loads, *results.fifo)
        if row.unfinished
    ]
    told = "Requests that failed, or were cut off when three times the load's time was over"
    return ["", f"{told}: {', '.join(found)}."] if found else []


def _loads(results: Results) -> list[str]:
    """Figure 12: attainment and throughput over load."""
    if not results.loads:
        return []
    rates = results.request_rates
    cells = {
        (row.variant, row.request_rate): f"{row.attainment:.0%}, {row.throughput:.0f}"
        for row in results.loads
    }
    return [
        "",
        f"Figure 12: attainment and output tokens/s by requests/s, at a retrain rate of "
        f"{results.loads[0].retrain_rate:.0%}.",
        "",
        *_pivot("policy", VARIANTS, [f"{rate:g}/s" for rate in rates], rates, cells),
    ]


def _fifo(results: Results) -> list[str]:
    """Figure 13: iterations and how long each takes, in order of arrival."""
    if not results.fifo:
        return []
    rates = sorted({row.retrain_rate for row in results.fifo})
    cells = {
        (row.variant, row.retrain_rate): f"{row.iterations}, {1e3 * row.iteration_s:.1f}"
        for row in results.fifo
    }
    return [
        "",
        f"Figure 13: iterations until all has ended, and ms of each, by retrain rate; first in, "
        f"first out for all, at most {FIFO_SEQUENCES} sequences. `mace/fifo` has up to 50 answers "
        "and two jobs in one iteration, `mace/bin` one or the other.",
        "",
        *_pivot("policy", FIFO_VARIANTS, [f"{rate:.0%}" for rate in rates], rates, cells),
    ]


def _pivot(
    corner: str,
    variants: Sequence[Variant],
    heads: Sequence[str],
    keys: Sequence[float],
    cells: dict[tuple[str, float], str],
) -> list[str]:
    """A table with a row for each variant and a column for each key."""
    return [
        f"| {corner} | {' | '.join(heads)} |",
        "|---|" + "---:|" * len(heads),
        *(
            f"| `{each.name}` | {' | '.join(cells[each.name, key] for key in keys)} |"
            for each in variants
        ),
    ]


def _overheads(results: Results) -> list[str]:
    """Table 1."""
    if not results.overheads:
        return []
    where = "the least of three runs on the machine that simulated"
    if results.measured is not None:
        where = "of one run, between the passes of the model"
    lines = [
        "",
        "Table 1: what scheduling costs. Mean processor time of an iteration to decide, admit and "
        f"apply its results, {where}; the most memory that queues, sequences, the last plan and "
        "the account of cache blocks took, by the sizes of their objects.",
        "",
        "| policy | ms | paper | MB | paper |",
        "|---|---:|---:|---:|---:|",
    ]
    for row in results.overheads:
        paper_ms, paper_mb = _PAPER_OVERHEADS.get(row.variant, ("-", "-"))
        lines.append(
            f"| `{row.variant}` | {1e3 * row.schedule_s:.2f} | {paper_ms} | "
            f"{row.state_bytes / 1e6:.1f} | {paper_mb} |"
        )
    return lines


def _claims(found: Sequence[Claim]) -> list[str]:
    """What holds; below, why the others do not. Nothing if nothing is claimed."""
    if not found:
        return []
    lines = ["", "| claim | paper | here | holds |", "|---|---|---|---|"]
    for claim in found:
        holds = "yes" if claim.holds else "**no**"
        lines.append(f"| {claim.text} | {claim.paper} | {claim.found} | {holds} |")
    missed = [claim for claim in found if not claim.holds]
    if missed:
        lines += ["", "What does not hold, and why:", ""]
        lines += [f"* {claim.text}: {claim.reason}" for claim in missed]
    return lines
