"""Routes of feedback: send it, list it, look it up, erase it.

Knows how feedback looks from outside, not what is learned from it. Invariant: 202 is sent only
after the feedback and its samples were committed.
"""

from __future__ import annotations

import hashlib
import logging
from functools import partial
from typing import Annotated, Any

import msgspec
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from tandem.api.connection import as_json, read_body
from tandem.api.paging import read_limit, read_text
from tandem.api.schemas import PERSON, WORD, Body, Metadata, parse
from tandem.api.surface import Surface
from tandem.api.turns import Messages
from tandem.core.errors import InvalidRequest
from tandem.core.learning import Sample, SampleState
from tandem.services.feedback.service import Said
from tandem.services.feedback.signals import Signal, SignalType
from tandem.services.feedback.subject import Ask
from tandem.store.feedback import Erased, Filter, Stored

logger = logging.getLogger(__name__)

_MOST = 100
_CONDITIONS = ("adapter", "user", "keys")
_MAX_WEIGHT = 10.0
_MAX_SECONDS = 86_400.0
_MOST_CHOICE = 2**31 - 1
_KEY = r"^[A-Za-z0-9._:-]{1,128}$"


def _rating(value: object) -> object:
    if isinstance(value, bool) or (isinstance(value, int | float) and 0 <= value <= 1):
        return value
    raise ValueError("must be true, false or a number from 0 to 1")


def _answer(value: object) -> object:
    if isinstance(value, str) or (type(value) is int and 0 <= value <= _MOST_CHOICE):
        return value
    raise ValueError("must be a text or the index of a choice")


# One message for the whole union; pydantic has one for each of its parts.
Answer = Annotated[int | str, BeforeValidator(_answer)]
Rating = Annotated[bool | float, BeforeValidator(_rating)]


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class Preference(_Part):
    """Two answers: texts, or indexes of the completion's choices."""

    chosen: Answer
    rejected: Answer


class SignalBody(_Part):
    """An implicit signal; see docs/learning.md."""

    type: Annotated[SignalType, Field(strict=False)]
    text: str | None = None
    seconds: Annotated[float, Field(ge=0, le=_MAX_SECONDS)] | None = None


class FeedbackRequest(Body):
    """Body of POST /v1/feedback."""

    feedback_id: Annotated[str, Field(pattern=_KEY)] | None = None
    completion_id: Annotated[str, Field(min_length=1, max_length=128, pattern=WORD)] | None = None
    choice: Annotated[int, Field(ge=0, le=_MOST_CHOICE)] | None = None
    messages: Messages | None = None
    prompt: str | None = None
    completion: str | None = None
    model: Annotated[str, Field(max_length=256)] | None = None
    adapter: Annotated[str, Field(max_length=128)] | None = None
    rating: Rating | None = None
    preference: Preference | None = None
    demonstration: str | None = None
    comment: Annotated[str, Field(min_length=1, max_length=16_384)] | None = None
    signal: SignalBody | None = None
    weight: Annotated[float, Field(gt=0, le=_MAX_WEIGHT)] | None = None
    user: Annotated[str, Field(pattern=PERSON)] | None = None
    conversation: Annotated[str, Field(pattern=PERSON)] | None = None
    metadata: Metadata | None = None


def add_feedback_routes(app: FastAPI, surface: Surface) -> None:
    """Add /v1/feedback."""

    @app.post("/v1/feedback")
    async def send_feedback(request: Request) -> Response:
        """Teach an adapter; 202 when it is stored."""
        raw = await read_body(request, surface.bodies.max_body_bytes)
        key = request.headers.get("idempotency-key")
        said = await surface.bodies.check(raw, partial(_said, raw, key))
        stored = await surface.feedback.take(said, request.state.caller)
        try:
            body = await _with_outlook(surface, stored)
        except Exception as error:  # it is stored: an error would let clients send it again
            logger.warning("cannot tell what becomes of %s: %s", stored.feedback.feedback_id, error)
            body = {**feedback_json(surface, stored), "learning": None}
        return as_json(body, 202)

    @app.get("/v1/feedback")
    async def list_feedback(request: Request) -> Response:
        """Feedback of this key, newest first."""
        limit = read_limit(request, 20, _MOST)
        found = await surface.feedback.listed(
            _filter(request, "state", "limit", "after"),
            request.state.caller,
            after=read_text(request, "after"),
            limit=limit + 1,
        )
        page = [feedback_json(surface, stored) for stored in found[:limit]]
        return as_json({"object": "list", "data": page, "has_more": len(found) > limit})

    @app.delete("/v1/feedback")
    async def erase_feedback(request: Request) -> Response:
        """Erase the feedback of a user, about an adapter, or both."""
        erased = await surface.feedback.erase(_filter(request), request.state.caller)
        return as_json(_erased_json(erased))

    @app.get("/v1/feedback/{feedback_id}")
    async def retrieve_feedback(feedback_id: str, request: Request) -> Response:
        """One of them."""
        stored = await surface.feedback.find(feedback_id, request.state.caller)
        return as_json(await _with_outlook(surface, stored))

    @app.delete("/v1/feedback/{feedback_id}")
    async def erase_one_feedback(feedback_id: str, request: Request) -> Response:
        """Erase it."""
        erased = await surface.feedback.erase_one(feedback_id, request.state.caller)
        return as_json({"id": feedback_id, **_erased_json(erased)})


