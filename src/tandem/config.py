"""Configuration: frozen, resolved once, handed out in pieces.

Sources in rising precedence: defaults, a TOML file, environment variables, command-line flags.
Every setting is a field below; `docs/settings.md` lists them and a test compares the two. A part
of the system receives its own section. Invariant: what `resolve` returns is in its types' ranges.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from tandem.core.errors import InvalidRequest
from tandem.core.sizes import bytes_of

ENV_PREFIX = "TANDEM_"

_MOST = 2**31 - 1
_MOST_BYTES = 2**62
Count = Annotated[int, Meta(ge=1, le=_MOST)]
CountOrZero = Annotated[int, Meta(ge=0, le=_MOST)]
Size = Annotated[int, Meta(ge=1, le=_MOST_BYTES)]
SizeOrZero = Annotated[int, Meta(ge=0, le=_MOST_BYTES)]
Threads = Annotated[int, Meta(ge=0, le=1024)]
Port = Annotated[int, Meta(ge=0, le=65535)]
Positive = Annotated[float, Meta(gt=0, le=1e9)]
PositiveOrZero = Annotated[float, Meta(ge=0, le=1e9)]
Share = Annotated[float, Meta(ge=0, le=1)]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model is served and how it is computed.

    `model` is smollm2, demo, a directory, a GGUF file or a Hugging Face name, `served_name` its id
    for clients, `max_model_len` in tokens (0: the model's own). `dtype` auto is the checkpoint's,
    but float32 on a CPU that is slow with 16 bits. `threads` on a CPU, 0 for all cores; `packing`
    pins how weights are packed there: panels or onednn.
    """

    model: str = "demo"
    served_name: str = ""
    device: str = "auto"
    dtype: str = "auto"
    max_model_len: CountOrZero = 0
    threads: Threads = 0
    kernels: str = "auto"
    packing: str = "auto"


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """KV cache: tokens a block and memory in bytes (0: a share of what is free)."""

    block_size: Count = 16
    memory_bytes: SizeOrZero = 0
    prefix_caching: bool = True


