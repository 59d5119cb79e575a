"""Answers to schemas from an engine in this process: alone, together, preempted; and masks, timed.

Knows the loop only. Invariant: every answer is greedy, so it may not depend on its neighbours.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import jsonschema
import torch

from benchmarks.structured.schemas import Schema
from tandem.build import build_loop, resolve_model
from tandem.config import CacheConfig, ModelConfig, SchedulingConfig, Settings
from tandem.core.plan import Draw
from tandem.core.request import Request
from tandem.core.sampling import SamplingParams
from tandem.core.sequence import FinishReason
from tandem.model.grammars import Grammars
from tandem.services.answering.grammars import of_schema
from tandem.services.answering.tokenizer import Tokenizer

ASKED = "Make up an example that fits this JSON schema. Answer with the JSON only.\n"


@dataclass(frozen=True, slots=True)
class Answered:
    """The text of an answer and its tokens; `ended` is False where its length cut it."""

    text: str
    tokens: tuple[int, ...]
    ended: bool


class Writer:
    """An engine with its tokenizer; `kv_bytes` of 0 is what the engine takes by itself."""

    def __init__(self, model: str, *, kv_bytes: int = 0, policy: str = "unified") -> None:
        self._settings = resolve_model(
            Settings(
                model=ModelConfig(model=model),
                cache=CacheConfig(memory_bytes=kv_bytes),
                scheduling=SchedulingConfig(policy=policy, max_sequences=32, accustom_s=0.0),
            )
        )
        self._loop = build_loop(self._settings)
        self._tokenizer = Tokenizer.load(self._settings.model.model)
        self._names = count()

    @property
    def preemptions(self) -> int:
        """Of requests so far."""
        return self._loop.stats().preemptions

    def answers(self, schemas: Sequence[Schema], max_tokens: int) -> list[Answered]:
        """One answer a schema, all of them in one continuous batch."""
        names = [f"schema-{next(self._names)}" for _ in schemas]
        for name, schema in zip(names, schemas, strict=True):
            asked = [{"role": "user", "content": ASKED + json.dumps(schema)}]
            prompt = self._tokenizer.encode_chat(asked)
            sampling = SamplingParams(
                max_tokens=max_tokens, temperature=0.0, grammar=of_schema(schema, name)
            )
            self._loop.read_request(Request(name, prompt, sampling))()
        tokens: dict[str, list[int]] = {name: [] for name in names}
        ended: dict[str, bool] = {}
        while len(ended) < len(names):
            for event in self._loop.step():
                tokens[event.request_id] += event.tokens
                if event.finish_reason is not None:
                    if event.error is not None:
                        raise RuntimeError(f"{event.request_id}: {event.error}")
                    ended[event.request_id] = event.finish_reason is FinishReason.STOP
        return [
            Answered(self._tokenizer.decode(tokens[name]), tuple(tokens[name]), ended[name])
            for name in names
        ]

    def mask_microseconds(
        self, schemas: Sequence[Schema], answers: Sequence[Answered], rows: int
    ) -> dict[str, float]:
        """What the masks of the answers cost a row, in batches of so many rows: to follow the
        grammar, make the mask and apply it. The grammars are new to the object that does it."""
        info = self._loop.info
        grammars = Grammars(self._settings.model.model, info.vocab_size, info.eos_token_ids)
        params = [SamplingParams(grammar=of_schema(schema, "schema")) for schema in schemas]
        scores, spent = torch.randn(rows, info.vocab_size), []
        for begin in range(0, len(answers) - rows + 1, rows):
            some = range(begin, begin + rows)
            for at in some:
                grammar = params[at].grammar
                assert grammar is not None
                grammars.compile(grammar)
            for place in range(min(len(answers[at].tokens) for at in some)):
                draws = [Draw(at, 0, place, params[at], 0, answers[at].tokens[:place])
                         for at in some]  # fmt: skip
                fresh = scores.clone()
                began_s = time.perf_counter()
                problems = grammars.restrict(fresh, draws)
                spent.append(1e6 * (time.perf_counter() - began_s) / rows)
                if problems:
                    raise RuntimeError(str(problems))
        spent.sort()
        places = {"median": 0.5, "p95": 0.95, "p99": 0.99}
        shares = {name: spent[int(share * len(spent))] for name, share in places.items()}
        return {"rows": rows, "masks": len(spent) * rows, "mean": sum(spent) / len(spent), **shares}


def wrong(schema: Schema, answered: Answered) -> str | None:
    """Why a finished answer does not match its schema; None if it does, or was cut."""
    if not answered.ended:
        return None
    checker = jsonschema.Draft202012Validator(
        schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    try:
        checker.validate(json.loads(answered.text))
    except (ValueError, jsonschema.ValidationError) as error:
        return f"{answered.text[:200]}: {str(error)[:200]}"
    return None


def different(some: Sequence[Answered], others: Sequence[Answered]) -> list[int]:
    """The places at which two series have other tokens."""
    pairs = zip(some, others, strict=True)
    return [place for place, (one, other) in enumerate(pairs) if one.tokens != other.tokens]


def cut(answers: Sequence[Answered]) -> int:
    """How many were cut by their length."""
    return sum(not each.ended for each in answers)
