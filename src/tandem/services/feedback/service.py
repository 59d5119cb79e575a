"""Use cases of feedback: take it, look it up, erase it.

Joins a signal with the completion that it is about, makes samples of it and commits both before it
is acknowledged. Knows texts and keys, not HTTP. Invariant: what was acknowledged is stored once,
and a repeated id or idempotency key gives the first answer again.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

from tandem.core.errors import Conflict, InvalidRequest, NotFound, QuotaExceeded, StoreError
from tandem.core.learning import AdapterRecord, Feedback, Receipt, Split
from tandem.services.answering.models import Models
from tandem.services.answering.receipts import Receipts, unknown_completion
from tandem.services.auth import Caller
from tandem.services.feedback.quota import spend_samples
from tandem.services.feedback.samples import make_samples
from tandem.services.feedback.signals import EXPLICIT, Meaning
from tandem.services.feedback.subject import (
    Ask,
    Subject,
    conversation_of,
    meaning_of,
    same_as,
    served_of,
    subject_of,
)
from tandem.services.learning.encode import Encoder
from tandem.services.versions.adapters import check_name
from tandem.services.versions.checkpoints import labelled_adapter
from tandem.store import Connection, Store, adapters, receipts, samples, usage
from tandem.store import feedback as rows
from tandem.store.feedback import Erased, Filter, Stored

_HOUR_S = 3600.0
_FIRST_TRAINED = 20  # conversations; the gate reads held-out samples from 50 pairs on
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Rules:
    """What is taken: `enabled` at all, `auto_adapters` for names that do not exist yet; `held_out`
    is the share of an adapter's conversations, after the first few, that is kept from training."""

    enabled: bool
    auto_adapters: bool
    held_out: float


@dataclass(frozen=True, slots=True)
class Hooks:
    """Who hears of feedback: `arrived` of an adapter's new samples, `announced` of a new adapter,
    `erased` of an adapter whose training has seen what is gone, `stored` of feedback itself."""

    arrived: Callable[[str], None]
    announced: Callable[[str], None]
    erased: Callable[[str], Awaitable[None]]
    stored: Callable[[Feedback], None]


@dataclass(frozen=True, slots=True)
class Sources:
    """What feedback is made from; `encoder` of an adapter says if a sample can be trained on."""

    receipts: Receipts
    models: Models
    encoder: Callable[[str], Awaitable[Encoder]]
    now: Callable[[], float]


@dataclass(frozen=True, slots=True)
class Said:
    """One feedback as a client sent it.

    Either `feedback_id` or `idempotency_key` make it repeatable; `digest` is a hash of the body.
    """

    ask: Ask
    feedback_id: str | None = None
    idempotency_key: str | None = None
    digest: str = ""
    model: str | None = None
    adapter: str | None = None
    weight: float = 1.0
    user: str = ""
    conversation: str = ""
    metadata: dict[str, str] = field(default_factory=dict)


