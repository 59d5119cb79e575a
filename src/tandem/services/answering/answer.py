"""One answer while it is made: the events of its requests become deltas, usage and metrics.

Knows which choices still run. Invariant: when `deltas` ends in whichever way, the engine has
been told to stop whatever of this answer did not finish by itself; the last delta comes after the
receipt was committed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass, field, replace

from tandem.core.clock import Clock
from tandem.core.errors import InvalidRequest, OutOfMemory, Overloaded, TandemError
from tandem.core.events import TokenEvent
from tandem.core.learning import ReceiptChoice
from tandem.core.plan import NO_MEMORY, TokenLogprob
from tandem.core.ports import ServingEngine
from tandem.core.request import Request
from tandem.core.sampling import TOO_COMPLEX
from tandem.core.sequence import FinishReason
from tandem.core.slo import Objectives, WorkClass
from tandem.estimators.length_choice import Predicted
from tandem.services.answering.admission_control import AdmissionControl, Ticket
from tandem.services.answering.answer_parts import AnswerReader
from tandem.services.answering.choice import Choice, Delta, TokenText, describe_prompt
from tandem.services.answering.models import BASE_LABEL, ServedModel
from tandem.services.answering.receipts import Draft, Receipts
from tandem.services.answering.tokenizer import Tokenizer
from tandem.services.learning.live import LiveAnswers, Written
from tandem.services.lengths.forecasts import Lengths
from tandem.services.tasks import merge
from tandem.telemetry.metrics import RequestTiming, ServerMetrics, Unmet


class GenerationFailed(TandemError):
    """The engine lives but gave this answer up; the message is its reason."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of an answer; `cached_tokens` are prompt tokens found in the KV cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


def _nobody(label: str) -> None:
    """Hears of an answer when nobody wants to know."""


@dataclass(frozen=True, slots=True)
class Tools:
    """What every answer of a server works with; `admission` bounds the queue of online requests,
    `offline` that of the others. `answered` hears which version writes one, `live` what it says in
    the end, `lengths` how long it was."""

    client: ServingEngine
    tokenizer: Tokenizer
    admission: AdmissionControl
    offline: AdmissionControl
    metrics: ServerMetrics
    clock: Clock
    receipts: Receipts
    answered: Callable[[str], None] = _nobody
    objectives: Objectives = field(default_factory=Objectives)
    live: LiveAnswers = field(default_factory=lambda: LiveAnswers(on=False))
    lengths: Lengths | None = None  # None: nobody predicts them

    def queue(self, work_class: WorkClass) -> AdmissionControl:
        """The bounds of the queue in which such a request waits."""
        return self.offline if work_class is WorkClass.OFFLINE else self.admission


