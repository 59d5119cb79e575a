"""Tandem's error tree. Callers catch these errors; impossible states are asserts.

Every message says what to do. `services` and `api` map the errors to OpenAI's error shape.
"""

from __future__ import annotations


class TandemError(Exception):
    """Base of every error that Tandem raises on purpose."""


class InvalidRequest(TandemError):
    """The request cannot be served as it is. The message says what to change.

    `param` names the offending field. `code` is OpenAI's error code, if there is one.
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
    """The server sheds load. Try again after `retry_after_s` seconds."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QuotaExceeded(Overloaded):
    """An API key has used up its quota of contributions."""


class EngineDead(TandemError):
    """The engine process ended during this request, or has not come back yet."""

    def __init__(self, message: str, *, retry_after_s: float = 5.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class TrainerLost(EngineDead):
    """A trainer went with its engine before this request: nothing of it was tried."""


class UnsupportedModel(TandemError):
    """This architecture or option cannot be served exactly. The message names it."""


class AdapterError(InvalidRequest):
    """An adapter cannot be read, does not fit the model, or is in the wrong state."""


class NoMemory(AdapterError):
    """There is no memory for a trainer now. It would fit if others were closed, or later."""


class OutOfMemory(TandemError):
    """The device has no memory for the current work. Try again after `retry_after_s` seconds."""

    def __init__(self, message: str, *, retry_after_s: float = 5.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class TrainingCancelled(TandemError):
    """A training step was cancelled before its update. It left no trace."""


class Forbidden(TandemError):
    """The API key is known, but may not do this."""


class Conflict(InvalidRequest):
    """The named thing is in a state that does not allow this now."""


class WrongStatus(Conflict):
    """A job's final status does not allow this. OpenAI answers with status 400."""


class StoreError(TandemError):
    """The durable state cannot be opened, read or written. Nothing was changed."""


class DiskError(StoreError):
    """Files cannot be written: the disk is full, read-only or broken. May be temporary."""


class AccountingError(TandemError):
    """A `check()` found a resource that is lost, owned twice or miscounted."""


class PolicyFault(TandemError):
    """A scheduling policy runs nothing although requests exist, and names no time when it will."""
