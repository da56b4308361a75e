"""Timelines as files: SVG, or PNG with matplotlib."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

from fompi.base.errors import LayoutError, StateError


def save(picture: str, path: str | Path) -> None:
    """Write the SVG text of `fompi.timelines` to a file. A file that ends in .png is painted with matplotlib."""
    path = Path(path)
    check(path)
    if path.suffix == ".svg":
        path.write_text(picture)
    else:
        _paint(picture, path)


def check(path: str | Path, needs_matplotlib: bool = False) -> None:
    """Raise LayoutError unless the suffix is .svg or .png. Raise StateError without matplotlib, if it is needed."""
    suffix = Path(path).suffix
    if suffix not in (".svg", ".png"):
        raise LayoutError(f"{path}: a picture is SVG or PNG, so the name must end in .svg or .png")
    if (suffix == ".png" or needs_matplotlib) and find_spec("matplotlib") is None:
        other = "" if needs_matplotlib else ", or take .svg"
        raise StateError(f"{path}: this needs matplotlib: pip install matplotlib{other}")


def _paint(picture: str, path: Path) -> None:
    """Draw the boxes, lines and texts of the SVG with matplotlib, at twice the resolution."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    root = ElementTree.fromstring(picture)
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    figure = Figure(figsize=(width / 72, height / 72))
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    for element in root:
        given, kind = element.attrib, element.tag.rpartition("}")[2]
        x, y = (float(given.get(name, 0)) for name in "xy")
        if kind == "text":
            side = {"end": "right", "middle": "center"}.get(given.get("text-anchor", ""), "left")
            axes.text(
                x, y, element.text or "", fontsize=11, ha=side, va="baseline", weight=given.get("font-weight", "normal")
            )
        elif kind == "line":
            ends = [[float(given[f"{name}{i}"]) for i in (1, 2)] for name in "xy"]
            axes.plot(*ends, color=given["stroke"], linewidth=1)
        elif given["width"] != "100%":  # the white background
            axes.add_patch(Rectangle((x, y), float(given["width"]), float(given["height"]), color=given["fill"], lw=0))
    figure.savefig(path, dpi=144)