class Answer:
    """The answer to one client request: all choices of all its prompts.

    `reader` makes for each choice what tells reasoning and tool calls from text; None: all is text.
    `deltas` can be iterated once. `adapter` and `usage` are right from the first delta on and
    final after the last. The engine has the model inside `held`. `draft` is the receipt without its
    choices; None keeps none. `predicted` is what was said of each request's length, if anybody did.
    """

    def __init__(  # noqa: PLR0913
        self,
        answer_id: str,
        model: ServedModel,
        requests: Sequence[Request],
        tools: Tools,
        *,
        stops: Sequence[str],
        echoes: Sequence[str] | None,
        prompt_only: bool,
        draft: Draft | None,
        held: AbstractAsyncContextManager[None],
        predicted: Sequence[Predicted] = (),
        reader: Callable[[], AnswerReader] | None = None,
    ) -> None:
        self.id = answer_id
        self.model = model
        self.adapter = BASE_LABEL
        self._tools = tools
        self._draft = draft
        self._held = held
        self._parts = [
            _Part(
                request,
                place * request.n,
                tools,
                stops,
                echoes[place] if echoes is not None else None,
                prompt_only=prompt_only,
                predicted=predicted[place] if predicted else None,
                reader=reader,
            )
            for place, request in enumerate(requests)
        ]

    @property
    def usage(self) -> Usage:
        """Tokens so far, over all prompts and choices."""
        return Usage(
            prompt_tokens=sum(len(part.request.prompt) for part in self._parts),
            completion_tokens=sum(part.output_tokens for part in self._parts),
            cached_tokens=sum(part.cached_tokens for part in self._parts),
        )

    @property
    def prompts(self) -> list[tuple[int, ...]]:
        """Token ids of the prompts, in order."""
        return [part.request.prompt for part in self._parts]

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """What the choices gain, in order of arrival; at least one delta a choice.

        Raises `Overloaded` before any request is sent to the engine, `EngineDead`,
        `GenerationFailed`, `NotFound` or `InvalidRequest` as the engine does.
        """
        tickets, unmet = self._admit(), Unmet.LEFT
        try:
            streams = [self._tools.client.generate(part.request) for part in self._parts]
            async with self._held, aclosing(merge(streams)) as events:
                async for place, event in events:
                    part = self._parts[place]
                    _started(tickets[place], event)
                    if event.tokens:
                        named = self.model.checkpoint or self.model.label
                        self.adapter = named or event.adapter or BASE_LABEL
                        self._tools.answered(self.adapter)
                    gained = await part.take(event)
                    finished = all(part.finished for part in self._parts)
                    if finished:
                        await self._keep_receipt()
                    for delta in gained:
                        yield delta
                    await part.end_stopped()
                    if finished:
                        break
        except InvalidRequest:
            raise
        except Overloaded:
            unmet = Unmet.SHED
            raise
        except Exception:
            unmet = Unmet.FAILED
            raise
        finally:
            _close(tickets)
            for part in self._parts:
                await part.abort(unmet)

    def _admit(self) -> list[Ticket]:
        """One for each prompt."""
        requests = [part.request for part in self._parts]
        queue = self._tools.queue(requests[0].work_class)
        try:
            return queue.admit([len(request.prompt) for request in requests], self._ttft_s())
        except Overloaded:
            for part in self._parts:
                part.shed()
            raise

    def _ttft_s(self) -> float | None:
        """The objective that decides whether a wait is too long; None if any will do: nobody is
        there, or it is more urgent than usual and may not have to wait behind the others."""
        request = self._parts[0].request
        if request.work_class is not WorkClass.ONLINE or request.priority < 0:
            return None
        return (request.slo or self._tools.objectives.default).ttft_s

    async def _keep_receipt(self) -> None:
        if self._draft is not None:
            answers = [part.receipt_choices() for part in self._parts]
            await self._tools.receipts.keep(self._draft.finish(self.adapter, answers))


def _started(ticket: Ticket, event: TokenEvent) -> None:
    """Scores of a prompt come before its first token, and do not count."""
    if event.tokens or event.finish_reason is not None:
        ticket.started()


def _close(tickets: Sequence[Ticket]) -> None:
    for ticket in tickets:
        ticket.close()


