"""How fast a queue moves, learned from the requests that leave it.

Knows counts and seconds only. Both weigh the more the more requests waited then: how fast an almost
empty queue was served says little of what the server can do. Invariant: if serving takes a time for
each request and one for each token of its prompt, `wait_s` predicts no more than that takes, on
average.
"""

from __future__ import annotations

import math

# What was seen counts for a third after so many seconds or starts, whichever is later.
_MEMORY_S, _MEMORY_STARTS = 5.0, 32
# Nothing is predicted from fewer starts.
_MIN_STARTS = 8


class Pace:
    """Sums over the recent past: seconds, requests that started in them, and tokens of their
    prompts.

    Tokens of answers are left out: what a client says of them (`max_tokens`) would count where
    nothing is predicted, and a client could make the queue look short."""

    def __init__(self) -> None:
        self._starts = 0
        self._since_start_s = 0.0
        self._seconds = 0.0
        self._requests = 0.0
        self._tokens = 0.0

    def passed(self, seconds: float, waiting: int) -> None:
        """So many seconds passed while `waiting` requests waited; none count for nothing."""
        if waiting:
            self._since_start_s += seconds
            self._seconds += waiting * seconds

    def started(self, tokens: int, waiting: int) -> None:
        """One of `waiting` requests got its first token; its prompt had `tokens`."""
        kept = math.exp(-min(self._since_start_s / _MEMORY_S, 1.0 / _MEMORY_STARTS))
        self._starts += 1
        self._since_start_s = 0.0
        self._seconds *= kept
        self._requests = kept * (self._requests + waiting)
        self._tokens = kept * (self._tokens + waiting * tokens)

    def wait_s(self, requests: float, tokens: float) -> float:
        """Seconds until so many requests with so many tokens have started; 0 if unknown.

        The smaller of what requests and prompts say: prompts that are longer or shorter
        than lately are not taken for slower ones.
        """
        if self._starts < _MIN_STARTS:
            return 0.0
        share = min(requests / self._requests, tokens / self._tokens)
        return self._seconds * share
