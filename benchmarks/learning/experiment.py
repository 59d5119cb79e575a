"""All runs of the learning benchmark, each made once: policies x retrain rates x seeds.

A finished run is kept as one JSON file in a folder named after everything that shapes it, so an
interrupted experiment goes on where it was. Knows neither engine processes nor figures. Invariant:
a kept run was made with exactly these options, this code, this model and this data.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

import tandem
from benchmarks.learning.lessons import PriorityOptions
from benchmarks.learning.preferences import PreferencePair, held_back, read_preferences
from benchmarks.learning.report import RunKey
from benchmarks.learning.runs import POLICIES, LessonPlan, RunOptions, RunRecord, run
from benchmarks.learning.stream import (
    EncodedPair,
    Load,
    LoadOptions,
    draw_load,
    encode_pairs,
    stream_of,
)
from benchmarks.learning.teaching import TeachingOptions
from tandem.core.errors import InvalidRequest
from tandem.core.ports import EngineClient
from tandem.core.slo import Slo
from tandem.sim.curves import write_curve

if TYPE_CHECKING:
    from tandem.services.answering.tokenizer import Tokenizer

# Python, the kernels' C++ and the canary set; not what is compiled.
_CODE = {".py", ".cpp", ".h", ".jsonl"}


@dataclass(frozen=True, slots=True)
class ExperimentOptions:
    """What shapes the runs, which meet no pair that is held back. `load.pairs` are those of the
    highest rate; a run at a lower one is as long and has fewer. `sources` empty: all sets.
    `max_tokens` bounds a pair's longer sequence. `threads` are the engine's; a model this small
    computes no faster with more, and the load has a core of its own."""

    load: LoadOptions = field(default_factory=LoadOptions)
    teaching: TeachingOptions = field(default_factory=TeachingOptions)
    repeats: PriorityOptions = field(default_factory=PriorityOptions)
    lessons: LessonPlan = LessonPlan.OWN
    slo: Slo = field(default_factory=lambda: Slo(0.2, 0.03))
    policies: tuple[str, ...] = POLICIES
    retrain_rates: tuple[float, ...] = (0.5,)
    seeds: tuple[int, ...] = (0, 1, 2)
    sources: tuple[str, ...] = ()
    max_tokens: int = 320
    ekya_interval_s: float = 30.0
    threads: int = 1

    def check(self) -> None:
        """Raise `InvalidRequest` for what cannot be run."""
        for policy in self.policies:
            if policy not in POLICIES:
                known = ", ".join(POLICIES)
                raise InvalidRequest(
                    f"the learning benchmark has no policy {policy!r}; known: {known}",
                    param="policy",
                )
        if not (self.policies and self.retrain_rates and self.seeds):
            raise InvalidRequest("an experiment needs a policy, a retrain rate and a seed")
        if min(self.retrain_rates) <= 0.0:
            raise InvalidRequest("retrain rates must be positive", param="retrain_rates")


@dataclass(frozen=True, slots=True)
class Sources:
    """Where things are: the shared data's folder, the model's directory, where runs are kept; and
    the code that makes them, of which any change makes all of them anew."""

    data: Path
    model: Path
    cache: Path
    code: tuple[Path, ...] = (Path(tandem.__file__).parent, Path(__file__).parent)


class Experiment:
    """The runs of one set of options. `make_client` makes an engine client for a policy."""

    def __init__(
        self,
        sources: Sources,
        options: ExperimentOptions,
        make_client: Callable[[str], EngineClient],
        end: tuple[int, ...] = (),
    ) -> None:
        options.check()
        self._options = options
        self._make_client = make_client
        read = read_preferences(sources.data / "preferences", options.sources)
        self._pairs = [pair for pair in read if not held_back(pair)]
        fingerprint = self._fingerprint(sources)
        # Imported here: it loads torch, which `tandem --help` shall not.
        from tandem.services.answering.tokenizer import Tokenizer

        self._tokenizer = Tokenizer.load(sources.model)
        self._end = end or end_of_turn(self._tokenizer)
        self._folder = sources.cache / "learning" / fingerprint

    @property
    def folder(self) -> Path:
        """Where the runs are kept."""
        return self._folder

    @property
    def keys(self) -> list[RunKey]:
        """All runs: the highest rate first, policies side by side in time."""
        options = self._options
        return [
            RunKey(rate, policy, seed)
            for rate in sorted(options.retrain_rates, reverse=True)
            for seed in options.seeds
            for policy in options.policies
        ]

    def finished(self) -> dict[RunKey, RunRecord]:
        """The runs that are kept already."""
        return {
            key: msgspec.json.decode(self._path(key).read_bytes(), type=RunRecord)
            for key in self.keys
            if self._path(key).exists()
        }

    async def make(self, key: RunKey) -> RunRecord:
        """Make one run and keep it, its losses also as a curve that a simulation can follow."""
        client = self._make_client(key.policy)
        every = self._options
        options = RunOptions(every.slo, every.teaching, key.policy, every.repeats, every.lessons)
        versions = self._path(key).with_suffix("")
        shutil.rmtree(versions, ignore_errors=True)
        await client.start()
        try:
            record = await run(client, self.load(key), options, versions)
        finally:
            await client.close()
        aside = versions.with_suffix(".part")
        aside.write_bytes(msgspec.json.encode(record))
        if record.lessons.losses:
            write_curve(record.lessons.losses, self._path(key).with_suffix(".csv"))
        aside.replace(self._path(key))
        shutil.rmtree(versions)
        return record

    def load(self, key: RunKey) -> Load:
        """Requests and feedback of a run: the same for every policy."""
        options = self._options
        share = key.retrain_rate / max(options.retrain_rates)
        load = replace(
            options.load,
            retrain_rate=key.retrain_rate,
            pairs=max(1, round(options.load.pairs * share)),
            seed=key.seed,
        )
        return draw_load(stream_of(self._pairs, self._encode, key.seed, options.max_tokens), load)

    def _encode(self, pairs: Sequence[PreferencePair]) -> list[EncodedPair]:
        def encode(text: str) -> tuple[int, ...]:
            return self._tokenizer.encode(text, add_special_tokens=False)

        return encode_pairs(pairs, self._tokenizer.encode_chat, encode, self._end)

    def _fingerprint(self, sources: Sources) -> str:
        digest = hashlib.sha256(msgspec.json.encode(self._options_without_extent()))
        for path in _weights(sources.model):
            digest.update(path.read_bytes())
        for folder in sources.code:
            for path in sorted(folder.rglob("*")):
                if path.suffix in _CODE:
                    digest.update(f"{path.relative_to(folder)}\0".encode())
                    digest.update(hashlib.sha256(path.read_bytes()).digest())
        for pair in self._pairs:
            digest.update(repr((pair.messages, pair.chosen, pair.rejected)).encode())
        return digest.hexdigest()[:12]

    def _options_without_extent(self) -> dict[str, object]:
        """Options less which runs are wanted: more seeds later do not unmake the first ones."""
        options = msgspec.to_builtins(self._options)
        for name in ("policies", "seeds"):
            del options[name]
        options["retrain_rates"] = max(self._options.retrain_rates)
        return dict(options)

    def _path(self, key: RunKey) -> Path:
        return self._folder / f"{key.policy}-{key.retrain_rate:g}-{key.seed}.json"


def end_of_turn(tokenizer: Tokenizer) -> tuple[int, ...]:
    """What the chat template writes after an assistant's words: one token."""
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    shown = tokenizer.encode_chat(turns, add_generation_prompt=False)
    begun = tokenizer.encode_chat(turns[:1])
    words = tokenizer.encode("b", add_special_tokens=False)
    return shown[len(begun) + len(words) :][:1]


def _weights(model: Path) -> Iterator[Path]:
    """The files that make the model. Raises `InvalidRequest` if there are none."""
    found = sorted([*model.glob("*.safetensors"), *model.glob("tokenizer*.json")])
    if not found:
        raise InvalidRequest(
            f"there is no model in {model}; train one: "
            "python -m benchmarks learning.dialogue_model",
            param="model",
        )
    yield from found