class FeedbackService:
    """Feedback of all callers."""

    def __init__(self, store: Store, sources: Sources, rules: Rules, hooks: Hooks) -> None:
        self._store = store
        self._sources = sources
        self._rules = rules
        self._hooks = hooks

    async def take(self, said: Said, caller: Caller) -> Stored:
        """Store feedback and its samples; returns after the commit.

        Raises `InvalidRequest`, `NotFound` (completion, adapter), `Conflict` (another feedback has
        this id or key), `Forbidden`, or `QuotaExceeded`.
        """
        if not self._rules.enabled:
            raise InvalidRequest(
                "this server does not learn (learning.enabled is off)", code="learning_disabled"
            )
        if (known := await self._store.read(_repeated, said, caller)) is not None:
            return known
        subject = await subject_of(said.ask, self._sources.receipts, caller.tenant)
        adapter = self._adapter_of(said, subject.receipt)
        caller.require_train(adapter)
        meaning = meaning_of(said.ask, subject)
        feedback = self._feedback(said, caller, subject, meaning, adapter)
        made = await asyncio.to_thread(
            make_samples,
            feedback,
            self._rules.held_out,
            await self._sources.encoder(adapter),
            served_of(said.ask, subject, meaning),
        )
        stored = await self._store.write(
            self._add, said, caller, Stored(feedback, made, said.digest), same_as(feedback, subject)
        )
        self._hooks.announced(adapter)
        if stored.samples:
            self._hooks.arrived(adapter)
        self._hooks.stored(stored.feedback)
        return stored

    async def find(self, feedback_id: str, caller: Caller, param: str = "feedback_id") -> Stored:
        """One feedback of this caller (an administrator: of anybody). Raises `NotFound`."""
        stored = await self._store.read(rows.find, feedback_id)
        if stored is None or not (caller.admin or stored.feedback.key_id == caller.tenant):
            raise NotFound(f"there is no feedback '{feedback_id[:100]}'", param=param)
        return stored

    async def listed(
        self, which: Filter, caller: Caller, *, after: str | None, limit: int
    ) -> list[Stored]:
        """Feedback, newest first, older than `after`; that of other keys needs an administrator.

        Raises `NotFound` if there is no `after`.
        """
        _require_own(which, caller)
        if after is not None:
            await self.find(after, caller, "after")
        return await self._store.read(rows.listed, which, after=after, limit=limit)

    async def erase_one(self, feedback_id: str, caller: Caller) -> Erased:
        """Erase one feedback. Raises `NotFound`."""
        stored = await self.find(feedback_id, caller)
        which = Filter(key_id=stored.feedback.key_id)
        return await self._erase(which, feedback_id)

    async def erase(self, which: Filter, caller: Caller) -> Erased:
        """Erase all feedback of a user or about an adapter, and the user's receipts."""
        if which.user is None and which.adapter is None:
            raise InvalidRequest("say whose feedback: 'user', 'adapter' or both", param="user")
        _require_own(which, caller)
        return await self._erase(which)

    async def _erase(self, which: Filter, feedback_id: str | None = None) -> Erased:
        erased = await self._store.write(rows.erase, which, feedback_id=feedback_id)
        hooks = [self._hooks.erased(adapter) for adapter in sorted(erased.in_training)]
        failed = await asyncio.gather(*hooks, return_exceptions=True)
        await self._scrub()  # in any case: who repeats a request finds nothing to erase
        for problem in failed:
            if problem is not None:
                raise problem
        return erased

    async def _scrub(self) -> None:
        """It is erased for everybody who asks; what is left is to take it out of the files."""
        try:
            done = await self._store.scrub()
        except StoreError as error:
            _log.error("what was erased is still in the database's log", exc_info=error)
        else:
            if not done:
                _log.warning("what was erased stays in the database's log until the next erasure")

    def _adapter_of(self, said: Said, receipt: Receipt | None) -> str:
        """Which adapter learns: the named one, else the one that was asked."""
        named = {name for name in (said.adapter, self._adapter_in(said.model)) if name}
        if len(named) > 1:
            raise InvalidRequest("'model' and 'adapter' name two adapters", param="adapter")
        if not named and receipt is not None and receipt.adapter is not None:
            named = {receipt.adapter}
        if not named:
            example = self._sources.models.id_of("NAME")
            raise InvalidRequest(
                "the base model itself and checkpoints do not learn: say which adapter shall, with "
                f"adapter='NAME' or model='{example}'",
                param="adapter",
            )
        name = named.pop()
        check_name(name)
        return name

    def _adapter_in(self, model: str | None) -> str | None:
        if model is None:
            return None
        models = self._sources.models
        if model == models.served_name:
            return None
        adapter = model.removeprefix(models.id_of(""))
        if adapter == model:
            raise NotFound(
                f"the model '{model[:200]}' does not exist; this server's is "
                f"'{models.served_name}'",
                param="model",
                code="model_not_found",
            )
        if (trained := labelled_adapter(adapter)) is not None:
            raise InvalidRequest(
                f"a checkpoint does not learn: if its adapter shall, send adapter='{trained}' "
                "instead",
                param="model",
            )
        return adapter

    def _feedback(
        self, said: Said, caller: Caller, subject: Subject, meaning: Meaning, adapter: str
    ) -> Feedback:
        receipt = subject.receipt
        return Feedback(
            feedback_id=said.feedback_id or f"fb-{uuid.uuid4().hex}",
            created_s=self._sources.now(),
            adapter=adapter,
            kind=meaning.kind,
            messages=subject.messages,
            prompt=subject.prompt,
            chosen=meaning.chosen,
            rejected=meaning.rejected,
            rating=meaning.rating,
            comment=said.ask.comment or "",
            weight=said.weight * meaning.weight,
            signal=said.ask.signal.type.value if said.ask.signal else EXPLICIT,
            conversation=said.conversation or conversation_of(subject),
            user=said.user or (receipt.user if receipt else ""),
            key_id=caller.tenant,
            completion_id=receipt.completion_id if receipt else "",
            version=receipt.version if receipt else "",
            metadata=dict(said.metadata),
        )

    def _add(
        self,
        connection: Connection,
        said: Said,
        caller: Caller,
        stored: Stored,
        same: str | None,
    ) -> Stored:
        """One transaction: seen before? allowed? then the adapter, the feedback, the samples."""
        if (known := _repeated(connection, said, caller)) is not None:
            return known
        feedback = stored.feedback
        about = feedback.completion_id
        if about and receipts.find(connection, about) is None:  # it was erased meanwhile
            raise unknown_completion(about)
        if self._rules.auto_adapters:
            adapters.create(connection, AdapterRecord(feedback.adapter, feedback.created_s))
        elif adapters.find(connection, feedback.adapter) is None:
            raise NotFound(
                f"there is no adapter '{feedback.adapter}' that learns, and this server makes none "
                "by itself (learning.auto_adapters is off): POST /v1/adapters/"
                f"{feedback.adapter} first",
                param="adapter",
            )
        stored = _split(connection, stored)
        _spend(connection, caller, stored)
        rows.add(
            connection,
            feedback,
            stored.samples,
            idempotency_key=said.idempotency_key,
            digest=said.digest,
            same=same,
        )
        return stored


