"""`python -m benchmarks STUDY [OPTIONS]`: runs a study; without one, lists them."""

from __future__ import annotations

import ast
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent


def studies() -> Iterator[tuple[str, str]]:
    """Each study's name and the first line about it: folders that can be run, and further modules
    of theirs that can, as FOLDER.MODULE."""
    for path in sorted(HERE.glob("*/*.py")):
        folder = path.parent
        if not (folder / "__main__.py").exists():
            continue
        if path.name == "__main__.py":
            yield folder.name, _first_line(folder / "__init__.py")
        elif '__name__ == "__main__"' in (text := path.read_text()) and "typer.run" in text:
            yield f"{folder.name}.{path.stem}", _first_line(path)


def _first_line(path: Path) -> str:
    said = ast.get_docstring(ast.parse(path.read_text())) or ""
    return said.partition("\n")[0]


def main() -> None:
    """Run the study that the first argument names."""
    known = dict(studies())
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in known:
        width = max(map(len, known))
        print("usage: python -m benchmarks STUDY [--help | OPTIONS]\n")
        print("\n".join(f"  {each:{width}}  {said}" for each, said in known.items()))
        sys.exit(0 if name in ("", "--help", "-h") else 2)
    del sys.argv[1]
    runpy.run_module(f"benchmarks.{name}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
