"""Log-probabilities of completions under models that do not change, each computed once.

The base model and every version are named by their content, so what is known of them stays true
for ever and is kept in the store. Invariant: a value is only kept under the content that it was
computed with.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tandem.core.errors import TandemError
from tandem.core.ports import EngineClient
from tandem.core.training import Role, ScoreRequest, TrainingSequence
from tandem.core.version import AdapterVersion
from tandem.services.tasks import together
from tandem.store import Store, references

_AT_ONCE = 16


class NotFinite(TandemError):
    """A model gives a completion no finite log-probability; the sample is unusable."""


@dataclass(frozen=True, slots=True)
class Scored:
    """A completion to score: `tokens[prompt_tokens:]`."""

    tokens: tuple[int, ...]
    prompt_tokens: int

    @property
    def completion_tokens(self) -> int:
        """Number of tokens that are scored."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def key(self) -> str:
        """Names the content of it."""
        text = f"{self.prompt_tokens}:{','.join(map(str, self.tokens))}"
        return hashlib.sha256(text.encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class Model:
    """A model that scores: `adapter` is the engine's name of it (None: base), `content` what
    identifies it for ever."""

    adapter: str | None
    content: str


class References:
    """Scores under the base model and under loaded versions, through the store's cache."""

    def __init__(self, client: EngineClient, store: Store) -> None:
        self._client = client
        self._store = store
        self._numbers = itertools.count(1)

    @property
    def base(self) -> Model:
        """The base model. Raises `EngineDead` before the engine was ready."""
        info = self._client.info
        return Model(None, f"base:{info.weights_hash}:{info.dtype}")

    def version(self, name: str, version: AdapterVersion) -> Model:
        """A version that is loaded under `name`, upon the base. Raises as `base` does."""
        return Model(name, f"{version.content_hash}@{self.base.content}")

    async def scores(self, model: Model, wanted: Sequence[Scored]) -> list[float]:
        """Summed log-probabilities of `wanted`, in order; not a number where none is finite.

        Raises what `EngineClient.score` does.
        """
        keys = [item.key for item in wanted]
        known = dict(await self._store.read(references.get, model.content, list(set(keys))))
        missing = {key: item for key, item in zip(keys, wanted, strict=True) if key not in known}
        computed = await self._compute(model, missing)
        finite = {key: value for key, value in computed.items() if math.isfinite(value)}
        if finite:
            await self._store.write(references.put, model.content, finite)
        known.update(computed)
        return [known[key] for key in keys]

    async def under_trainer(self, trainer: str, wanted: Sequence[Scored]) -> list[float]:
        """As `scores`, under the working parameters of `trainer` as they are: nothing is kept."""
        return await self._ask(wanted, trainer=trainer)

    async def fill(
        self, model: Model, batch: Sequence[TrainingSequence], *, targets: bool = False
    ) -> tuple[TrainingSequence, ...]:
        """A micro-batch with its reference log-probabilities. Answers to imitate have them only if
        `targets`, and where they are finite: they are trained without.

        Raises `NotFinite`, and what `EngineClient.score` does.
        """
        if not targets and all(sequence.role is Role.TARGET for sequence in batch):
            return tuple(batch)
        wanted = [Scored(sequence.tokens, sequence.prompt_tokens) for sequence in batch]
        values = await self.scores(model, wanted)
        filled = []
        for sequence, value in zip(batch, values, strict=True):
            if math.isfinite(value):
                filled.append(replace(sequence, reference=value))
            elif sequence.role is Role.TARGET:
                filled.append(sequence)
            else:
                raise NotFinite("the reference model gives an answer no finite log-probability")
        return tuple(filled)

    async def _compute(self, model: Model, missing: Mapping[str, Scored]) -> dict[str, float]:
        values = await self._ask(list(missing.values()), adapter=model.adapter)
        return dict(zip(missing, values, strict=True))

    async def _ask(
        self, wanted: Sequence[Scored], *, adapter: str | None = None, trainer: str | None = None
    ) -> list[float]:
        limit = asyncio.Semaphore(_AT_ONCE)

        async def one(item: Scored) -> float:
            async with limit:
                name = f"score-{next(self._numbers)}"
                request = ScoreRequest(name, item.tokens, item.prompt_tokens, adapter, trainer)
                value = (await self._client.score(request)).logprob
                return value if math.isfinite(value) else math.nan

        return await together(one(item) for item in wanted)
