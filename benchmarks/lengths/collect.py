"""Lets a real chat model answer the prompts, in batches of a few minutes; resumable.

Each slice is one `tandem batch run` with an engine of its own. Knows no features and no
predictors. Invariant: an answer is written once, in the order in which slices ended; what has an
answer is not asked again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.lengths.prompts import Prompt
from benchmarks.lengths.rows import kept

FOLDER = Path(".bench-cache/lengths")
CHAT = "/v1/chat/completions"
ANSWER = ("input_tokens", "output_tokens", "finish")
# Nobody waits beside the batch: iterations need not be short.
ALONE = {"TANDEM_SCHEDULING_POLICY": "fcfs"}


@dataclass(frozen=True, slots=True)
class Ask:
    """How answers are drawn; one seed a prompt, so that the same answers come again."""

    model: str = "smollm2"
    max_tokens: int = 512
    temperature: float = 0.7
    top_p: float = 1.0

    @property
    def path(self) -> Path:
        """The file of its answers while they are collected: not kept in git."""
        return FOLDER / f"answers-{Path(self.model).stem}.jsonl"


def answers(path: Path) -> dict[str, dict[str, Any]]:
    """By key; a line that was cut by a crash is left out."""
    found = dict[str, dict[str, Any]]()
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        found[row["key"]] = row
    return found


def resume(ask: Ask, results: Path) -> None:
    """Begin with the answers that the results have, where this machine has none of its own."""
    if ask.path.exists() or not results.exists():
        return
    ask.path.parent.mkdir(parents=True, exist_ok=True)
    partial = ask.path.with_suffix(".partial")
    with partial.open("w") as stream:
        for row in kept(results):
            answer = {name: getattr(row, name) for name in ("key", *ANSWER)}
            stream.write(f"{json.dumps(answer)}\n")
    partial.rename(ask.path)


def collect(wanted: Sequence[Prompt], ask: Ask, slice_prompts: int, seconds: float) -> int:
    """Answer prompts that have no answer, slice by slice, until `seconds` have passed; how many
    answers there are now."""
    begun_s = time.monotonic()
    ask.path.parent.mkdir(parents=True, exist_ok=True)
    while time.monotonic() - begun_s < seconds:
        done = answers(ask.path)
        left = [prompt for prompt in wanted if prompt.key not in done][:slice_prompts]
        if not left:
            break
        slice_s = time.monotonic()
        rows = _answered(left, ask)
        with ask.path.open("a") as stream:
            stream.writelines(json.dumps(row) + "\n" for row in rows)
            stream.flush()
            os.fsync(stream.fileno())
        took_s, tokens = time.monotonic() - slice_s, sum(row["output_tokens"] for row in rows)
        told = f"{len(done) + len(rows)} of {len(wanted)}; the slice: {took_s:.0f} s"
        print(f"{told}, {tokens} tokens, {tokens / took_s:.0f} tokens/s", flush=True)
        if not rows:
            raise RuntimeError("no line of the batch has an answer")
    return len(answers(ask.path))


def _answered(some: Sequence[Prompt], ask: Ask) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="lengths-") as folder:
        requests, out = Path(folder) / "requests.jsonl", Path(folder) / "answers.jsonl"
        requests.write_text("".join(f"{json.dumps(_line(prompt, ask))}\n" for prompt in some))
        script = str(Path(sys.executable).with_name("tandem"))
        command = [script, "batch", "run", str(requests), "--out", str(out), "--serve", ask.model]
        with (FOLDER / "collect.log").open("a") as log:
            environ = {**os.environ, **ALONE}
            subprocess.run(command, env=environ, stdout=log, stderr=log, check=False)
        if not out.exists():
            return []
        return [_row(json.loads(line)) for line in out.read_text().splitlines()]


def _line(prompt: Prompt, ask: Ask) -> dict[str, Any]:
    body = {**asdict(ask), "messages": list(prompt.messages), "seed": prompt.index}
    return {"custom_id": prompt.key, "method": "POST", "url": CHAT, "body": body}


def _row(line: dict[str, Any]) -> dict[str, Any]:
    body = line["response"]["body"]
    [choice] = body["choices"]
    return {
        "key": line["custom_id"],
        "input_tokens": body["usage"]["prompt_tokens"],
        "output_tokens": body["usage"]["completion_tokens"],
        "finish": choice["finish_reason"],
    }
