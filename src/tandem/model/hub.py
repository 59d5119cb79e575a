"""Models by their name on the hub: downloaded once into the hub's cache, then read from there.

One process contacts the hub, once, for a bounded time. Loading reads local files only. Knows no
transformers. Invariant: `fetched` returns a directory, and nothing else uses the network.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread

from huggingface_hub import HfApi, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError
from huggingface_hub.utils.tqdm import disable_progress_bars

from tandem.core.errors import NotFound, UnsupportedModel

logger = logging.getLogger(__name__)

Progress = Callable[[str, float], None]

ANSWER_LIMIT_S = 10.0
"""How long the hub may take to list a repository, including the look-up of its address."""
_REQUEST_LIMIT_S = 5.0
_CONFIG = "config.json"
_FILES = ("*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken")


class _Unreachable(Exception):
    """No answer from the hub; the message says why."""


def fetched(name: str, progress: Progress) -> Path:
    """The directory of a repository's newest files, or of the cached ones without a network.

    Raises `NotFound` if there is no such repository, or none that can be reached,
    `UnsupportedModel` if it has no checkpoint.
    """
    progress(f"asking the hub for {name}", 0.0)
    try:
        files = _files_of(name)
    except _Unreachable as error:
        if (cached := try_to_load_from_cache(name, _CONFIG)) and isinstance(cached, str):
            logger.info("the hub does not answer (%s): using the copy in its cache", error)
            return _without_adapter(Path(cached).parent)
        raise NotFound(
            f"there is no directory {name!r}, and the hub does not answer: {error}", param="model"
        ) from error
    if _CONFIG not in files:
        advice = ""
        if packed := [file for file in files if file.endswith(".gguf")]:
            advice = f"; download one of its GGUF files ({packed[0]}, ...) and serve that"
        raise UnsupportedModel(f"{name} on the hub has no {_CONFIG}{advice}")
    own = [file for file in files if "/" not in file and not file.startswith("adapter_")]
    safe = any(file.endswith(".safetensors") for file in own)
    weights = "*.safetensors" if safe else "*.bin"
    progress(f"downloading {name}", 0.0)
    disable_progress_bars()
    try:
        found = snapshot_download(
            name,
            allow_patterns=[*_FILES, weights],
            ignore_patterns=["*/*", "adapter_*"],
            max_workers=4,
        )
    except GatedRepoError as error:
        raise NotFound(
            f"cannot download {name}: its owner must grant you access; ask for it on the model's "
            "page, then set HF_TOKEN",
            param="model",
        ) from error
    except Exception as error:  # network and disk have errors of their own
        raise NotFound(f"cannot download {name}: {_line(error)}", param="model") from error
    return _without_adapter(Path(found))


def _without_adapter(folder: Path) -> Path:
    """Refuse a cache in which something else has put an adapter: transformers would load both."""
    if (folder / "adapter_config.json").exists():
        raise UnsupportedModel(
            f"the hub's cache has an adapter beside the model: remove {folder} and start again"
        )
    return folder


def repository_of(model: str) -> str:
    """The hub's name of a directory in its cache (the same on all machines); else `model`."""
    parts = Path(model).parts
    if len(parts) > 2 and parts[-2] == "snapshots" and parts[-3].startswith("models--"):
        return parts[-3].removeprefix("models--").replace("--", "/")
    return model


def _files_of(name: str) -> Sequence[str]:
    """Names of the repository's files. Raises `NotFound`, `_Unreachable`."""
    answers: SimpleQueue[Sequence[str] | Exception] = SimpleQueue()

    def ask() -> None:
        try:
            siblings = HfApi().model_info(name, timeout=_REQUEST_LIMIT_S).siblings or ()
            answers.put([each.rfilename for each in siblings])
        except Exception as error:  # raised below
            answers.put(error)

    # A silent name server cannot be interrupted, so a thread asks; it must not delay the exit.
    Thread(target=ask, daemon=True).start()
    try:
        answer = answers.get(timeout=ANSWER_LIMIT_S)
    except Empty:
        raise _Unreachable(f"no answer in {ANSWER_LIMIT_S:.0f} s") from None
    if isinstance(answer, HFValidationError):
        raise NotFound(
            f"there is no directory {name!r}, and it is no name on the hub", param="model"
        ) from answer
    if isinstance(answer, RepositoryNotFoundError) and not isinstance(answer, GatedRepoError):
        raise NotFound(
            f"there is no directory {name!r}, and the hub has no such model (or a private one: "
            "set HF_TOKEN)",
            param="model",
        ) from answer
    if isinstance(answer, Exception):
        raise _Unreachable(_line(answer)) from answer
    return answer


def _line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
