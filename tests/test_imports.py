"""Every module of `tandem` can be imported, and no source file is too long."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

import tandem

PACKAGE = Path(tandem.__file__).parent
MAX_LINES = 400
SOURCES = sorted(path for suffix in ("py", "cpp", "h") for path in PACKAGE.rglob(f"*.{suffix}"))


def module_name(path: Path) -> str:
    parts = ("tandem", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = sorted(module_name(path) for path in SOURCES if path.suffix == ".py")


# Modules that are imported only where an optional package is installed.
OPTIONAL = {"tandem.model.attention.triton_kernel": "triton"} | {
    name: "triton" for name in MODULES if name.startswith("tandem.model.gpu.")
}


# The files are listed, not the packages walked: a folder without __init__.py would be passed over.
@pytest.mark.parametrize("name", MODULES)
def test_every_module_imports(name: str) -> None:
    if (package := OPTIONAL.get(name)) is not None:
        pytest.importorskip(package)
    assert importlib.import_module(name).__name__ == name


def test_every_folder_with_modules_is_a_package() -> None:
    folders = {path.parent for path in SOURCES if path.suffix == ".py"}
    assert [folder for folder in folders if not (folder / "__init__.py").is_file()] == []


def test_files_stay_short() -> None:
    lengths = {
        str(path.relative_to(PACKAGE)): len(path.read_text().splitlines()) for path in SOURCES
    }
    assert {name: lines for name, lines in lengths.items() if lines > MAX_LINES} == {}


def test_nothing_is_left_in_shared_memory() -> None:
    """Semaphores and queues of multiprocessing outlive a process that is killed."""
    users = [path.name for path in SOURCES if "import multiprocessing" in path.read_text()]
    users += [path.name for path in SOURCES if "from multiprocessing" in path.read_text()]
    assert users == []