class _Part:
    """One prompt of an answer and its `n` choices; choice k has index `first_index + k`."""

    def __init__(
        self,
        request: Request,
        first_index: int,
        tools: Tools,
        stops: Sequence[str],
        echo: str | None,
        *,
        prompt_only: bool,
        predicted: Predicted | None = None,
        reader: Callable[[], AnswerReader] | None,
    ) -> None:
        self.request = request
        self._predicted = predicted
        self.cached_tokens = 0
        self._tools = tools
        self._echo = echo
        self._prompt_only = prompt_only
        self._prompt_entries: tuple[TokenText, ...] = ()
        self._early: list[TokenEvent] = []
        self._scores: list[TokenLogprob] = []
        scored = request.sampling.prompt_logprobs is not None
        self._scores_wanted = len(request.prompt) - 1 if scored else 0
        if scored and not self._scores_wanted:
            self._prompt_entries = describe_prompt(tools.tokenizer, echo or "", request.prompt, ())
        slo = request.slo or tools.objectives.default
        self._timing = RequestTiming(tools.metrics, request.arrival_s, slo, request.work_class)
        self._readers = [reader() for _ in range(request.n)] if reader is not None else []
        self._choices = [
            Choice(
                first_index + k,
                tools.tokenizer,
                context=request.prompt,
                stops=stops,
                min_tokens=request.sampling.min_tokens,
                prefix_chars=len(echo or ""),
                stop_ids=request.sampling.stop_token_ids,
                decoder=tools.tokenizer.markers if reader is not None else None,
            )
            for k in range(request.n)
        ]
        self._begun: set[int] = set()
        self._texts: list[list[str]] = [[] for _ in range(request.n)]
        self._shown: list[list[str]] = [[] for _ in range(request.n)]
        self._reasons: list[str] = [""] * request.n
        self._writers: set[str | None] = set()

    @property
    def finished(self) -> bool:
        """True when no choice can gain anything any more."""
        return all(choice.finished for choice in self._choices)

    @property
    def output_tokens(self) -> int:
        """Tokens generated so far, over all choices."""
        return sum(choice.output_tokens for choice in self._choices)

    def receipt_choices(self) -> list[ReceiptChoice]:
        """What the choices have become, without the echoed prompt."""
        ends = self._tools.client.info.eos_token_ids
        made = []
        for place, choice in enumerate(self._choices):
            text, shown = "".join(self._texts[place]), "".join(self._shown[place])
            kept = ReceiptChoice(choice.index, text, self._reasons[place])
            kept = replace(kept, tokens=choice.served(ends))
            made.append(kept if shown == text else replace(kept, shown=shown))
        return made

    async def take(self, event: TokenEvent) -> list[Delta]:
        """Deltas of one event; tokens wait for the scores of the whole prompt, if asked for.

        The prompt's scores may come in parts, as its chunks are computed.
        """
        if event.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
            if self._choices[event.index].finished:
                return []  # we stopped it ourselves
            if event.error == NO_MEMORY:
                raise OutOfMemory(NO_MEMORY)
            grammar = self.request.sampling.grammar
            if event.error == TOO_COMPLEX and grammar is not None:
                raise InvalidRequest(TOO_COMPLEX, param=grammar.param)
            raise GenerationFailed(event.error or "the server stopped this request; send it again")
        if event.state:
            self._foresee(event.state)
        self._scores.extend(event.prompt_logprobs)
        if event.tokens or event.finish_reason is not None:
            self._early.append(event)
        if len(self._scores) < self._scores_wanted:
            return []
        if self._scores_wanted and not self._prompt_entries:
            self._prompt_entries = await asyncio.to_thread(
                describe_prompt,
                self._tools.tokenizer,
                self._echo or "",
                self.request.prompt,
                self._scores,
            )
        events, self._early = self._early, []
        return [delta for each in events for delta in self._apply(each)]

    async def end_stopped(self) -> None:
        """End in the engine those choices that a stop string has ended here."""
        for index, choice in enumerate(self._choices):
            if choice.stopped_early:
                choice.stopped_early = False
                await self._tools.client.abort(self.request.request_id, index)

    def shed(self) -> None:
        """It was refused because of the load."""
        self._timing.shed(len(self._choices))

    async def abort(self, why: Unmet) -> None:
        """End everything of this prompt that still runs in the engine."""
        if not self.finished:
            if not self._choices[0].finished:
                self._show(ended=False)
            self._timing.aborted(sum(not choice.finished for choice in self._choices), why)
            await self._tools.client.abort(self.request.request_id)

    def _foresee(self, state: bytes) -> None:
        """The prompt is computed: its last hidden state may say more of the length."""
        if self._tools.lengths is None or self._predicted is None:
            return
        before = self._predicted.forecast
        self._predicted = self._tools.lengths.refine(self._predicted, state)
        if (length := self._predicted.forecast) is not None and length != before:
            self._tools.client.foresee(self.request.request_id, length)

    def _apply(self, event: TokenEvent) -> list[Delta]:
        choice = self._choices[event.index]
        if choice.finished:
            return []
        self.cached_tokens = max(self.cached_tokens, event.cached_tokens)
        now_s = self._tools.clock.now()
        if event.tokens:
            self._writers.add(event.adapter)
            self._timing.tokens(event.index, now_s)
        if self._prompt_only:
            delta = choice.take((), (), event.finish_reason and FinishReason.LENGTH, None)
        else:
            delta = choice.take(event.tokens, event.logprobs, event.finish_reason, event.stop_token)
        self._texts[event.index].append(delta.text)
        if delta.finish_reason is not None:
            self._reasons[event.index] = delta.finish_reason.value
            self._timing.finished(
                event.index, delta.finish_reason, choice.output_tokens, event.times, now_s
            )
            if self._tools.lengths is not None and self._predicted is not None:
                self._tools.lengths.ended(self._predicted, choice.output_tokens)
            if event.index == 0:
                self._show(ended=event.finish_reason is FinishReason.STOP)
        if self._readers:
            read = self._readers[event.index].read(delta)
            self._shown[event.index] += [part.text for part in read]
            return read
        return [*self._opening(event.index, choice), delta]

    def _show(self, *, ended: bool) -> None:
        """The first choice is over; those who watch read it, if one version wrote it."""
        if len(self._writers) == 1 and not self._prompt_only:
            [label] = self._writers
            text, tokens = "".join(self._texts[0]), self._choices[0].output_tokens
            self._tools.live.finished(Written(label, self.request, text, tokens, ended))

    def _opening(self, index: int, choice: Choice) -> list[Delta]:
        """The echoed prompt, once for each choice."""
        if self._echo is None or index in self._begun:
            return []
        self._begun.add(index)
        return [Delta(choice.index, self._echo, self._prompt_entries)]
