"""What every policy of a run meets: the same requests and preferences at the same times.

Knows the shared data and the model's tokenizer. Invariant: options, pairs and code give a run its
name, so that a kept run was made with exactly these.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import tandem
from benchmarks.learning.experiment import end_of_turn
from benchmarks.learning.preferences import (
    PreferencePair,
    held_back,
    read_preferences,
    stream_order,
)
from benchmarks.learning.report import RunKey
from benchmarks.learning.stream import EncodedPair, Load, LoadOptions, draw_load, encode_pairs
from tandem.services.answering.tokenizer import Tokenizer

POLICIES = ("no_retrain", "ekya", "adainf", "mace", "unified")
_SUFFIXES = {".py", ".cpp", ".h", ".jsonl"}
_STUDY = (
    *(f"learning/{name}.py" for name in ("experiment", "preferences", "runs", "stream")),
    *("live/api.py", "live/server.py", "mace_real/load.py", "mace_real/run.py"),
)


def code() -> str:
    """Names the product's code and what of the study's shapes a run."""
    package, studies = Path(tandem.__file__).parent, Path(__file__).parents[1]
    files = [path for path in sorted(package.rglob("*")) if path.suffix in _SUFFIXES]
    digest = hashlib.sha256()
    for path in [*files, *(studies / name for name in _STUDY)]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Options:
    """`pairs` are those of a run at the highest retrain rate; the others are as long. Pairs whose
    longer sequence has over `max_tokens` are left out. `settings` of the adapter and the objective
    are the same for every policy: with the server's own, a version takes longer than a run."""

    model: str
    rate: float = 0.8
    pairs: int = 96
    output_tokens: int = 8
    max_tokens: int = 96
    settings: Mapping[str, Any] = field(
        default_factory=lambda: {
            "batch_samples": 4,
            "steps_per_version": 6,
            "version_wait_s": 20,
        }
    )
    tpot_slo_s: float = 0.2
    retrain_rates: tuple[float, ...] = (0.2, 0.35, 0.5)
    seeds: tuple[int, ...] = (1, 2, 3)
    policies: tuple[str, ...] = POLICIES
    ekya_interval_s: float = 30.0

    @property
    def keys(self) -> list[RunKey]:
        """All runs: a seed of all policies and rates before the next one."""
        return [
            RunKey(rate, policy, seed)
            for seed in self.seeds
            for rate in sorted(self.retrain_rates, reverse=True)
            for policy in self.policies
        ]


class Loads:
    """The pairs, in text and in tokens; a load for each key."""

    def __init__(self, options: Options, directory: str, data: Path) -> None:
        self._options = options
        self._directory = directory
        tokenizer = Tokenizer.load(directory)
        read = [p for p in read_preferences(data / "preferences") if not held_back(p)]

        def encode_text(text: str) -> tuple[int, ...]:
            return tokenizer.encode(text, add_special_tokens=False)

        end = end_of_turn(tokenizer)
        encoded = encode_pairs(read, tokenizer.encode_chat, encode_text, end)
        self._encoded = {
            id(pair): each
            for pair, each in zip(read, encoded, strict=True)
            if each.longest_tokens <= options.max_tokens
        }
        self._pairs = [pair for pair in read if id(pair) in self._encoded]
        self.texts: Mapping[str, PreferencePair] = {
            self._encoded[id(pair)].key: pair for pair in self._pairs
        }

    def load(self, key: RunKey) -> Load:
        """The same for every policy."""
        options = self._options
        share = key.retrain_rate / max(options.retrain_rates)
        wanted = LoadOptions(
            options.rate,
            key.retrain_rate,
            max(1, round(options.pairs * share)),
            options.output_tokens,
            key.seed,
        )
        return draw_load(self._stream(key.seed), wanted)

    def name(self) -> str:
        """Of everything that shapes a run, but for which runs there are."""
        shaping = replace(self._options, policies=(), seeds=(), retrain_rates=())
        digest = hashlib.sha256(repr(asdict(shaping)).encode())
        digest.update(repr(max(self._options.retrain_rates)).encode())
        digest.update(repr(sorted(self.texts)).encode())
        for path in sorted(Path(self._directory).glob("*.safetensors")):
            digest.update(path.read_bytes())
        digest.update(code().encode())
        return digest.hexdigest()[:12]

    def _stream(self, seed: int) -> Sequence[EncodedPair]:
        return [self._encoded[id(pair)] for pair in stream_order(self._pairs, seed)]
