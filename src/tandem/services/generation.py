"""Use cases chat and complete: text in, a stream of text deltas out.

Turns a validated ask into core requests, follows their events and ends choices at stop strings.
Knows neither HTTP nor JSON. Invariant: whichever way a stream ends (finished, failed, closed,
cancelled), nothing of it keeps running in the engine.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from tandem.core.errors import InvalidRequest
from tandem.core.learning import Messages, PromptTokens, Receipt
from tandem.core.request import Request
from tandem.core.sampling import SamplingParams
from tandem.core.slo import Slo
from tandem.services.answer import Answer, Tools
from tandem.services.models import BASE_LABEL, Models, ServedModel
from tandem.services.receipts import Draft

_SEED_BITS = 63
_ENCODE_IN_THREAD_CHARS = 20_000


@dataclass(frozen=True, slots=True)
class Options:
    """What a client asks for besides the prompt, already validated field by field.

    `max_tokens` is None for "as many as fit", 0 (with `echo`) for the prompt alone; `seed` is
    None for a random one. `sampling.max_tokens` and `sampling.seed` are filled in here. `ttft_slo`
    and `tpot_slo`, in seconds, are the objectives of the client or of its key (None: others').
    `tenant` salts the KV cache and owns the receipt, which `receipt` False keeps from being made;
    `user` is the client's own word for a person.
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
    tenant: str = ""
    user: str = ""
    receipt: bool = True


class Generation:
    """Answers chats and completions over one engine."""

    def __init__(
        self,
        tools: Tools,
        models: Models,
        *,
        max_choices: int,
        rng: random.Random,
    ) -> None:
        self._tools = tools
        self._tokenizer = tools.tokenizer
        self._models = models
        self._max_choices = max_choices
        self._rng = rng

    async def chat(self, messages: Sequence[Mapping[str, str]], options: Options) -> Answer:
        """Prepare the answer to a conversation. Raises `InvalidRequest` or `NotFound`."""
        arrival_s = self._tools.clock.now()
        model = await self._models.resolve(options.model, options.tenant)
        self._check(options, 1)
        prompt = await self.encode_chat(messages)
        draft = self._draft("chatcmpl", model, options, tuple(dict(turn) for turn in messages))
        return self._answer(draft, model, [prompt], options, arrival_s)

    async def complete(self, prompts: Sequence[str | tuple[int, ...]], options: Options) -> Answer:
        """Prepare the continuation of one or several prompts, each text or token ids.

        Choice `i * n + k` is the k-th of prompt i. Raises `InvalidRequest` or `NotFound`.
        """
        arrival_s = self._tools.clock.now()
        model = await self._models.resolve(options.model, options.tenant)
        self._check(options, len(prompts))  # before any of them is encoded
        for prompt in prompts:
            if not isinstance(prompt, str):  # nor are ids decoded that do not fit
                _output_budget(len(prompt), options.max_tokens, model.max_model_len)
        encoded = [await self._encode(prompt) for prompt in prompts]
        texts = tuple(
            prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt)
            for prompt in prompts
        )
        draft = self._draft("cmpl", model, options, prompts=texts)
        return self._answer(draft, model, encoded, options, arrival_s)

    async def encode_chat(
        self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True
    ) -> tuple[int, ...]:
        """Token ids of a rendered conversation; long ones are encoded beside the event loop."""
        encode = partial(
            self._tokenizer.encode_chat, messages, add_generation_prompt=add_generation_prompt
        )
        if sum(len(message["content"]) for message in messages) < _ENCODE_IN_THREAD_CHARS:
            return encode()
        return await asyncio.to_thread(encode)

    async def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """Token ids of a text; long texts are encoded beside the event loop."""
        if len(text) < _ENCODE_IN_THREAD_CHARS:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(
            self._tokenizer.encode, text, add_special_tokens=add_special_tokens
        )

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
            completion_id=f"{prefix}-{self._rng.getrandbits(96):024x}",
            created_s=self._tools.receipts.now(),
            tenant=options.tenant,
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
    ) -> Answer:
        answer_id, seed = draft.receipt.completion_id, draft.receipt.sampling["seed"]
        made = [
            self._request(f"{answer_id}-{place}", model, prompt, options, seed)
            for place, prompt in enumerate(prompts)
        ]
        requests = [replace(request, arrival_s=arrival_s) for request in made]
        tokens = PromptTokens(self._tokenizer.identity, tuple(prompts))
        draft = replace(draft, receipt=replace(draft.receipt, prompt_tokens=tokens))
        prompt_only = options.max_tokens == 0
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
        )

    def _request(
        self,
        request_id: str,
        model: ServedModel,
        prompt: tuple[int, ...],
        options: Options,
        seed: int,
    ) -> Request:
        sampling = replace(
            options.sampling,
            max_tokens=_output_budget(len(prompt), options.max_tokens, model.max_model_len),
            seed=seed,
            prompt_logprobs=options.sampling.logprobs if options.echo else None,
        )
        return Request(
            request_id=request_id,
            prompt=prompt,
            sampling=sampling,
            n=options.n,
            adapter=model.adapter.name if model.adapter else None,
            tenant=options.tenant,
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
        self.check_ids(options.sampling.stop_token_ids, "stop_token_ids")
        self.check_ids(list(options.sampling.logit_bias), "logit_bias")

    async def _encode(self, prompt: str | tuple[int, ...]) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return await self.encode(prompt, add_special_tokens=True)
        self.check_ids(prompt, "prompt")
        return prompt


def _output_budget(prompt_tokens: int, asked: int | None, limit: int) -> int:
    """Tokens one choice may generate. Raises `InvalidRequest` that says the numbers."""
    if prompt_tokens == 0:
        raise InvalidRequest("the prompt has no tokens; send at least one", param="prompt")
    room = limit - prompt_tokens
    needed = 1 if asked is None else max(asked, 1)  # a forward pass always yields a token
    if needed > room:
        raise InvalidRequest(
            f"this model's context is {limit} tokens, but the prompt has {prompt_tokens} and "
            f"{needed} more are asked for; shorten the prompt or lower max_tokens",
            param="messages" if asked is None else "max_tokens",
            code="context_length_exceeded",
        )
    return room if asked is None else needed
