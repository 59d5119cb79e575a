"""What an engine has to do: requests at the times of a trace, or a closed loop of them.

Arrival times are a stretch of the trace, scaled to a rate; lengths are the trace's in another
order, so that every window has the trace's mixture, and a rate means the same load everywhere.
Invariant: equal arguments give equal jobs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from random import Random

from tandem.bench.arrivals import replay
from tandem.bench.traces import TraceRecord
from tandem.bench.workload import Limits, PlannedRequest, Shape, plan, traced_shapes
from tandem.core.slo import Slo

# Of a closed loop: more than it can end in its time.
_MOST_CLOSED = 2000


@dataclass(frozen=True)
class Job:
    """One window. Request i arrives at `at_s[i]`; with `at_once`, a closed loop of so many takes
    the requests in order instead, and begins none after `seconds`.

    With `train`, two training steps of two sequences of `sequence_tokens` are queued all the time.
    Requests carry the objectives.
    """

    seconds: float
    at_s: list[float]
    prompt_tokens: list[int]
    output_tokens: list[int]
    vocabulary: int
    seed: int
    at_once: int = 0
    train: bool = False
    sequence_tokens: int = 512
    ttft_slo: float = 1.0
    tpot_slo: float = 0.1

    @property
    def slo(self) -> Slo:
        """The objectives of every request."""
        return Slo(self.ttft_slo, self.tpot_slo)

    def requests(self) -> list[PlannedRequest]:
        """The requests in order, prompts included."""
        shapes = map(Shape, self.prompt_tokens, self.output_tokens)
        return plan(self.at_s, shapes, Limits(), self.vocabulary, self.seed)

    def due_s(self, request: PlannedRequest) -> float:
        """When the answer must have ended if it is to meet both objectives."""
        return request.at_s + self.ttft_slo + (request.output_tokens - 1) * self.tpot_slo


class Workload:
    """Jobs from the records of one trace, for a model of `context` tokens."""

    def __init__(
        self,
        records: Sequence[TraceRecord],
        context: int,
        vocabulary: int,
        seed: int = 0,
        length_scale: float = 0.25,
    ) -> None:
        self._times_s = [record.at_s for record in records if record.at_s is not None]
        assert len(self._times_s) == len(records), "the trace has no times"
        limits = Limits(max_output_tokens=context // 2, length_scale=length_scale)
        self._shapes = [clipped(each, context) for each in traced_shapes(records, limits)]
        Random(seed).shuffle(self._shapes)
        self._vocabulary = vocabulary
        self._seed = seed

    def mean_tokens(self) -> tuple[float, float]:
        """Of a prompt and of an output."""
        count = len(self._shapes)
        return (
            sum(each.prompt_tokens for each in self._shapes) / count,
            sum(each.output_tokens for each in self._shapes) / count,
        )

    def open_loop(self, rate: float, seconds: float, place: int, places: int) -> Job:
        """As many requests as `rate` a second make in `seconds`, at the times of the stretch of
        the trace that begins `place` of `places` along it. Without training and objectives."""
        count = max(2, round(rate * seconds))
        first = place * len(self._times_s) // places
        times_s = self._times_s[first : first + count]
        assert len(times_s) == count, "the trace is shorter than the window"
        return self._job(replay(times_s, rate=rate), seconds, place)

    def closed_loop(self, at_once: int, seconds: float, max_output_tokens: int = 0) -> Job:
        """`at_once` requests at a time for `seconds`; their prompts are in no open loop. Outputs of
        up to `max_output_tokens`, if that is not 0."""
        job = self._job([0.0] * len(self._shapes[:_MOST_CLOSED]), seconds, -1 - at_once)
        longest = max_output_tokens or max(job.output_tokens)
        outputs = [min(each, longest) for each in job.output_tokens]
        return replace(job, at_once=at_once, output_tokens=outputs)

    def _job(self, at_s: list[float], seconds: float, place: int) -> Job:
        # Rounds at the same place of the trace, under other loads, have other lengths.
        first = Random(f"{self._seed}/{place}/{len(at_s)}").randrange(len(self._shapes))
        shapes = list(islice(cycle(self._shapes), first, first + len(at_s)))
        return Job(
            seconds,
            at_s,
            [each.prompt_tokens for each in shapes],
            [each.output_tokens for each in shapes],
            self._vocabulary,
            first + len(self._shapes) * (place + 1),
        )


def clipped(shape: Shape, context: int) -> Shape:
    """With so much of the prompt that prompt and output fit into `context` tokens."""
    return replace(shape, prompt_tokens=min(shape.prompt_tokens, context - shape.output_tokens))
