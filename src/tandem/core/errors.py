"""Our own error tree. Callers catch these; impossible states are asserts.

Every message says what to do. `services` and `api` map them onto OpenAI's error shape.
"""

from __future__ import annotations


class TandemError(Exception):
    """Base of every error that Tandem raises on purpose."""


class InvalidRequest(TandemError):
    """The caller asked for something that cannot be done; the message says what to change.

    `param` names the offending field, `code` is OpenAI's error code where one exists.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class NotFound(InvalidRequest):
    """A model, adapter or other named thing does not exist."""


class Unauthorized(TandemError):
    """The API key is missing, unknown, or may not do this."""


class Overloaded(TandemError):
    """The server sheds load; try again after `retry_after_s` seconds."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QuotaExceeded(Overloaded):
    """An API key has used up what it may contribute."""


class EngineDead(TandemError):
    """The engine process ended while this request was in flight, or has not come back yet."""

    def __init__(self, message: str, *, retry_after_s: float = 5.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UnsupportedModel(TandemError):
    """This architecture or option cannot be served exactly; the message names it."""


class AdapterError(InvalidRequest):
    """An adapter cannot be read, does not fit the model, or is in the wrong state."""


class NoMemory(AdapterError):
    """A trainer would fit if others were closed, or later."""


class OutOfMemory(TandemError):
    """The device has no memory for what it is to compute now; try again after `retry_after_s`."""

    def __init__(self, message: str, *, retry_after_s: float = 5.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class TrainingCancelled(TandemError):
    """A training step was given up before its update; nothing of it remains."""


class Forbidden(TandemError):
    """The API key is known, but may not do this."""


class Conflict(InvalidRequest):
    """The named thing is in a state that does not allow this now."""


class WrongStatus(Conflict):
    """A job's status does not allow this, and will not: what OpenAI answers with 400."""


class StoreError(TandemError):
    """The durable state cannot be opened, read or written; nothing was changed."""


class DiskError(StoreError):
    """Files cannot be written: the disk is full, read-only or broken. It may heal."""


class AccountingError(TandemError):
    """A `check()` found a resource that is lost, owned twice or miscounted."""


class PolicyFault(TandemError):
    """A scheduling policy runs nothing although requests are there, and would not for ever."""
