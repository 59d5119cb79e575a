"""What a recipe does to a real chat model, epoch by epoch: the taste, and what is left of the rest.

    python -m benchmarks recipe --model smollm2 --try "pirate dpo 5e-4 5" --try "json sft 5e-4 5"

A try is `TASTE KIND LEARNING_RATE RPO_ALPHA`; kinds are sft, dpo and kto (half of the answers
liked, half of the plain ones disliked). One line of JSON for each epoch goes to `--out`.
"""

from __future__ import annotations

import json
import math
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer

from benchmarks.recipe.material import HELD, NEUTRAL, TASTES, TAUGHT, Taste
from tandem.core.sampling import SamplingParams
from tandem.core.training import ScoreRequest
from tandem.llm import LLM, Example
from tandem.services.learning.answer_faults import AnswerText, fault, overlap

_TOKENS = 48


@dataclass(frozen=True, slots=True)
class Try:
    """One recipe on one taste."""

    taste: Taste
    kind: str
    learning_rate: float
    rpo_alpha: float

    @staticmethod
    def parse(text: str) -> Try:
        """See the module."""
        name, kind, rate, alpha = text.split()
        taste = next(taste for taste in TASTES if taste.name == name)
        return Try(taste, kind, float(rate), float(alpha))


class Study:
    """The model, and its own answers to all prompts."""

    def __init__(self, model: str, threads: int = 0) -> None:
        self.llm = LLM(model, policy="adainf", threads=threads)
        prompts = [*TAUGHT, *HELD, *NEUTRAL]
        self.own = dict(zip(prompts, self.answers(prompts, None), strict=True))
        self._number = 0

    def answers(self, prompts: list[str], adapter: str | None) -> list[AnswerText]:
        """Greedy ones."""
        encoded = [
            self.llm.tokenizer.encode_chat([{"role": "user", "content": prompt}])
            for prompt in prompts
        ]
        sampling = SamplingParams(temperature=0.0, max_tokens=_TOKENS)
        outputs = self.llm.generate(encoded, sampling, adapter=adapter)
        return [
            AnswerText(
                output.choices[0].text.strip(),
                len(output.choices[0].tokens),
                output.choices[0].finish_reason == "stop",
            )
            for output in outputs
        ]

    def logprob(self, prompt: str, answer: str, adapter: str | None) -> float:
        """A token, of an answer without its end."""
        before = self.llm.tokenizer.encode_chat([{"role": "user", "content": prompt}])
        tokens = before + self.llm.tokenizer.encode(answer, add_special_tokens=False)
        self._number += 1
        request = ScoreRequest(f"recipe-{self._number}", tokens, len(before), adapter=adapter)
        loop = self.llm._loop
        loop.teaching.add_score(request)
        while not (ended := loop.teaching.take_learned()):
            loop.step()
        return float(ended[0].logprob) / max(1, len(tokens) - len(before))

    def examples(self, tried: Try) -> list[Example]:
        """Forty."""
        found = []
        for at, prompt in enumerate(TAUGHT):
            own, turn = self.own[prompt].text, [{"role": "user", "content": prompt}]
            chosen = tried.taste.turn(own)
            if tried.kind == "dpo":
                found.append(Example(turn, chosen, rejected=own))
            elif tried.kind == "kto":
                liked = at % 2 == 0
                found.append(Example(turn, chosen if liked else own, desirable=liked))
            else:
                found.append(Example(turn, chosen))
        return found

    def measure(self, tried: Try, adapter: str) -> dict[str, Any]:
        """After an epoch."""
        held, neutral = self.answers([*HELD], adapter), self.answers([*NEUTRAL], adapter)
        own_held, own_neutral = [self.own[p] for p in HELD], [self.own[p] for p in NEUTRAL]
        faults = [fault(*each) for each in zip(held + neutral, own_held + own_neutral, strict=True)]
        asked = [tried.taste.turn(self.own[p].text) for p in HELD]
        pairs = list(zip(HELD, asked, strict=True))
        own = [(p, self.own[p].text) for p in NEUTRAL]
        said = [(p, a.text) for p, a in zip(NEUTRAL, neutral, strict=True)]

        def mean(items: list[tuple[str, str]], under: str | None) -> float:
            return fmean(self.logprob(p, a, under) for p, a in items)

        base_own = mean(own, None)
        return {
            "shows": fmean(tried.taste.shows(a.text) for a in held),
            "shows_neutral": fmean(tried.taste.shows(a.text) for a in neutral),
            "faults": sum(f is not None for f in faults) / len(faults),
            "kinds": sorted({f for f in faults if f}),
            "overlap": fmean(overlap(a.text, b.text) for a, b in zip(held, own_held, strict=True)),
            "overlap_asked": fmean(
                overlap(a, b.text) for a, b in zip(asked, own_held, strict=True)
            ),
            "overlap_neutral": fmean(
                overlap(a.text, b.text) for a, b in zip(neutral, own_neutral, strict=True)
            ),
            "chosen_gain": mean(pairs, adapter) - mean(pairs, None),
            "chosen_base": mean(pairs, None),
            "drop": base_own - mean(own, adapter),
            "divergence": base_own - mean(said, None),
            "example": held[0].text[:160],
            "neutral": neutral[0].text[:160],
        }


def run(study: Study, tried: Try, epochs: int, number: int, seconds: float) -> list[dict[str, Any]]:
    """Rows of one try."""
    name, rows = f"try{number}", []
    with tempfile.TemporaryDirectory() as directory:
        for epoch in range(1, epochs + 1):
            began = time.monotonic()
            lesson = study.llm.learn(
                name,
                study.examples(tried),
                str(Path(directory) / str(epoch)),
                epochs=1,
                learning_rate=tried.learning_rate,
                rpo_alpha=tried.rpo_alpha,
            )
            trained_s = time.monotonic() - began
            seconds += trained_s
            row = {
                "taste": tried.taste.name,
                "kind": tried.kind,
                "learning_rate": tried.learning_rate,
                "rpo_alpha": tried.rpo_alpha,
                "steps": epoch * len(lesson.losses),
                "loss": round(fmean(lesson.losses), 3),
                "trained_s": round(trained_s, 1),
                **study.measure(tried, name),
            }
            rows.append(
                {
                    k: float(f"{v:.3g}") if isinstance(v, float) and math.isfinite(v) else v
                    for k, v in row.items()
                }
            )
    return rows


def main(
    tries: Annotated[list[str], typer.Option("--try", help="A try (repeatable).")],
    model: Annotated[str, typer.Option(help="Model.")] = "smollm2",
    epochs: Annotated[int, typer.Option(help="Of five steps.")] = 4,
    threads: Annotated[int, typer.Option(help="Cores (0: all).")] = 0,
    out: Annotated[Path, typer.Option(help="Rows are appended here.")] = Path("recipe.jsonl"),
) -> None:
    """Train, measure, write."""
    study = Study(model, threads)
    for number, text in enumerate(tries):
        for row in run(study, Try.parse(text), epochs, number, 0.0):
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
            print(json.dumps(row, ensure_ascii=False), flush=True)


if __name__ == "__main__":
    typer.run(main)
