"""An executor without a model: KV is a chain of hashes, the next token a function of it.

Each cache slot holds (position, token, adapter, hash of the prefix under that adapter). A span
whose blocks do not hold exactly its own prefix, written under its own adapter, fails at once; and
since the drawn token depends on the whole prefix, any mix-up also changes the answer.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

from tandem.core.events import ModelInfo
from tandem.core.plan import Draw, DrawResult, LanePlan, ScoreResult, Span, StepResult, TokenLogprob
from tandem.core.version import AdapterVersion

VOCAB = 50
EOS = 7
Slot = tuple[int, int, str | None, int]


class FakeExecutor:
    """See the module. `on_submit` sees every plan first (to count, or to raise)."""

    def __init__(
        self,
        num_blocks: int = 32,
        block_size: int = 4,
        max_model_len: int = 64,
        on_submit: Callable[[LanePlan], None] = lambda plan: None,
    ) -> None:
        self.info = ModelInfo(
            model="fake",
            architecture="FakeForCausalLM",
            device="none",
            dtype="none",
            vocab_size=VOCAB,
            max_model_len=max_model_len,
            eos_token_ids=(EOS,),
            block_size=block_size,
            num_blocks=num_blocks,
            num_parameters=0,
            weight_bytes=0,
            kernels="none",
        )
        self.adapters: set[str] = set()
        self.failing: set[int] = set()
        self._on_submit = on_submit
        self._slots: dict[tuple[int, int], Slot] = {}
        self._results: list[StepResult] = []

    def submit(self, plan: LanePlan) -> int:
        self._on_submit(plan)
        for copy in plan.copies:
            for offset in range(self.info.block_size):
                slot = self._slots.get((copy.source, offset))
                if slot is not None:
                    self._slots[copy.target, offset] = slot
        draws: list[DrawResult] = []
        scores: list[ScoreResult] = []
        for span in plan.spans:
            self._write(span)
        for span in plan.spans:
            chain = self._read(span)
            draws += [draw_of(chain, draw) for draw in span.draws]
            if span.score_targets:
                found = tuple(
                    TokenLogprob(token, float(-span.start - row), 1)
                    for row, token in enumerate(span.score_targets)
                )
                scores.append(ScoreResult(span.seq_id, span.start, found))
        failed = tuple((s.seq_id, "asked to fail") for s in plan.spans if s.seq_id in self.failing)
        self._results.append(
            StepResult(plan.step, plan.lane, 0.0, tuple(draws), tuple(scores), failed)
        )
        return plan.step

    def poll(self) -> list[StepResult]:
        results, self._results = self._results, []
        return results

    def load_adapter(self, version: AdapterVersion) -> None:
        self.adapters.add(version.content_hash)

    def drop_adapter(self, content_hash: str) -> None:
        self.adapters.remove(content_hash)

    def _place(self, span: Span, position: int) -> tuple[int, int]:
        size = self.info.block_size
        return span.block_tables[0][position // size], position % size

    def _write(self, span: Span) -> None:
        assert span.adapter is None or span.adapter in self.adapters, "adapter is not loaded"
        chain = self._slots[self._place(span, span.start - 1)][3] if span.start else 0
        for row, token in enumerate(span.tokens):
            position = span.start + row
            chain = link(chain, token, span.adapter)
            self._slots[self._place(span, position)] = (position, token, span.adapter, chain)

    def _read(self, span: Span) -> int:
        chain = 0
        for position in range(span.end):
            at, token, adapter, stored = self._slots[self._place(span, position)]
            assert at == position, f"position {position} reads KV of position {at}"
            assert adapter == span.adapter, f"KV of {adapter} read under {span.adapter}"
            chain = link(chain, token, adapter)
            assert chain == stored, f"position {position} reads KV of another prefix"
        assert self._slots[self._place(span, span.end - 1)][1] == span.tokens[-1]
        return chain


def link(chain: int, token: int, adapter: str | None) -> int:
    """Extend a prefix hash by one token."""
    return zlib.crc32(f"{chain},{token},{adapter}".encode())


def draw_of(chain: int, draw: Draw) -> DrawResult:
    """The token after a prefix, for one draw."""
    key = f"{chain},{draw.sampling.seed},{draw.index}"
    token = zlib.crc32(key.encode()) % VOCAB
    while token in draw.banned:
        token = (token + 1) % VOCAB
    return DrawResult(draw.seq_id, token)


def expected_tokens(
    prompt: Sequence[int], draw: Draw, adapter: str | None, max_tokens: int, stop: frozenset[int]
) -> list[int]:
    """What a sequence must answer, from its prompt alone."""
    chain = 0
    for token in prompt:
        chain = link(chain, token, adapter)
    tokens: list[int] = []
    while len(tokens) < max_tokens:
        token = draw_of(chain, draw).token
        tokens.append(token)
        if token in stop:
            break
        chain = link(chain, token, adapter)
    return tokens
