"""Pictures as files: an empty figure, and saving one.

matplotlib is an extra, imported when a figure is drawn. Invariant: the same data give the same
picture, in PNG and SVG.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tandem.core.errors import InvalidRequest

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def save(picture: Figure, folder: Path, name: str) -> list[Path]:
    """Write one picture as .png and .svg."""
    written = []
    for kind in ("png", "svg"):
        path = folder / f"{name}.{kind}"
        # A date in the file would make every drawing different.
        metadata = {"Date": None} if kind == "svg" else {}
        picture.savefig(path, dpi=150, metadata=metadata)
        written.append(path)
    return written


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, in inches. Raises `InvalidRequest` if matplotlib is missing."""
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InvalidRequest(
            f"figures need matplotlib ({error}); pip install 'tandem[bench]', or --no-figures"
        ) from error
    matplotlib.rcParams["svg.hashsalt"] = "tandem"
    figure: Figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure
