"""Every setting as a command-line flag, derived from the configuration's own fields.

A new field of `config.Settings` becomes a flag by itself; only its help text is written here.
Invariant: a flag that is not given has the value None, so that the file and the environment win.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from tandem.config import Settings, resolve
from tandem.core.errors import InvalidRequest
from tandem.core.sizes import bytes_of, shown_size
from tandem.scheduling.registry import known_policies

# Fields whose own name would not say enough on a command line.
_FLAG_NAMES = {
    "cache.memory_bytes": "kv-memory",
    "scheduling.policy_options": "policy-option",
    "scheduling.adapter_slos": "adapter-slo",
    "scheduling.accustom_s": "accustom",
    "adapters.preload": "adapter",
    "adapters.roots": "adapter-root",
    "adapters.max_loaded": "max-adapters",
    "adapters.max_rank": "max-adapter-rank",
    "adapters.switch": "switch-versions",
    "store.directory": "store-directory",
    "store.url": "store-url",
    "store.max_file_bytes": "max-file",
    "batches.max_requests": "max-batch-requests",
    "batches.max_file_bytes": "max-batch-file",
    "learning.enabled": "learning",
    "learning.rank": "lora-rank",
    "learning.alpha": "lora-alpha",
    "learning.targets": "lora-target",
    "learning.beta": "dpo-beta",
    "learning.epochs": "sample-epochs",
    "server.api_keys": "api-key",
    "server.allowed_hosts": "allowed-host",
    "server.cors_origins": "cors-origin",
    "server.max_body_bytes": "max-body",
    "server.drain_s": "drain",
}

HELP = {
    "model.model": "Model: `smollm2`, `demo`, a directory, a GGUF file, or a Hugging Face name",
    "model.served_name": "Model id for clients; empty: the last part of the model's name, without "
    "`.gguf`",
    "model.device": "Where to compute: auto, cpu or cuda",
    "model.dtype": (
        "Number type of the arithmetic: auto (the checkpoint's, but float32 on a CPU that is slow "
        "with 16 bits), float32, bfloat16 or float16"
    ),
    "model.max_model_len": "Longest prompt + output of one choice in tokens; 0: the model's own",
    "model.threads": "CPU threads for computing; 0: as many as other processes leave cores",
    "model.kernels": "Kernels for the frozen weights: auto picks the fastest that works; off uses "
    "torch's",
    "model.packing": "Whose products with the weights a CPU without AMX computes: panels (ours), "
    "onednn, or auto",
    "cache.block_size": "Tokens in one KV block",
    "cache.memory_bytes": "Memory for the KV cache, e.g. 4GiB; 0: a share of what is free",
    "cache.prefix_caching": "Reuse the KV of equal beginnings of prompts",
    "scheduling.policy": (
        f"Who runs next: {', '.join(known_policies())} (docs/policies.md), or package.module:Class"
    ),
    "scheduling.max_sequences": "Most choices that run at the same time",
    "scheduling.max_batch_tokens": "Most tokens computed in one iteration",
    "scheduling.policy_options": "Option of the policy, NAME=VALUE; repeatable (docs/unified.md)",
    "scheduling.ttft_slo": "Seconds to the first token that a request without an objective has",
    "scheduling.tpot_slo": "Seconds a token after that; learning uses what is left of them",
    "scheduling.adapter_slos": "Objectives of requests for an adapter (base: for none), as "
    "NAME=TTFT:TPOT; repeatable",
    "scheduling.profile": "File of `tandem profile` (same weights, device, kernels and threads), "
    "from which the time model starts; empty: from what is measured at the start",
    "scheduling.accustom_s": "About how many seconds the time model is measured when the engine "
    "starts, without profile; 0: it guesses",
    "scheduling.overflow": "Second engine for long answers: cores:N (N cores are its own), or cpu "
    "beside a GPU; empty: none (docs/overflow.md)",
    "scheduling.overflow_quantile": "It gets what is predicted to be longer than this quantile of "
    "recent predictions",
    "scheduling.overflow_tokens": "It gets what is predicted to be longer than this, however much "
    "of it comes; 0: by --overflow-quantile",
    "adapters.preload": "Adapter to load at the start, as NAME=DIRECTORY; repeatable",
    "adapters.roots": "Directory below which adapters may be loaded over HTTP; repeatable",
    "adapters.max_loaded": "Most adapters loaded at the same time",
    "adapters.max_rank": "Largest rank that an adapter may have",
    "adapters.switch": "Let requests in flight go on with each new version of their adapter",
    "store.directory": "Directory of the durable state: database, versions, files",
    "store.url": "Database: empty for SQLite in that directory, or postgresql+psycopg://...",
    "store.receipt_days": "Days that completions are kept for feedback by id; 0 keeps none",
    "store.keep_versions": "Newest versions of each adapter that are kept; 0: all",
    "store.max_file_bytes": "Largest uploaded file, e.g. 512MiB",
    "learning.enabled": "Learn from feedback and run fine-tuning jobs",
    "learning.auto_adapters": "Make an adapter at the first feedback for its name",
    "learning.rank": "Rank of new adapters",
    "learning.alpha": "Alpha of new adapters: updates are scaled by alpha / rank",
    "learning.targets": "Linear layer that new adapters change, by name; repeatable; default all",
    "learning.learning_rate": "Learning rate of AdamW",
    "learning.warmup_steps": "Updates of an adapter over which its learning rate rises from 0",
    "learning.weight_decay": "Weight decay of AdamW, 0 to 1",
    "learning.max_grad_norm": "Norm to which gradients are clipped; 0: any",
    "learning.beta": "Beta of DPO and KTO: how strongly learning is held to the reference",
    "learning.batch_samples": "Samples of a training step",
    "learning.micro_batch_samples": "Samples of a micro-batch",
    "learning.rpo_alpha": "Weight of the likelihood of chosen and liked answers beside DPO and KTO",
    "learning.steps_per_version": "Most steps' worth of new samples in a version",
    "learning.version_wait_s": "How long the first of a few new samples waits for others, "
    "in seconds; of less than a step's worth, ten times as long",
    "learning.epochs": "Most passes over the new samples of a version, fewer if most are learned; "
    "a try at half the rate may take twice as many, one at a quarter four times",
    "learning.replay": "Share of a step that was used by earlier versions, 0 to 1",
    "learning.reference": "Reference model of learning: base or version:N",
    "learning.gate": "Who decides about a candidate: auto, manual or always",
    "learning.auto_rollback": "Roll back what the gate published if its answers or thumbs get bad",
    "learning.held_out": "Share of conversations, after an adapter's first 20, that are "
    "measured on and never trained on",
    "learning.key_share": "Most that one API key may contribute to a version, 0 to 1",
    "learning.canary_file": "JSONL with trusted prompts and answers; empty: the shipped ones",
    "learning.max_sample_tokens": "Longest sample in tokens; longer ones are refused",
    "learning.recording_tokens": "Rows recorded at once; 0: as many as memory allows",
    "learning.graph_bytes": "Memory for what slices need not compute again, e.g. 1GiB; 0: none",
    "learning.trainer_bytes": "Memory of trainers, e.g. 1GiB; 0: a tenth of what is free",
    "batches.max_requests": "Most requests of one batch",
    "batches.max_file_bytes": "Largest input file of a batch, e.g. 200MiB",
    "server.host": "Address to listen on; 0.0.0.0 for all of them",
    "server.port": "Port to listen on; 0 for any free one",
    "server.api_keys": "API key that clients must send, plain or sha256:HEX; repeatable",
    "server.api_key_file": "File of API keys: one a line, or .toml with what each may do",
    "server.allowed_hosts": "Host name under which this server is asked, beyond those of this "
    "machine; repeatable",
    "server.cors_origins": "Origin of web pages that may use this server, such as "
    "https://chat.example.com, or *; repeatable",
    "server.max_waiting_requests": "Requests that may wait for their first token before 429",
    "server.max_waiting_tokens": "Prompt tokens that may wait for their first token before 429",
    "server.max_wait_factor": "Times its TTFT objective that a request may have to wait before "
    "429; 0: any wait will do",
    "server.max_body_bytes": "Largest request body, e.g. 8MiB",
    "server.max_n": "Most choices in one request: n times the number of prompts",
    "server.drain_s": "Seconds that SIGTERM waits for running requests",
    "server.log_level": "debug, info, warning or error",
}


@dataclass(frozen=True, slots=True)
class Setting:
    """One field of the configuration; `default` decides the flag's type."""

    section: str
    name: str
    default: Any

    @property
    def path(self) -> str:
        """As in a TOML file, e.g. `server.port`."""
        return f"{self.section}.{self.name}"

    @property
    def flag(self) -> str:
        """As on the command line, e.g. `--port`."""
        return "--" + _FLAG_NAMES.get(self.path, self.name.replace("_", "-"))

    @property
    def parameter(self) -> str:
        """As a keyword of the command's function."""
        return f"{self.section}_{self.name}"

    @property
    def default_text(self) -> str:
        """The default as documentation shows it."""
        if isinstance(self.default, bool):
            return "on" if self.default else "off"
        if self.name.endswith("_bytes"):
            return shown_size(self.default)
        return str(self.default) if self.default or self.default == 0 else "empty"


def all_settings() -> Iterator[Setting]:
    """Every field of every section, in order."""
    for section, values in asdict(Settings()).items():
        for name, default in values.items():
            yield Setting(section, name, default)


def takes_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give `command(**flags)` one flag for each setting; the model becomes its argument."""
    own = [
        parameter
        for parameter in inspect.signature(command, eval_str=True).parameters.values()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    derived = [
        inspect.Parameter(
            setting.parameter,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=_annotation(setting),
        )
        for setting in all_settings()
    ]
    signature = inspect.Signature([*own, *derived])
    command.__signature__ = signature  # type: ignore[attr-defined]
    command.__annotations__ = {name: p.annotation for name, p in signature.parameters.items()}
    return command


def settings_from(
    flags: Mapping[str, Any], environ: Mapping[str, str], config: Path | None = None
) -> Settings:
    """Resolve flags, environment and file. Raises `InvalidRequest` that names the setting."""
    given: dict[str, dict[str, Any]] = {}
    for setting in all_settings():
        value = flags[setting.parameter]
        if value is None or value == []:
            continue
        if isinstance(setting.default, dict):
            value = dict(_named(text, setting.flag) for text in value)
        given.setdefault(setting.section, {})[setting.name] = value
    try:
        return resolve(given, environ=environ, toml_path=config)
    except InvalidRequest as error:
        found = [setting for setting in all_settings() if setting.path == error.param]
        by_flag = [each for each in found if each.name in given.get(each.section, {})]
        if not by_flag or error.param == "model.model":  # the argument
            raise
        raise InvalidRequest(f"{by_flag[0].flag}: {error}", param=error.param) from error


def parse_size(text: str) -> int:
    """As `bytes_of`, for a flag."""
    try:
        return bytes_of(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _annotation(setting: Setting) -> Any:
    text = HELP.get(setting.path, "")
    panel = setting.section.capitalize()
    if setting.path == "model.model":
        return Annotated[str | None, typer.Argument(help=text, metavar="MODEL")]
    shown = f"{text} (default: {setting.default_text})"
    if setting.name.endswith("_bytes"):
        option = typer.Option(
            setting.flag, help=shown, parser=parse_size, metavar="SIZE", rich_help_panel=panel
        )
        return Annotated[int | None, option]
    kind: Any = type(setting.default)
    names = [setting.flag]
    if kind is bool:
        names = [f"{setting.flag}/--no-{setting.flag.removeprefix('--')}"]
    elif kind in (tuple, dict):
        kind = list[str]
    return Annotated[kind | None, typer.Option(*names, help=shown, rich_help_panel=panel)]


def _named(text: str, flag: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not (name and separator and value):
        raise InvalidRequest(f"{flag} {text!r}: write NAME=VALUE")
    return name, value
