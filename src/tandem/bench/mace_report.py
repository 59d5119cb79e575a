"""The page of the MACE comparison: a table for each of the paper's figures, and its claims.

Knows figures only. Invariant: what is not measured is said, with the place where it is.
"""

from __future__ import annotations

from collections.abc import Sequence

from tandem.bench.mace import FIFO_SEQUENCES, FIFO_VARIANTS, VARIANTS, Variant
from tandem.bench.mace_claims import Claim, Results, claims

# Table 1 of the paper, ms and MB; of its three columns of ablations, the least and the most.
_PAPER_OVERHEADS = {
    "ekya": ("0.03", "0.6"),
    "adainf": ("0.08", "2"),
    "mace": ("0.11 to 0.15", "3.5 to 4.5"),
}
LEARNING_NOTE = (
    "Win rate and CLPD (figures 2 and 9, the middle of figure 12) are a model's and not to be had "
    "from a simulation: `tandem bench learning` measures them while a real one serves and learns, "
    "under `no_retrain`, `ekya`, `adainf` and `unified`: `learning-DEVICE.md`. Of `mace` and "
    "its ablations there are none; what they let learning wait is the time of a fine-tuning job."
)


def as_markdown(results: Results) -> str:
    """All tables of one scale, and what became of the paper's claims."""
    scale, profile = results.scale, results.profile
    lines = [
        f"## {scale.name}: {scale.profile}",
        "",
        f"{scale.rate:g} requests/s for {scale.duration_s:g} s; prompts of {scale.prompt_tokens} "
        f"tokens on average, {scale.shared_tokens} of them one of {scale.templates} beginnings; "
        f"answers of {scale.output_tokens}; a job is a pair of two sequences of "
        f"{scale.pair_tokens} tokens. Profile: {profile.source}.",
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
    lines += _loads(results) + _fifo(results) + _overheads(results) + _claims(claims(results))
    return "\n".join([*lines, ""])


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
    lines = [
        "",
        "Table 1: what scheduling costs. Mean processor time of an iteration to decide, admit and "
        "apply its results, the least of three runs on the machine that simulated; the most memory "
        "that queues, sequences, the last plan and the account of cache blocks took, by the sizes "
        "of their objects.",
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
    """What holds; below, why the others do not."""
    lines = ["", "| claim | paper | here | holds |", "|---|---|---|---|"]
    for claim in found:
        holds = "yes" if claim.holds else "**no**"
        lines.append(f"| {claim.text} | {claim.paper} | {claim.found} | {holds} |")
    missed = [claim for claim in found if not claim.holds]
    if missed:
        lines += ["", "What does not hold, and why:", ""]
        lines += [f"* {claim.text}: {claim.reason}" for claim in missed]
    return lines
