"""Use cases chat and complete: text in, a stream of text deltas out.

Turns a validated ask into core requests, follows their events and ends choices at stop strings.
Knows neither HTTP nor JSON. Invariant: whichever way a stream ends (finished, failed, closed,
cancelled), nothing of it keeps running in the engine.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from tandem.core.errors import InvalidRequest
from tandem.core.learning import Messages, PromptTokens, Receipt
from tandem.core.request import Request
from tandem.core.sampling import SamplingParams
from tandem.core.slo import Slo, WorkClass
from tandem.services.answering.answer import Answer, Tools
from tandem.services.answering.answer_parts import NO_TOOLS, AnswerReader, Calling, reader_of
from tandem.services.answering.expectation import predictions
from tandem.services.answering.forcing import grammar_of_answer
from tandem.services.answering.models import BASE_LABEL, Models, Pin, ServedModel, pinned_to
from tandem.services.answering.receipts import Draft
from tandem.services.auth import Caller
from tandem.services.tasks import uninterrupted

_SEED_BITS = 63
_ENCODE_IN_THREAD_CHARS = 20_000
_ENCODE_ALONE_CHARS = 1_000_000
_ENCODE_MOST_CHARS = 2_000_000
_TURN_CHARS = 50  # that a chat template may add
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Options:
    """What a client asks for besides the prompt, already validated field by field.

    `max_tokens` is None for "as many as fit", 0 (with `echo`) for the prompt alone; `seed` is
    None for a random one. `sampling.max_tokens` and `sampling.seed` are filled in here. `ttft_slo`
    and `tpot_slo`, in seconds, are the objectives of the client or of its key (None: others').
    `caller` salts the KV cache and owns the receipt, which `receipt` False keeps from being made;
    `user` is the client's own word for a person. `pinned` answers, if given, instead of the current
    version of its adapter. `batch` is the job whose line this is. Two say how a rendered chat ends,
    `calling` which tools its answer may call. With `ceiling`, more `max_tokens` than fit are as
    many as fit.
    """

    model: str
    sampling: SamplingParams
    max_tokens: int | None
    seed: int | None = None
    n: int = 1
    stops: tuple[str, ...] = ()
    echo: bool = False
    priority: int = 0
    ttft_slo: float | None = None
    tpot_slo: float | None = None
    caller: Caller = field(default_factory=Caller)
    user: str = ""
    receipt: bool = True
    work_class: WorkClass = WorkClass.ONLINE
    pinned: Pin | None = None
    batch: str = ""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    calling: Calling = NO_TOOLS
    ceiling: bool = False


class Generation:
    """Answers chats and completions over one engine, whose policy may know `priorities`."""

    def __init__(
        self,
        tools: Tools,
        models: Models,
        *,
        max_choices: int,
        rng: random.Random,
        priorities: bool = False,
    ) -> None:
        self._tools = tools
        self._tokenizer = tools.tokenizer
        self._models = models
        self._max_choices = max_choices
        self._rng = rng
        self._priorities = priorities
        self._alone = asyncio.Lock()

    async def chat(
        self, messages: Sequence[Mapping[str, Any]], options: Options, prefix: str = "chatcmpl-"
    ) -> Answer:
        """Prepare the answer to a conversation; its id begins with `prefix`. Raises as `complete`
        does."""
        arrival_s = self._tools.clock.now()
        model = pinned_to(await self._models.resolve(options.model, options.caller), options.pinned)
        self._check(options, 1)
        self._refuse_many(len(messages), "messages")
        turns, chars = [turn["content"] for turn in messages], sum(map(_chars, messages))
        await self._refuse_long("".join(turns), "messages", options, chars)
        prompt = await self.encode_chat(
            messages,
            add_generation_prompt=options.add_generation_prompt,
            continue_final_message=options.continue_final_message,
            tools=options.calling.tools,
        )
        draft = self._draft(prefix, model, options, tuple(dict(turn) for turn in messages))
        before, sampling = self._before(prompt, messages, options), options.sampling
        reader = reader_of(self._tokenizer.format, options.calling, before, self._call_id)
        form, special = self._tokenizer.format, self._tokenizer.special_token
        grammar = grammar_of_answer(form, options.calling, before, special, sampling.grammar)
        options = replace(options, sampling=replace(sampling, grammar=grammar))
        return self._answer(draft, model, [prompt], options, arrival_s, reader)

    def _before(
        self, prompt: tuple[int, ...], messages: Sequence[Mapping[str, Any]], options: Options
    ) -> str:
        """What there is of an answer before it begins; or all of the prompt, if the response
        template, which finds that in it, is the tokenizer's own."""
        if self._tokenizer.format.shipped is not None:
            return self._tokenizer.markers.decode(prompt)
        if options.continue_final_message:
            return str(messages[-1]["content"])
        return self._tokenizer.opening if options.add_generation_prompt else ""

    def _call_id(self) -> str:
        return f"call_{self._rng.getrandbits(96):024x}"

    async def complete(self, prompts: Sequence[str | tuple[int, ...]], options: Options) -> Answer:
        """Prepare the continuation of one or several prompts, each text or token ids.

        Choice `i * n + k` is the k-th of prompt i. Raises `InvalidRequest`, `NotFound`,
        `Overloaded`.
        """
        arrival_s = self._tools.clock.now()
        model = pinned_to(await self._models.resolve(options.model, options.caller), options.pinned)
        self._check(options, len(prompts))  # before any of them is encoded
        for prompt in prompts:  # nor is one that cannot fit
            if isinstance(prompt, str):
                await self._refuse_long(prompt, "prompt", options)
            else:
                self._refuse_many(len(prompt), "prompt")
        encoded = [await self._encode(prompt) for prompt in prompts]
        texts = tuple(
            prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt)
            for prompt in prompts
        )
        draft = self._draft("cmpl-", model, options, prompts=texts)
        return self._answer(draft, model, encoded, options, arrival_s)

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> tuple[int, ...]:
        """Token ids of a rendered conversation; long ones are encoded beside the event loop."""
        encode = partial(
            self._tokenizer.encode_chat,
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
        )
        chars = sum(map(_chars, messages)) + len(str(tools))
        return await self._beside(chars + _TURN_CHARS * len(messages), "messages", encode)

    async def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """Token ids of a text; long texts are encoded beside the event loop."""
        encode = partial(self._tokenizer.encode, text, add_special_tokens=add_special_tokens)
        return await self._beside(len(text), "prompt", encode)

    async def _beside(self, chars: int, param: str, work: Callable[[], Result]) -> Result:
        """The result of `work` on so many characters, beside the event loop if they are many; of
        very many one at a time, because their tokens take a hundred times as much memory. Raises
        `InvalidRequest` for more than that."""
        if chars > _ENCODE_MOST_CHARS:
            raise InvalidRequest(
                f"{chars} characters are more than are tokenised at once ({_ENCODE_MOST_CHARS}); "
                "send them in parts",
                param=param,
            )
        if chars < _ENCODE_IN_THREAD_CHARS:
            return work()
        if chars < _ENCODE_ALONE_CHARS:
            return await asyncio.to_thread(work)
        async with self._alone:  # until the thread ends, whoever waits for it
            return await uninterrupted(asyncio.to_thread(work))

    async def _refuse_long(self, text: str, param: str, options: Options, chars: int = 0) -> None:
        """Raise `InvalidRequest` for a text that has too many tokens by its length already, and
        `Overloaded` for a long one that no queue would take. `chars` are those of the text and of
        what a chat template may leave out."""
        limit = self._tools.client.info.max_model_len
        if max(len(text), chars) < max(limit, _ENCODE_IN_THREAD_CHARS):
            return
        self._tools.queue(options.work_class).check()
        if await asyncio.to_thread(self._tokenizer.exceeds, text, limit):
            raise _too_long(limit, f"your {param} has more ({len(text)} characters)", param)

    def _refuse_many(self, number: int, param: str) -> None:
        """The same for so many things of which each has a token at least."""
        limit = self._tools.client.info.max_model_len
        if number >= limit:
            raise _too_long(limit, f"your {param} resulted in {number} tokens or more", param)

    def tokenizer_description(self) -> dict[str, Any]:
        """See `Tokenizer.description`."""
        limit = self._tools.client.info.max_model_len
        return {**self._tokenizer.description(), "model_max_length": limit}

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of token ids. Raises `InvalidRequest` for ids outside the vocabulary."""
        self.check_ids(tokens, "tokens")
        return self._tokenizer.decode(tokens)

    def check_ids(self, tokens: Sequence[int], param: str) -> None:
        """Raise `InvalidRequest` if an id is outside the model's vocabulary."""
        size = self._tools.client.info.vocab_size
        for token in tokens:
            if not 0 <= token < size:
                raise InvalidRequest(
                    f"{param}: token id {token} is outside of the vocabulary (0 to {size - 1})",
                    param=param,
                )

    def _draft(
        self,
        prefix: str,
        model: ServedModel,
        options: Options,
        messages: Messages = (),
        prompts: tuple[str, ...] = (),
    ) -> Draft:
        seed = self._rng.getrandbits(_SEED_BITS) if options.seed is None else options.seed
        sampling = {
            "seed": seed % (1 << _SEED_BITS),
            "temperature": options.sampling.temperature,
            "top_p": options.sampling.top_p,
            "max_tokens": options.max_tokens,
            "n": options.n,
        }
        receipt = Receipt(
            completion_id=f"{prefix}{self._rng.getrandbits(96):024x}",
            created_s=self._tools.receipts.now(),
            tenant=options.caller.tenant,
            adapter=None if model.checkpoint else model.name,
            version="",
            messages=messages,
            prompt="",
            choices=(),
            sampling=sampling,
            user=options.user,
        )
        return Draft(receipt, prompts)

    def _answer(
        self,
        draft: Draft,
        model: ServedModel,
        prompts: Sequence[tuple[int, ...]],
        options: Options,
        arrival_s: float,
        reader: Callable[[], AnswerReader] | None = None,
    ) -> Answer:
        answer_id, param = draft.receipt.completion_id, "prompt" if draft.prompts else "messages"
        sampling = replace(
            options.sampling,
            seed=draft.receipt.sampling["seed"],
            prompt_logprobs=options.sampling.logprobs if options.echo else None,
        )
        made: list[Request] = []
        for place, prompt in enumerate(prompts):
            limit, asked = model.max_model_len, options.max_tokens
            if options.ceiling and asked is not None:
                asked = min(asked, max(1, limit - len(prompt)))
            budget = _output_budget(len(prompt), asked, limit, param)
            bounded = replace(sampling, max_tokens=budget)
            if options.seed is None:  # equal prompts are drawn apart
                bounded = replace(bounded, seed=(sampling.seed + place) % (1 << _SEED_BITS))
            made.append(self._request(f"{answer_id}-{place}", model, prompt, options, bounded))
        prompt_only = options.max_tokens == 0
        lengths = None if prompt_only else self._tools.lengths
        predicted = predictions(lengths, draft, model, made, options.batch)
        requests = [replace(request, arrival_s=arrival_s) for request in made]
        for place, known in enumerate(predicted):
            requests[place] = replace(requests[place], length=known.forecast, wants_state=True)
        tokens = PromptTokens(self._tokenizer.identity, tuple(prompts))
        draft = replace(draft, receipt=replace(draft.receipt, prompt_tokens=tokens))
        return Answer(
            answer_id,
            model,
            requests,
            self._tools,
            stops=options.stops,
            echoes=draft.prompts if options.echo else None,
            prompt_only=prompt_only,
            draft=draft if options.receipt and not prompt_only else None,
            held=self._models.held(model),
            predicted=predicted,
            reader=reader,
        )

    def _request(
        self,
        request_id: str,
        model: ServedModel,
        prompt: tuple[int, ...],
        options: Options,
        sampling: SamplingParams,
    ) -> Request:
        return Request(
            request_id=request_id,
            prompt=prompt,
            sampling=sampling,
            n=options.n,
            adapter=model.adapter.name if model.adapter else None,
            or_base=self._models.or_base(model),
            tenant=options.caller.tenant,
            work_class=options.work_class,
            priority=options.priority,
            slo=self._objective(model, options),
        )

    def _objective(self, model: ServedModel, options: Options) -> Slo | None:
        """Each objective: the client's, else its key's, else its adapter's; None if both are the
        server's."""
        objectives = self._tools.objectives
        adapter = model.name if model.adapter else None
        found = objectives.of(adapter or BASE_LABEL, options.ttft_slo, options.tpot_slo)
        return None if found == objectives.default else found

    def _check(self, options: Options, num_prompts: int) -> None:
        choices = options.n * num_prompts
        if choices > self._max_choices:
            each = f" for each of {num_prompts} prompts" if num_prompts > 1 else ""
            raise InvalidRequest(
                f"n={options.n}{each} asks for {choices} choices; this server makes at most "
                f"{self._max_choices} in one request (--max-n)",
                param="n",
            )
        if options.priority and not self._priorities:
            raise InvalidRequest(
                "this server's policy knows no 'priority': leave it out, or start the server with "
                "--policy priority",
                param="priority",
                code="unsupported_parameter",
            )
        self.check_ids(options.sampling.stop_token_ids, "stop_token_ids")
        self.check_ids(list(options.sampling.logit_bias), "logit_bias")

    async def _encode(self, prompt: str | tuple[int, ...]) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return await self.encode(prompt, add_special_tokens=True)
        self.check_ids(prompt, "prompt")
        return prompt


