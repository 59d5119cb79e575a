"""Says how long answers will be, and learns from those that have ended.

Predicting takes a fraction of a millisecond and happens where the request is made; networks are
made in a thread, and what was learned from is written to the store in groups. Knows neither HTTP
nor the engine's queue. Invariant: nothing here can fail or delay an answer, and a server that
starts again knows what it knew, but for the last `_EVERY_S` seconds if it was killed.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

from tandem.core.errors import StoreError
from tandem.core.lengths import Asked
from tandem.estimators.learned_length import Projection, by_state, by_text, learned
from tandem.estimators.length_choice import LengthChoice, Predicted
from tandem.estimators.output_length import by_batch, by_traffic
from tandem.services.lengths.lexicon import Lexicon
from tandem.services.lengths.scores import Scorer
from tandem.store import Store
from tandem.store import lengths as rows
from tandem.telemetry.lengths import LengthMetrics

logger = logging.getLogger(__name__)

_EVERY_S = 5.0
_MOST_UNWRITTEN = 10_000


class Lengths:
    """The forecasts of one server. Without a store nothing outlives it."""

    def __init__(self, metrics: LengthMetrics, store: Store | None = None) -> None:
        self._metrics = metrics
        self._store = store
        self._scorer = Scorer(Lexicon.load())
        self._learned = (by_text(), by_state())
        self._choice = LengthChoice((by_batch(), by_traffic(), *self._learned))
        self._projection = Projection()
        self._unwritten: list[tuple[Asked, int]] = []
        self._model = ""
        self._working: asyncio.Task[None] | None = None

    def scores(self, text: str) -> tuple[float, ...]:
        """Of what a user says, for `Asked`."""
        return self._scorer.score(text).features

    def predict(self, asked: Asked) -> Predicted:
        """What is known of an answer that is about to begin."""
        predicted = self._choice.predict(asked)
        self._metrics.predicted(_source(predicted))
        return predicted

    def refine(self, predicted: Predicted, state: bytes) -> Predicted:
        """What is known once the prompt is computed: its last hidden `state`, in float16."""
        asked = replace(predicted.asked, state=self._projection(state))
        refined = self._choice.predict(asked)
        if refined.forecast is not None and refined.forecast.source != _source(predicted):
            self._metrics.predicted(refined.forecast.source)
        return refined

    def ended(self, predicted: Predicted, output_tokens: int) -> None:
        """An answer has ended by itself or at its limit. One that was cancelled says nothing."""
        self._choice.observe(predicted, output_tokens)
        if self._store is not None and len(self._unwritten) < _MOST_UNWRITTEN:
            self._unwritten.append((predicted.asked, output_tokens))

    async def start(self, model: str) -> None:
        """Remember what is kept of a model (which its weights' hash names), and go on learning."""
        self._model = model
        if self._store is not None:
            try:
                for asked, output_tokens in await self._store.read(rows.recent, model):
                    self._choice.observe(Predicted(asked, {}, None), output_tokens)
            except Exception as error:  # rows that cannot be read are not worth a server
                logger.error("lengths of earlier answers are not known", exc_info=error)
        self._working = asyncio.create_task(self._work())

    async def stop(self) -> None:
        """Write what is not written."""
        if self._working is not None:
            self._working.cancel()
            await asyncio.gather(self._working, return_exceptions=True)
            await self.keep()

    async def keep(self) -> None:
        """Write what has ended since the last time. Does not fail."""
        ended = list(self._unwritten)
        if self._store is None or not ended:
            return
        try:
            await self._store.write(rows.add, self._model, ended)
        except StoreError as error:
            logger.warning("%d lengths of answers are not kept yet: %s", len(ended), error)
        else:
            del self._unwritten[: len(ended)]

    async def learn(self) -> None:
        """Make the networks that are due, one after another, beside the event loop."""
        for each in self._learned:
            for traffic in each.due:
                if found := each.rows(traffic):
                    each.take(traffic, await asyncio.to_thread(learned, found, each.shape))

    def measure(self) -> None:
        """Set the metrics."""
        self._metrics.measured(self._choice.errors())

    async def _work(self) -> None:
        while True:
            try:
                await self.keep()
                await self.learn()
                self.measure()
            except Exception as error:  # forecasts are not worth a server
                logger.error("lengths of answers are not learned", exc_info=error)
            await asyncio.sleep(_EVERY_S)


def _source(predicted: Predicted) -> str:
    return predicted.forecast.source if predicted.forecast is not None else "none"