@dataclass(frozen=True, slots=True)
class SchedulingConfig:
    """Budgets of an iteration and the policy that fills it.

    `policy_options` are the policy's own (docs/policies.md, docs/unified.md). `ttft_slo` and
    `tpot_slo`, in seconds, are the objectives of requests that bring none, `adapter_slos` those of
    requests for an adapter (`base`: for none) as `TTFT:TPOT`. The time model starts from `profile`,
    a file, or from passes that begin within `accustom_s` seconds (0: it guesses). `overflow` is a
    second engine, for what is predicted to be longer than `overflow_tokens` (0: than the quantile).
    """

    policy: str = "unified"
    max_sequences: Count = 128
    max_batch_tokens: Count = 1024
    policy_options: dict[str, str] = field(default_factory=dict)
    ttft_slo: Positive = 1.0
    tpot_slo: Positive = 0.1
    adapter_slos: dict[str, str] = field(default_factory=dict)
    profile: str = ""
    accustom_s: PositiveOrZero = 5.0
    overflow: str = ""
    overflow_quantile: Annotated[float, Meta(gt=0, lt=1)] = 0.9
    overflow_tokens: CountOrZero = 0


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """Adapters loaded at start (name -> PEFT directory) and where others may be loaded from.

    `roots` is the whitelist of directories for loads over HTTP; empty forbids them. Requests in
    flight end with the version that they began with, or with `switch` go on with each new one.
    """

    preload: dict[str, str] = field(default_factory=dict)
    roots: tuple[str, ...] = ()
    max_loaded: CountOrZero = 32
    max_rank: CountOrZero = 256
    switch: bool = False


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """Durable state: `directory` holds versions, files and (without `url`) the SQLite database.

    `url` is an SQLAlchemy URL (`postgresql+psycopg://...`). Receipts are kept for
    `receipt_days`; 0 keeps none, and feedback must then bring its messages. Of each adapter the
    newest `keep_versions` are kept (0: all). `max_file_bytes` bounds an uploaded file.
    """

    directory: str = "tandem-data"
    url: str = ""
    receipt_days: PositiveOrZero = 30.0
    keep_versions: CountOrZero = 50
    max_file_bytes: Size = 512 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class LearningConfig:
    """Learning from feedback: defaults of adapters that have no settings of their own.

    `enabled` off answers feedback with an error. `auto_adapters` creates an adapter at the first
    feedback for its name. `rank`, `alpha`, `targets` shape new adapters. A step takes up to
    `batch_samples` samples in micro-batches of `micro_batch_samples`, `replay` of them (a share)
    seen before; a candidate is made of up to `steps_per_version` steps' worth of new samples, which
    are trained on up to `epochs` times, until most are learned; a few wait up to `version_wait_s`
    for others. `rpo_alpha` weighs the likelihood of chosen and liked answers. `reference` is base
    or version:N. `gate` is auto, manual or always; with `auto_rollback`, what `auto` has published
    is rolled back by itself where live answers break or thumbs fall. `held_out` is the share of
    conversations never trained on; `key_share` the most that one API key may contribute to a
    version. `recording_tokens` rows may be recorded at once (0: as many as memory allows); what
    their layers' gradients need may take `graph_bytes` more (at most a tenth of free memory, or a
    quarter on a GPU; 0: nothing is kept), and parameters, gradients and optimisers of what is
    trained at the same time `trainer_bytes` (0: a tenth).
    """

    enabled: bool = True
    auto_adapters: bool = True
    rank: Count = 16
    alpha: Positive = 32.0
    targets: tuple[str, ...] = ()
    learning_rate: Annotated[float, Meta(gt=0, le=1)] = 1e-3
    warmup_steps: CountOrZero = 0
    weight_decay: Share = 0.0
    max_grad_norm: PositiveOrZero = 1.0
    beta: Positive = 0.1
    rpo_alpha: PositiveOrZero = 5.0
    batch_samples: Count = 8
    micro_batch_samples: Count = 4
    steps_per_version: Count = 8
    epochs: Count = 9
    version_wait_s: PositiveOrZero = 60.0
    replay: Annotated[float, Meta(ge=0, lt=1)] = 0.25
    reference: str = "base"
    gate: str = "auto"
    auto_rollback: bool = True
    held_out: Share = 0.1
    key_share: Annotated[float, Meta(gt=0, le=1)] = 1.0
    canary_file: str = ""
    max_sample_tokens: Count = 2048
    recording_tokens: CountOrZero = 0
    graph_bytes: SizeOrZero = 1 << 30
    trainer_bytes: SizeOrZero = 0


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The HTTP server: address, keys, and when it sheds load.

    `max_waiting_requests` and `max_waiting_tokens` bound the queue before 429 is answered, and so
    does a predicted wait of more than `max_wait_factor` times a request's TTFT objective (0: any
    wait will do); `drain_s` is how long SIGTERM waits for running requests. A loopback
    address is answered under its own names and `allowed_hosts` only, and any address where there
    are some; browsers may let pages of `cors_origins` in (`*`: all).
    """

    host: str = "127.0.0.1"
    port: Port = 8000
    api_keys: tuple[str, ...] = ()
    api_key_file: str = ""
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    max_waiting_requests: Count = 1024
    max_waiting_tokens: Count = 1_000_000
    max_wait_factor: PositiveOrZero = 5.0
    max_body_bytes: Size = 8 * 1024 * 1024
    max_n: Count = 64
    drain_s: PositiveOrZero = 30.0
    log_level: str = "info"


@dataclass(frozen=True, slots=True)
class BatchConfig:
    """Batches of requests: the most requests and bytes of one input file."""

    max_requests: Count = 50_000
    max_file_bytes: Size = 200 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Settings:
    """All sections. Only `build.py` and the CLI see this object."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduling: SchedulingConfig = field(default_factory=SchedulingConfig)
    adapters: AdapterConfig = field(default_factory=AdapterConfig)
    store: StoreConfig = field(default_factory=StoreConfig)
    learning: LearningConfig = field(default_factory=LearningConfig)
    batches: BatchConfig = field(default_factory=BatchConfig)
    server: ServerConfig = field(default_factory=ServerConfig)


Sections = dict[str, dict[str, Any]]

CHOICES = {
    "model.device": ("auto", "cpu", "cuda"),
    "model.dtype": ("auto", "float32", "bfloat16", "float16"),
    "model.kernels": ("auto", "off"),
    "model.packing": ("auto", "panels", "onednn"),
    "learning.gate": ("auto", "manual", "always"),
    "server.log_level": ("debug", "info", "warning", "error"),
}
"""Settings that are one of a few names."""

_YES, _NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off")

# As msgspec writes it: what is expected, and where.
_REFUSED = re.compile(r"(.+) - at `\$\.(\w+)\.(\w+)", re.DOTALL)


def resolve(
    flags: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    toml_path: Path | None = None,
) -> Settings:
    """Merge the sources into one `Settings`.

    `flags` maps section -> field -> value; a value of None means "not given". Environment
    variables are `TANDEM_<SECTION>_<FIELD>`, e.g. `TANDEM_CACHE_BLOCK_SIZE=32`; tuples are
    comma-separated. Numbers of bytes may be texts such as `4GiB`. Raises `InvalidRequest` that
    names the setting, also as its `param`, and where it was given.
    """
    merged: Sections = {section.name: {} for section in fields(Settings)}
    sources: dict[str, str] = {}
    if toml_path is not None:
        _merge(merged, _read_toml(toml_path), str(toml_path))
        sources |= dict.fromkeys(_paths(merged), str(toml_path))
    variables = _from_environment(environ or {})
    _merge(merged, variables, "environment")
    sources |= {path: variable_of(path) for path in _paths(variables)}
    for section, values in (flags or {}).items():
        given = {name: value for name, value in values.items() if value is not None}
        _merge(merged, {section: given}, "flags")
        sources |= dict.fromkeys(_paths({section: given}), "")
    _check_choices(merged, sources)
    _read_sizes(merged, sources)
    try:
        settings = msgspec.convert(merged, Settings, strict=False)
    except msgspec.ValidationError as error:
        raise _refusal(error, merged, sources) from error
    _check_path(settings.model.model)
    return settings