def _repeated(connection: Connection, said: Said, caller: Caller) -> Stored | None:
    """What the same caller sent before under this id or key. Raises `Conflict`."""
    known = None
    if said.feedback_id is not None:
        known = rows.find(connection, said.feedback_id)
    if known is None and said.idempotency_key is not None:
        known = rows.find_by_key(connection, caller.tenant, said.idempotency_key)
    if known is None:
        return None
    if known.feedback.key_id != caller.tenant or known.digest != said.digest:
        raise Conflict(
            "other feedback was sent with this id or idempotency key before; use a new one",
            param="feedback_id",
        )
    return known


def _split(connection: Connection, stored: Stored) -> Stored:
    """Nothing is held out of an adapter's first conversations: there is too little to learn from.

    A conversation stays where it was put first.
    """
    said, made = stored.feedback, stored.samples
    split = samples.split_of(connection, said.adapter, said.conversation)
    if (
        split is None
        and any(sample.split is Split.HELD_OUT for sample in made)
        and not samples.has_conversations(connection, said.adapter, _FIRST_TRAINED)
    ):
        split = Split.TRAIN
    if split is None:
        return stored
    return replace(stored, samples=tuple(replace(sample, split=split) for sample in made))


def _spend(connection: Connection, caller: Caller, stored: Stored) -> None:
    """Count what the key contributes. Raises `QuotaExceeded`; then nothing was counted."""
    now_s = stored.feedback.created_s
    hour, adapter = int(now_s // _HOUR_S), stored.feedback.adapter
    used = usage.add(connection, caller.tenant, f"feedback/{hour}", 1, now_s)
    if 0 < caller.feedback_per_hour < used:
        raise QuotaExceeded(
            f"this API key may send {caller.feedback_per_hour} feedback an hour",
            retry_after_s=(hour + 1) * _HOUR_S - now_s,
        )
    if used == 1:
        usage.delete_before(connection, "feedback/", now_s - 2 * _HOUR_S)
    spend_samples(connection, caller, adapter, len(stored.samples), now_s)


def _require_own(which: Filter, caller: Caller) -> None:
    if which.key_id != caller.tenant:
        caller.require_admin()
