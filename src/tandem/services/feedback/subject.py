"""What feedback is about: the conversation and its answers, and what was said of them.

Answers come from a receipt or from the client; indexes of a completion's choices become texts here.
Knows no store but through `Receipts`. Invariant: a `Meaning` has the texts that its kind needs.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace

from tandem.core.errors import InvalidRequest
from tandem.core.learning import (
    AnswerTokens,
    Feedback,
    FeedbackKind,
    Messages,
    Receipt,
    ReceiptChoice,
    ServedTokens,
)
from tandem.services.answering.receipts import Receipts
from tandem.services.feedback.signals import EXPLICIT, Meaning, Signal, interpret


@dataclass(frozen=True, slots=True)
class Ask:
    """What a client says and of what.

    Of `choice` of the completion `completion_id`, or of `completion` as the answer to `messages`
    or `prompt`. `preferred` and `dispreferred` are texts or choice indexes. One of `rating`, the
    pair, `demonstration` and `signal` is given, or a `comment` alone.
    """

    completion_id: str | None = None
    choice: int | None = None
    messages: Messages = ()
    prompt: str | None = None
    completion: str | None = None
    rating: float | None = None
    preferred: str | int | None = None
    dispreferred: str | int | None = None
    demonstration: str | None = None
    comment: str | None = None
    signal: Signal | None = None


@dataclass(frozen=True, slots=True)
class Subject:
    """A conversation with its answer, if one is known, and the receipt, if it is ours.

    `choice` is the receipt's that was named, else its first: it says which prompt is meant. `shown`
    is what of the answer came as content (empty: all of it, or no answer is known).
    """

    messages: Messages
    prompt: str
    answer: str | None
    receipt: Receipt | None = None
    choice: ReceiptChoice | None = None
    shown: str = ""


async def subject_of(ask: Ask, receipts: Receipts, tenant: str) -> Subject:
    """Find out. Raises `InvalidRequest` or `NotFound` that says what is missing."""
    by_index = isinstance(ask.preferred, int) or isinstance(ask.dispreferred, int)
    if ask.choice is not None and by_index:
        raise InvalidRequest(
            "the preference names its choices itself; leave 'choice' out", param="choice"
        )
    if ask.completion_id is not None:
        if ask.messages or ask.prompt is not None or ask.completion is not None:
            raise InvalidRequest(
                "send either 'completion_id' or the conversation itself", param="completion_id"
            )
        return _of_receipt(ask, await receipts.find(ask.completion_id, tenant))
    if bool(ask.messages) == (ask.prompt is not None):
        raise InvalidRequest(
            "say what the feedback is about: 'completion_id', 'messages' or 'prompt'",
            param="completion_id",
        )
    if ask.choice is not None:
        raise InvalidRequest("'choice' needs a 'completion_id'", param="choice")
    messages, answer = ask.messages, ask.completion
    if answer is None and messages and messages[-1]["role"] == "assistant":
        messages, answer = messages[:-1], messages[-1]["content"]
    if not messages and ask.prompt is None:
        raise InvalidRequest("'messages' needs what was answered", param="messages")
    return Subject(messages, ask.prompt or "", answer)


def meaning_of(ask: Ask, subject: Subject) -> Meaning:
    """What was said, in texts. Raises `InvalidRequest` for what contradicts itself or is empty."""
    if ask.signal is not None:
        meaning = interpret(ask.signal, _answer(subject), subject.shown)
        if meaning.kind is FeedbackKind.PREFERENCE:
            meaning = replace(meaning, chosen=_whole(subject, meaning.chosen))
    elif ask.rating is not None:
        meaning = Meaning(FeedbackKind.RATING, _answer(subject), rating=ask.rating)
    elif ask.demonstration is not None:
        original = "" if subject.answer is None else subject.answer
        same = subject.shown and ask.demonstration == subject.shown
        written = original if same else ask.demonstration
        meaning = Meaning(FeedbackKind.DEMONSTRATION, written, original)
    elif ask.preferred is not None and ask.dispreferred is not None:
        chosen, rejected = _text(subject, ask.preferred), _text(subject, ask.dispreferred)
        meaning = Meaning(FeedbackKind.PREFERENCE, chosen, rejected)
    else:
        return Meaning(FeedbackKind.COMMENT, subject.answer or "")
    return _checked(meaning)


def served_of(ask: Ask, subject: Subject, meaning: Meaning) -> ServedTokens | None:
    """What of it was served, in token ids; None where no receipt tells.

    A demonstration counts as written by a person, also where it equals an answer.
    """
    receipt, choice = subject.receipt, subject.choice
    if receipt is None or choice is None or receipt.prompt_tokens is None:
        return None
    chosen = None
    if meaning.kind is not FeedbackKind.DEMONSTRATION:
        chosen = _served(receipt, choice, ask.preferred, meaning.chosen)
    return ServedTokens(
        receipt.prompt_tokens.tokenizer,
        receipt.prompt_of(choice),
        chosen,
        _served(receipt, choice, ask.dispreferred, meaning.rejected),
    )


def _served(
    receipt: Receipt, choice: ReceiptChoice, named: str | int | None, text: str
) -> AnswerTokens | None:
    """Token ids of the named choice, else of one that is `text`, `choice` before others."""
    if isinstance(named, int):
        return _choice(receipt, named).tokens
    for other in (choice, *receipt.choices):
        if text and other.text == text and _same_prompt(receipt, other, choice):
            return other.tokens
    return None


def conversation_of(subject: Subject) -> str:
    """A name for the conversation: a hash of how it began."""
    users = [turn["content"] for turn in subject.messages if turn["role"] == "user"]
    began = users[0] if users else subject.prompt
    return hashlib.sha256(began.encode()).hexdigest()[:32]


def same_as(feedback: Feedback, subject: Subject) -> str | None:
    """A hash that feedback shares with what it supersedes; None if it supersedes nothing.

    One key's rating of one answer by one user, be it another rating; a pair or a demonstration
    only if it says the same of the same completion. An implicit signal supersedes its own type,
    whatever it is taken to mean.
    """
    said, implicit = feedback, feedback.signal != EXPLICIT
    rates = implicit or said.kind is FeedbackKind.RATING
    about: tuple[object, ...]
    if said.kind is FeedbackKind.COMMENT:
        return None
    if subject.receipt is not None and subject.choice is not None:
        answers = subject.choice.index if rates else (said.chosen, said.rejected)
        about = (subject.receipt.completion_id, answers)
    elif rates:
        answer = said.chosen if said.kind is FeedbackKind.RATING else said.rejected
        about = (said.conversation, said.messages, said.prompt, answer)
    else:
        return None
    kind = FeedbackKind.RATING if implicit else said.kind
    who = (said.adapter, said.key_id, said.user, kind.value, said.signal)
    return hashlib.sha256(json.dumps((who, about), sort_keys=True).encode()).hexdigest()


def _of_receipt(ask: Ask, receipt: Receipt) -> Subject:
    """The named choice; several prompts make the others choices of another conversation."""
    index = _first_index(ask)
    choice = _choice(receipt, index)
    several = len(receipt.choices) > 1
    rates = ask.rating is not None or ask.signal is not None
    shows = ask.preferred is not None or ask.demonstration is not None
    if several and index is None and (rates or (shows and _has_prompts(receipt))):
        raise InvalidRequest(
            f"the completion has {len(receipt.choices)} choices; say which one: 'choice'",
            param="choice",
        )
    known = index is not None or not several
    answer, shown = (choice.text, choice.content) if known else (None, "")
    for other in (ask.preferred, ask.dispreferred):
        if isinstance(other, int) and not _same_prompt(receipt, _choice(receipt, other), choice):
            raise InvalidRequest("these choices answer different prompts", param="preference")
    return Subject(
        receipt.messages, choice.prompt or receipt.prompt, answer, receipt, choice, shown
    )


def _has_prompts(receipt: Receipt) -> bool:
    """Whether its choices answer different prompts."""
    first = receipt.choices[0]
    return not all(_same_prompt(receipt, choice, first) for choice in receipt.choices)


def _same_prompt(receipt: Receipt, one: ReceiptChoice, other: ReceiptChoice) -> bool:
    """Texts may be equal where special tokens differ."""
    if receipt.prompt_tokens is None:
        return one.prompt == other.prompt
    return receipt.prompt_of(one) == receipt.prompt_of(other)


def _first_index(ask: Ask) -> int | None:
    given = (ask.choice, ask.preferred, ask.dispreferred)
    return next((index for index in given if isinstance(index, int)), None)


def _choice(receipt: Receipt, index: int | None) -> ReceiptChoice:
    for choice in receipt.choices:
        if choice.index == (index or 0):
            return choice
    raise InvalidRequest(
        f"the completion has no choice {index}; it has {len(receipt.choices)}", param="choice"
    )


def _text(subject: Subject, answer: str | int) -> str:
    if isinstance(answer, str):
        return _whole(subject, answer)
    if subject.receipt is None:
        raise InvalidRequest(
            "the index of a choice needs a 'completion_id'; send texts", param="preference"
        )
    return _choice(subject.receipt, answer).text


def _whole(subject: Subject, text: str) -> str:
    """All of the answer that came to the client as `text`, else `text`."""
    receipt, choice = subject.receipt, subject.choice
    if receipt is None or choice is None:
        return text
    for other in (choice, *receipt.choices):
        if text in (other.text, other.content) and _same_prompt(receipt, other, choice):
            return other.text
    return text


def _answer(subject: Subject) -> str:
    if subject.answer is None:
        raise InvalidRequest(
            "say which answer is meant: send 'completion', or end 'messages' with it",
            param="completion",
        )
    return subject.answer


def _checked(meaning: Meaning) -> Meaning:
    texts = [meaning.chosen]
    if meaning.kind is FeedbackKind.PREFERENCE:
        texts.append(meaning.rejected)
    if not all(text.strip() for text in texts):
        raise InvalidRequest("an answer is empty: nothing can be learned from it")
    if meaning.kind is not FeedbackKind.RATING and meaning.chosen == meaning.rejected:
        raise InvalidRequest(
            "the preferred and the rejected answer are the same", param=meaning.kind.value
        )
    return meaning
