"""The tables of a run, as markdown: one a part, printed when it ends and written as a page.

Knows the names of the parts' figures, not how they were measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, object]

TITLES = {
    "ceilings": "Ceilings",
    "decode": "Decode, single passes",
    "iterations": "Decode, iterations of the engine",
    "prefill": "Prompts, single passes",
    "adapters": "Adapters of rank 16 on all linear layers, single passes of decode",
    "replays": "The same passes, the device alone (recorded passes one after the other)",
    "coserving": "Training and requests together",
    "peers": "transformers' continuous batching on the same weights",
    "kernels": "Kernels of a pass of decode",
}
# Head and form of each figure, in the order of the columns.
COLUMNS: dict[str, tuple[str, str]] = {
    "model": ("model", ""),
    "engine": ("engine", ""),
    "window": ("window", ""),
    "requests_per_s": ("requests/s", ".1f"),
    "sequences": ("sequences", ""),
    "prompt_tokens": ("prompt, tokens", ""),
    "context_tokens": ("context, tokens", ".0f"),
    "adapters": ("adapters", ""),
    "kernel": ("kernel", ""),
    "calls": ("calls", ""),
    "us": ("microseconds a pass", ".1f"),
    "read_gb_per_s": ("reads, GB/s", ".0f"),
    "copy_gb_per_s": ("copies (read and written), GB/s", ".0f"),
    "tflops": ("matrix products, TFLOP/s", ".1f"),
    "ms": ("ms", ".3f"),
    "p90_ms": ("p90, ms", ".3f"),
    "ours_ms": ("ours, ms", ".3f"),
    "tokens_per_s": ("tokens/s", ".0f"),
    "weights_share": ("weights over the memory ceiling", ".1%"),
    "stream_share": ("with keys and values", ".1%"),
    "matrix_share": ("share of the matrix ceiling", ".1%"),
    "ratio": ("ratio", ".3f"),
    "tpot_objective_ms": ("TPOT objective, ms", ".2f"),
    "training_tokens_per_s": ("training tokens/s", ".0f"),
    "kept": ("training kept", ".1%"),
    "tpot_p50_ms": ("TPOT p50, ms", ".2f"),
    "tpot_p99_ms": ("p99", ".2f"),
    "tpot_ratio": ("TPOT p50 over alone", ".2f"),
    "ttft_p50_ms": ("TTFT p50, ms", ".1f"),
    "ttft_p99_ms": ("p99", ".1f"),
    "requests": ("requests", ""),
    "unfinished": ("unfinished", ""),
    "iterations": ("iterations", ""),
    "recorded_rows": ("recorded rows an iteration", ".1f"),
    "layers": ("layers of backward an iteration", ".2f"),
    "forward_ms": ("passes, ms an iteration", ".2f"),
    "backward_ms": ("backward and updates, ms an iteration", ".2f"),
    "beside_ms": ("beside the device's work, ms an iteration", ".2f"),
    "problem": ("problem", ""),
}


def as_table(rows: Sequence[Row]) -> list[str]:
    """The columns that any row has."""
    names = [name for name in COLUMNS if any(name in row for row in rows)]
    lines = [_line([COLUMNS[name][0] for name in names]), "|---" * len(names) + "|"]
    for row in rows:
        lines.append(_line([_cell(row.get(name), COLUMNS[name][1]) for name in names]))
    return lines


def as_markdown(data: Mapping[str, Any]) -> str:
    """The whole page: the machine, every part's table, and what is missing."""
    machine = ", ".join(f"{name}: {value}" for name, value in data["machine"].items())
    lines = ["# One GPU", "", machine, ""]
    for part, title in TITLES.items():
        if rows := data["parts"].get(part):
            lines += [f"## {title}", "", *as_table(rows), ""]
    if data["missing"]:
        lines += ["## Missing", "", *(f"* {each}" for each in data["missing"]), ""]
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cell(value: object, form: str) -> str:
    if value is None:
        return ""
    text = format(value, form if isinstance(value, float) else "")
    return " ".join(text.replace("|", "/").split())