def _chars(turn: Mapping[str, Any]) -> int:
    """Characters of all that a chat template may write of a turn."""
    return sum(len(value if isinstance(value, str) else str(value)) for value in turn.values())


def _output_budget(prompt_tokens: int, asked: int | None, limit: int, param: str) -> int:
    """Tokens one choice may generate. Raises `InvalidRequest` that says the numbers."""
    if prompt_tokens == 0:
        raise InvalidRequest("the prompt has no tokens; send at least one", param=param)
    room = limit - prompt_tokens
    needed = 1 if asked is None else max(asked, 1)  # a forward pass always yields a token
    if room < 1:
        raise _too_long(limit, f"your {param} resulted in {prompt_tokens} tokens", param)
    if needed > room:
        told = (
            f"you requested {prompt_tokens + needed} tokens ({prompt_tokens} in the {param}, "
            f"{needed} in the completion)"
        )
        raise _too_long(limit, told, "max_tokens")
    return room if asked is None else needed


def _too_long(limit: int, told: str, param: str) -> InvalidRequest:
    """In OpenAI's words, by which clients know that they may cut the conversation."""
    where = "messages or completion" if param != "prompt" else "prompt or completion"
    return InvalidRequest(
        f"This model's maximum context length is {limit} tokens. However, {told}. Please reduce "
        f"the length of the {where}.",
        param=param,
        code="context_length_exceeded",
    )
