"""Whether waiting requests will find KV memory: by the predicted peak of all that run with them.

Running sequences grow by a token an iteration and free their blocks when they end, so what counts
is the largest sum at any time from now on, not the sum of what each holds at its end. Reads the
view, changes nothing. Invariant: without a running or held sequence, every request fits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from tandem.core.sequence import Sequence
from tandem.estimators.memory import Growing, peak_tokens
from tandem.scheduling.queues import is_waiting
from tandem.scheduling.view import View


class Memory:
    """What `running` sequences and those that are held beside them will need, of all blocks but
    `reserved` ones.

    A sequence counts with what it holds alone; what several hold stays. An answer of unknown length
    counts with what it holds now.
    """

    def __init__(self, view: View, running: Iterable[Sequence], reserved: float = 0.0) -> None:
        own = sum([-(-_own_tokens(seq) // view.block_size) for seq in view.running])
        shared = max(0, view.num_blocks - view.available_blocks - own)
        self._view = view
        self._room = (view.num_blocks - shared - reserved) * view.block_size
        self._held = [each for seq in running for each in self._growing(seq)]
        self._most = sum([each.most for each in self._held])
        self._too_many = math.inf  # tokens of the smallest sequence that did not fit

    def hold(self, seq: Sequence) -> bool:
        """Count a waiting sequence from now on, if it fits; whether it does. A larger one than one
        that did not fit is not looked at."""
        more = self._growing(seq)
        tokens, most = more[0].now, self._most + sum([each.most for each in more])
        fits = not self._held or most <= self._room  # the usual case is quickly found
        if not fits and (
            tokens >= self._too_many or peak_tokens([*self._held, *more]) > self._room
        ):
            self._too_many = min(self._too_many, tokens)
            return False
        self._held += more
        self._most = most
        return True

    def _growing(self, seq: Sequence) -> list[Growing]:
        """A sequence, and the choices that will share its prompt."""
        view, size, made = self._view, self._view.block_size, seq.output_tokens
        tokens = len(seq.tokens)
        if is_waiting(seq):
            own = tokens + size * (view.new_blocks(seq, tokens) - -(-tokens // size))
        else:
            own = _own_tokens(seq) + seq.remaining
        length = seq.request.length
        if length is None:
            return [Growing(size * -(-own // size))]
        ends = [(max(1.0, end - made), share) for end, share in length.ends(made)]
        choices = seq.request.n - seq.index if not made else 1
        unfilled = (size - 1) / 2  # of the last block, on average
        return [Growing(own + unfilled, ends), *[Growing(unfilled, ends)] * (choices - 1)]


def _own_tokens(seq: Sequence) -> int:
    """Tokens whose KV a running sequence holds alone, nearly: what it computed itself. Later
    choices share the prompt with the first."""
    return max(0, seq.computed - (seq.prompt_tokens if seq.index else seq.cached_tokens))