def variable_of(path: str) -> str:
    """The environment variable of a setting, e.g. `TANDEM_SERVER_PORT` of `server.port`."""
    return f"{ENV_PREFIX}{path.replace('.', '_')}".upper()


def _paths(sections: Mapping[str, Mapping[str, Any]]) -> list[str]:
    return [f"{section}.{name}" for section, values in sections.items() for name in values]


def _read_toml(path: Path) -> Sections:
    try:
        return tomllib.loads(path.read_bytes().decode("utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"cannot read the configuration file {path}: {error}") from error


def _from_environment(environ: Mapping[str, str]) -> Sections:
    found: Sections = {}
    for section in fields(Settings):
        for name, default in _field_defaults(section.name).items():
            variable = variable_of(f"{section.name}.{name}")
            text = environ.get(variable)
            if text is not None:
                found.setdefault(section.name, {})[name] = _value(variable, text, default)
    return found


def _value(variable: str, text: str, default: object) -> object:
    """What a variable says, by the kind of the setting. Raises `InvalidRequest`."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if isinstance(default, tuple):
        return parts
    if isinstance(default, dict):
        if wrong := [part for part in parts if "=" not in part]:
            raise InvalidRequest(f"{variable}: {wrong[0]!r:.50}: write NAME=VALUE,NAME=VALUE")
        return dict(part.split("=", 1) for part in parts)
    if isinstance(default, bool):
        word = text.strip().lower()
        if word not in (*_YES, *_NO):
            raise InvalidRequest(f"{variable}: {text!r:.50} is neither on nor off")
        return word in _YES
    return text


def _field_defaults(section: str) -> dict[str, Any]:
    instance = getattr(Settings(), section)
    return {item.name: getattr(instance, item.name) for item in fields(instance)}


def _merge(into: Sections, new: Mapping[str, Mapping[str, Any]], source: str) -> None:
    for section, values in new.items():
        if section not in into:
            known_sections = ", ".join(sorted(into))
            raise InvalidRequest(f"{source}: unknown section [{section}]; known: {known_sections}")
        if not isinstance(values, Mapping):
            raise InvalidRequest(f"{source}: [{section}] must be a table of settings")
        known = _field_defaults(section)
        for name, value in values.items():
            if name not in known:
                raise InvalidRequest(
                    f"{source}: unknown setting {section}.{name}; known: {', '.join(known)}"
                )
            into[section][name] = value


def _refusal(
    error: msgspec.ValidationError, merged: Sections, sources: Mapping[str, str]
) -> InvalidRequest:
    found = _REFUSED.match(str(error))
    if found is None:
        return InvalidRequest(f"configuration: {error}")
    expected, section, name = found.groups()
    value = merged[section][name]
    given = f" (given: {value!r:.50})" if isinstance(value, int | float | str) else ""
    return _wrong(f"{section}.{name}", f"{expected[0].lower()}{expected[1:]}{given}", sources)


def _wrong(path: str, problem: str, sources: Mapping[str, str]) -> InvalidRequest:
    """Named by where it was given: the file, the variable, or the setting alone (a flag)."""
    source = sources.get(path, "")
    return InvalidRequest(f"{source}{': ' if source else ''}{path}: {problem}", param=path)


def _check_choices(merged: Sections, sources: Mapping[str, str]) -> None:
    """Names of which there are only a few, however they are spelled."""
    for path, names in CHOICES.items():
        section, _, name = path.partition(".")
        value = merged[section].get(name)
        if isinstance(value, str):
            merged[section][name] = value.lower()
            if value.lower() not in names:
                raise _wrong(path, f"use {', '.join(names)} (given: {value!r:.50})", sources)


def _read_sizes(merged: Sections, sources: Mapping[str, str]) -> None:
    """Numbers of bytes may be written as `512MiB`, wherever they are given."""
    for section, values in merged.items():
        for name, value in values.items():
            if name.endswith("_bytes") and isinstance(value, str):
                try:
                    values[name] = bytes_of(value)
                except ValueError as error:
                    raise _wrong(f"{section}.{name}", str(error), sources) from error


def _check_path(model: str) -> None:
    """A name that can only be a path shall not be looked up on the hub."""
    is_path = model.startswith((".", "/", "~")) or model.endswith(("/", ".gguf"))
    if (is_path or model.count("/") > 1) and not Path(model).exists():
        kind = "file" if model.endswith(".gguf") else "directory"
        raise InvalidRequest(f"there is no {kind} {model!r} to load a model from")