def feedback_json(surface: Surface, stored: Stored) -> dict[str, Any]:
    """Feedback as clients see it."""
    said = stored.feedback
    return {
        "id": said.feedback_id,
        "object": "feedback",
        "created_at": int(said.created_s),
        "adapter": said.adapter,
        "model": surface.models.id_of(said.adapter),
        "kind": said.kind.value,
        "signal": said.signal,
        "completion_id": said.completion_id or None,
        "version": said.version or None,
        "messages": list(said.messages) or None,
        "prompt": None if said.messages else said.prompt,
        "chosen": said.chosen or None,
        "rejected": said.rejected or None,
        "rating": said.rating,
        "comment": said.comment or None,
        "weight": said.weight,
        "user": said.user or None,
        "conversation": said.conversation,
        "metadata": said.metadata,
        "superseded_by": said.superseded_by,
        "samples": [_sample_json(sample) for sample in stored.samples],
    }


async def _with_outlook(surface: Surface, stored: Stored) -> dict[str, Any]:
    """One feedback, with what becomes of it (none without learning)."""
    body = feedback_json(surface, stored)
    if surface.outlooks is not None:
        outlook = await surface.outlooks.of(stored.feedback.adapter, stored.samples)
        body["learning"] = {
            "state": outlook.prospect.value,
            "note": outlook.note or None,
            "next": outlook.next,
        }
    return body


def _sample_json(sample: Sample) -> dict[str, Any]:
    return {
        "id": sample.sample_id,
        "kind": sample.kind.value,
        "state": sample.state.value,
        "split": sample.split.value,
        "weight": sample.weight,
        "desirable": sample.desirable,
        "version": sample.version,
        "uses": sample.uses,
        "loss": sample.loss,
        "problem": sample.problem or None,
    }


def _erased_json(erased: Erased) -> dict[str, Any]:
    return {
        "object": "feedback.deleted",
        "deleted": True,
        "feedback": erased.feedback,
        "samples": erased.samples,
        "receipts": erased.receipts,
        "tainted_versions": [f"{adapter}@{number}" for adapter, number in erased.tainted],
    }


def _said(raw: bytes, idempotency_key: str | None) -> Said:
    body = parse(FeedbackRequest, raw)
    saying = {
        "rating": body.rating,
        "preference": body.preference,
        "demonstration": body.demonstration,
        "signal": body.signal,
    }
    given = [name for name, value in saying.items() if value is not None]
    if len(given) > 1 or not (given or body.comment):
        raise InvalidRequest(
            f"send one of: {', '.join(saying)}, or a 'comment'",
            param=given[1] if given else "rating",
        )
    for place, message in enumerate(body.messages or ()):
        if message.of_tools:
            raise InvalidRequest(
                "a conversation with tool calls cannot be sent here, because its tools are not "
                "known; send the 'completion_id' of the answer instead",
                param=f"messages[{place}]",
            )
    if idempotency_key is not None and not 0 < len(idempotency_key) <= 256:
        raise InvalidRequest("an Idempotency-Key has 1 to 256 characters", param="idempotency-key")
    pair, signal = body.preference, body.signal
    ask = Ask(
        completion_id=body.completion_id,
        choice=body.choice,
        messages=tuple(message.rendered() for message in body.messages or ()),
        prompt=body.prompt,
        completion=body.completion,
        rating=None if body.rating is None else float(body.rating),
        preferred=pair.chosen if pair else None,
        dispreferred=pair.rejected if pair else None,
        demonstration=body.demonstration,
        comment=body.comment,
        signal=Signal(signal.type, signal.text, signal.seconds) if signal else None,
    )
    return Said(
        ask=ask,
        feedback_id=body.feedback_id,
        idempotency_key=idempotency_key,
        digest=_digest(body),
        model=body.model,
        adapter=body.adapter,
        weight=1.0 if body.weight is None else body.weight,
        user=body.user or "",
        conversation=body.conversation or "",
        metadata=body.metadata or {},
    )


def _digest(body: FeedbackRequest) -> str:
    """The same for bodies that say the same, whatever the order of their keys."""
    said = body.model_dump(mode="json", exclude=set(body.model_extra or ()))
    return hashlib.sha256(msgspec.json.encode(said, order="sorted")).hexdigest()


def _filter(request: Request, *others: str) -> Filter:
    """`adapter`, `user`; `keys=all` for that of all keys. Of `others`, which are allowed, too, only
    a `state` narrows what is found: nothing is erased by it, since receipts have none.

    Nothing is ignored: what a misspelt or empty condition means is not what was meant, and erasure
    would take more. Raises `InvalidRequest`.
    """
    given = [name for name, _ in request.query_params.multi_items()]
    for name, value in request.query_params.multi_items():
        if name not in (*_CONDITIONS, *others):
            raise InvalidRequest(
                f"'{name[:64]}' is not a parameter here; there are: "
                f"{', '.join((*_CONDITIONS, *others))}",
                param=name[:64],
            )
        if not value.strip() or given.count(name) > 1:
            raise InvalidRequest(f"give '{name}' once, with a value", param=name)
    state = read_text(request, "state")
    if state is not None and state not in set(SampleState):
        raise InvalidRequest(f"'state' must be one of: {', '.join(SampleState)}", param="state")
    whose = read_text(request, "keys")
    if whose not in (None, "all"):
        raise InvalidRequest("'keys' must be 'all' or be left out", param="keys")
    user = request.query_params.get("user")
    return Filter(
        adapter=read_text(request, "adapter"),
        user=user,
        key_id=None if whose else request.state.caller.tenant,
        state=state,
    )
