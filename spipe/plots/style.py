"""What all figures share: size, type, colours that colour-blind readers tell apart, and how they are written."""

import os
import sys
import textwrap
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from spipe.errors import SpipeError
from spipe.metrics import CAUSES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")
# Okabe and Ito's palette: https://jfly.uni-koeln.de/color/
BLUE, ORANGE, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
AMBER, SKY, YELLOW, BLACK = "#E69F00", "#56B4E9", "#F0E442", "#000000"
GREY, LIGHT, DARK = "#8C8C8C", "#DDDDDD", "#4D4D4D"
SERIES = (BLUE, ORANGE, GREEN, PURPLE, AMBER, SKY, BLACK)
MARKERS = ("o", "s", "^", "D", "v", "P", "X")

GROUP_COLOURS = {
    "forward": BLUE,
    "recompute": SKY,
    "backward": GREEN,
    "weight gradient": "#2E6B3A",
    "weights": AMBER,
    "gradients": ORANGE,
    "activations": PURPLE,
    "activation gradients": "#8F4F78",
    "stage inputs": YELLOW,
    "optimizer": DARK,
    "other": "#BDBDBD",
}
CAUSE_COLOURS = dict(
    zip(CAUSES, (BLUE, ORANGE, GREEN, PURPLE, AMBER, YELLOW, "#8C564B", DARK, SKY, "#BDBDBD"), strict=True)
)
BUSY = "#E4E4E4"

_RC: dict[Any, Any] = {
    "font.size": 9.0,
    "axes.titlesize": 10.0,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "text.parse_math": False,  # names of folders may hold a $
    "text.usetex": False,
    "svg.hashsalt": "spipe",
    "svg.fonttype": "path",
    "pdf.fonttype": 42,
}


def need_matplotlib() -> None:
    """Raises SpipeError with what to install if matplotlib is missing."""
    if sys.modules.get("matplotlib") is not None:
        return
    backend = os.environ.pop("MPLBACKEND", None)  # if it names none, matplotlib cannot be imported; no figure needs it
    try:
        import matplotlib
    except ImportError as error:
        raise SpipeError(
            f"figures need matplotlib, which cannot be imported ({error}); pip install matplotlib"
        ) from None
    finally:
        if backend is not None:
            os.environ["MPLBACKEND"] = backend
    if backend is not None:
        with suppress(ValueError):
            matplotlib.rcParams["backend"] = backend


@contextmanager
def style() -> Iterator[None]:
    """The settings of all figures, for the time of drawing one; needs no display."""
    need_matplotlib()
    import matplotlib

    with matplotlib.rc_context(_RC), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # a name in a script without a font here
        yield


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure (inches) that belongs to no window."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save(figure: "Figure", path: Path) -> None:
    """Write a figure; the same data give the same bytes."""
    check_figure(path)
    empty = {".png": {"Software": None}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    with style():
        figure.savefig(path, dpi=150, metadata=empty[path.suffix])


def check_figure(path: Path) -> None:
    """Raises SpipeError unless figures can be drawn, and one can be written under this name: asked before the work."""
    need_matplotlib()
    if path.suffix not in SUFFIXES:
        raise SpipeError(f"{path}: a figure's name should end in {', '.join(SUFFIXES)}")


def time_unit(longest_s: float) -> tuple[float, str]:
    """Factor and unit in which seconds up to ``longest_s`` read well on an axis."""
    return (1.0, "s") if longest_s >= 2 else (1e3, "ms") if longest_s >= 2e-3 else (1e6, "µs")


def bytes_unit(most: float) -> tuple[float, str]:
    """Divisor and unit in which bytes up to ``most`` read well on an axis."""
    return (2.0**30, "GiB") if most >= 2**30 else (2.0**20, "MiB")


def legend(
    figure: "Figure",
    entries: dict[str, str],
    columns: int = 6,
    place: Literal["outside upper left", "outside lower left"] = "outside upper left",
    title: str | None = None,
) -> None:
    """A legend of coloured boxes (name -> colour) above or below everything."""
    from matplotlib.patches import Patch

    boxes = [Patch(facecolor=colour, edgecolor="none", label=name) for name, colour in entries.items()]
    if boxes:
        figure.legend(
            handles=boxes,
            loc=place,
            ncols=columns,
            title=title,
            alignment="left",
            title_fontsize=8.5,
            handlelength=1.2,
            columnspacing=1.2,
            handletextpad=0.5,
        )


def wrapped(text: str, width: int = 28) -> str:
    """A name in lines of at most ``width`` letters, so that it leaves room for what it names."""
    return "\n".join(textwrap.wrap(text, width)) or text


def rows_in(labels: Collection[str], least: float) -> float:
    """Inches for rows with these labels: ``least`` for each, or what the one of the most lines needs."""
    return len(labels) * max(least, *(0.18 * (label.count("\n") + 1.5) for label in labels))


def text_on(colour: str) -> str:
    """Black or white, whichever is read better on ``colour`` (``#RRGGBB``)."""
    red, green, blue = (int(colour[k : k + 2], 16) for k in (1, 3, 5))
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "white"
