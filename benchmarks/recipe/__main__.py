"""What a recipe does to a real chat model, epoch by epoch: the taste, and what is left of the rest.

    python -m benchmarks recipe --try "pirate dpo 40 1e-3 5 3" --try "json sft 12 1e-3 5 9"
    python -m benchmarks recipe                                # the table of the rows

A try is `TASTE KIND SAMPLES LEARNING_RATE RPO_ALPHA EPOCHS`; kinds are sft, dpo and kto (half of
the answers liked, half of the plain ones disliked). It is trained as the product trains a first
version, with nothing that would stop it, and what the gate reads is read after each epoch. One line
of JSON for each epoch goes to `--out`.
"""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer

from benchmarks.recipe.material import HELD, TASTES, TAUGHT, Taste
from benchmarks.reporting.machine import describe, slug
from tandem.adapters.files import inspect_adapter
from tandem.core.sampling import SamplingParams
from tandem.core.training import ScoreRequest, TrainerSpec
from tandem.llm import LLM, Example
from tandem.services.learning.answer_faults import AnswerText, fault, overlap
from tandem.services.learning.answers import ANSWER_TOKENS, COMPARED_TOKENS
from tandem.services.learning.canary import read_canary
from tandem.services.learning.gate import Bounds
from tandem.services.learning.settings import LearningSettings, resolve_settings

RESULTS = Path(__file__).parents[1] / "results" / "recipe.jsonl"
KINDS = ("sft", "dpo", "kto")
_PROBES = 8  # of the prompts that were taught, as the gate reads

_COLUMNS = {
    "taste": "taste",
    "kind": "kind",
    "samples": "samples",
    "learning_rate": "learning rate",
    "rpo_alpha": "`rpo_alpha`",
    "steps": "steps",
    "shows": "shows the taste",
    "shows_canary": "on canary prompts",
    "broken": "broken",
    "read": "of",
    "kept": "kept",
    "drift": "of the allowed drift",
    "divergence": "divergence",
    "chosen_base": "chosen answers under the base",
    "chosen_gain": "their gain",
    "machine": "machine",
}


@dataclass(frozen=True, slots=True)
class Try:
    """One recipe on one taste."""

    taste: Taste
    kind: str
    samples: int
    learning_rate: float
    rpo_alpha: float
    epochs: int

    @staticmethod
    def parse(text: str) -> Try:
        """See the module. Raises `ValueError` for what cannot be tried."""
        parts = text.split()
        if len(parts) != 6:
            raise ValueError(f"not TASTE KIND SAMPLES LEARNING_RATE RPO_ALPHA EPOCHS: {text!r}")
        name, kind, samples, rate, alpha, epochs = parts
        tastes = {taste.name: taste for taste in TASTES}
        if name not in tastes:
            raise ValueError(f"{name!r} is none of the tastes {', '.join(tastes)}")
        if kind not in KINDS:
            raise ValueError(f"{kind!r} is none of the kinds {', '.join(KINDS)}")
        if not 1 <= int(samples) <= len(TAUGHT) or int(epochs) < 1:
            raise ValueError(f"1 to {len(TAUGHT)} samples and 1 epoch or more: {text!r}")
        if not 0.0 < float(rate) < math.inf or not 0.0 <= float(alpha) < math.inf:
            raise ValueError(f"a learning rate above 0 and an rpo_alpha of 0 or more: {text!r}")
        return Try(tastes[name], kind, int(samples), float(rate), float(alpha), int(epochs))


class Study:
    """The model, and its own answers to all prompts."""

    def __init__(self, model: str, threads: int = 0) -> None:
        self.llm = LLM(model, policy="adainf", threads=threads)
        canary = read_canary("")
        self.canary = [line.messages[-1]["content"] for line in canary.lines]
        self.compared = [line.messages[-1]["content"] for line in canary.compared]
        prompts = [*TAUGHT, *HELD, *self.canary]
        self.own = dict(zip(prompts, self.answers(prompts, None), strict=True))
        self._number = 0

    def answers(self, prompts: Sequence[str], adapter: str | None) -> list[AnswerText]:
        """Greedy ones, as long as the gate's."""
        encoded = [self._prompt(prompt) for prompt in prompts]
        sampling = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS)
        outputs = self.llm.generate(encoded, sampling, adapter=adapter)
        return [
            AnswerText(
                output.choices[0].text.strip(),
                len(output.choices[0].tokens),
                output.choices[0].finish_reason == "stop",
            )
            for output in outputs
        ]

    def _prompt(self, text: str) -> list[int]:
        return list(self.llm.tokenizer.encode_chat([{"role": "user", "content": text}]))

    def _begun(self, answer: str) -> list[int]:
        return list(self.llm.tokenizer.encode(answer, add_special_tokens=False))[:COMPARED_TOKENS]

    def logprob(self, pairs: Sequence[tuple[str, str]], adapter: str | None) -> float:
        """A token, of the beginnings of answers to prompts, in the mean over the pairs; an empty
        answer counts for none."""
        found = []
        for prompt, answer in pairs:
            before, tokens = self._prompt(prompt), self._begun(answer)
            if not tokens:
                continue
            self._number += 1
            name = f"recipe-{self._number}"
            request = ScoreRequest(name, tuple(before + tokens), len(before), adapter=adapter)
            teaching = self.llm._loop.teaching
            teaching.add_score(request)
            while not (ended := teaching.take_learned()):
                self.llm._loop.step()
            found.append(float(ended[0].logprob) / len(tokens))
        return fmean(found) if found else math.nan

    def examples(self, tried: Try) -> list[Example]:
        """Those of the try."""
        found = []
        for at, prompt in enumerate(TAUGHT[: tried.samples]):
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

    def epochs(self, tried: Try, name: str) -> Iterator[tuple[list[float], float]]:
        """The losses and the seconds of each epoch, after which adapter `name` is served. One
        trainer makes them all, as in the product, so that the optimiser's state lasts."""
        teaching, adapters = self.llm._loop.teaching, self.llm._loop.adapters
        own = {"learning_rate": tried.learning_rate, "rpo_alpha": tried.rpo_alpha, "epochs": 1}
        settings = resolve_settings(LearningSettings(), own)
        encoded = self.llm._encode(self.examples(tried), settings)
        teaching.open_trainer(TrainerSpec(name, settings.lora, settings.optimizer()))
        try:
            with tempfile.TemporaryDirectory() as directory:
                for epoch in range(tried.epochs):
                    began_s = time.monotonic()
                    turn = epoch * settings.batch_samples // 2 % len(encoded)
                    order = [*encoded[turn:], *encoded[:turn]]
                    outcomes = self.llm._train(name, order, settings)
                    snapshot = teaching.snapshot_trainer(name)
                    path = Path(directory) / str(epoch)
                    snapshot.write(str(path))
                    files = inspect_adapter(str(path))
                    adapters.adopt(snapshot, name, str(files.path), files.content_hash)
                    yield [each.loss for each in outcomes], time.monotonic() - began_s
        finally:
            teaching.close_trainer(name)
            teaching.take_learned()

    def measure(self, tried: Try, name: str) -> dict[str, Any]:
        """What adapter `name` answers, and what it did to the likelihood of answers."""
        read = [*self.canary, *TAUGHT[: tried.samples][:_PROBES]]
        prompts = [*read, *HELD]
        said = dict(zip(prompts, self.answers(prompts, name), strict=True))
        faults = [fault(said[prompt], self.own[prompt]) for prompt in read]
        trusted = [(prompt, self.own[prompt].text) for prompt in self.compared]
        spoken = [(prompt, said[prompt].text) for prompt in self.compared]
        asked = [(prompt, tried.taste.turn(self.own[prompt].text)) for prompt in HELD]
        base = self.logprob(trusted, None)
        return {
            "shows": fmean(tried.taste.shows(said[prompt].text) for prompt in HELD),
            "shows_canary": fmean(tried.taste.shows(said[prompt].text) for prompt in self.canary),
            "broken": sum(each is not None for each in faults),
            "read": len(faults),
            "kinds": sorted({each for each in faults if each}),
            "kept": fmean(
                overlap(self._text(said[prompt]), self._text(self.own[prompt]))
                for prompt in self.compared
            ),
            "drift": (base - self.logprob(trusted, name)) / Bounds().quality_drop,
            "divergence": base - self.logprob(spoken, None),
            "chosen_base": self.logprob(asked, None),
            "chosen_gain": self.logprob(asked, name) - self.logprob(asked, None),
            "example": said[HELD[0]].text[:160],
            "canary": said[self.canary[0]].text[:160],
        }

    def _text(self, answer: AnswerText) -> str:
        return str(self.llm.tokenizer.decode(self._begun(answer.text)))


def run(study: Study, tried: Try, name: str) -> Iterator[dict[str, Any]]:
    """A row for each epoch."""
    steps = 0
    for losses, trained_s in study.epochs(tried, name):
        steps += len(losses)
        row = {
            "taste": tried.taste.name,
            "kind": tried.kind,
            "samples": tried.samples,
            "learning_rate": tried.learning_rate,
            "rpo_alpha": tried.rpo_alpha,
            "steps": steps,
            "loss": fmean(losses),
            "trained_s": trained_s,
            **study.measure(tried, name),
        }
        yield {
            key: float(f"{value:.3g}")
            if isinstance(value, float) and math.isfinite(value)
            else value
            for key, value in row.items()
        }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Of Markdown."""
    lines = [[*_COLUMNS.values()], ["---"] * len(_COLUMNS)]
    lines += [[_cell(row[key]) for key in _COLUMNS] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def main(
    tries: Annotated[list[str] | None, typer.Option("--try", help="A try (repeatable).")] = None,
    model: Annotated[str, typer.Option(help="Model.")] = "smollm2",
    threads: Annotated[int, typer.Option(help="Cores (0: all).")] = 0,
    out: Annotated[Path, typer.Option(help="Rows are appended here.")] = RESULTS,
) -> None:
    """Train, measure, write; without a try, print the rows as a table."""
    if not tries:
        rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
        print(table(rows))
        return
    try:
        wanted = [Try.parse(text) for text in tries]
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--try") from error
    study = Study(model, threads)
    machine = slug(describe("cpu", threads))
    for number, tried in enumerate(wanted):
        for measured in run(study, tried, f"try{number}"):
            row = {**measured, "machine": machine}
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
            print(json.dumps(row, ensure_ascii=False), flush=True)


if __name__ == "__main__":
    typer.run(main)
