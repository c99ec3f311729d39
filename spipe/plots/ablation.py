"""Which feature buys what: step times from one system to the next."""

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from spipe.errors import SpipeError
from spipe.plots.style import GREEN, GREY, ORANGE, new_figure, rows_in, style, time_unit, wrapped

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def ablation(steps: Sequence[tuple[str, float]], title: str = "") -> "Figure":
    """A waterfall of (what was added, seconds a step with it), from the first system to the last.

    Raises:
        SpipeError: if there are fewer than two.
    """
    if len(steps) < 2:
        raise SpipeError("an ablation needs at least two systems, in the order in which features are added")
    factor, unit = time_unit(max(seconds for _, seconds in steps))
    values = [factor * seconds for _, seconds in steps]
    most = max(values)
    names = [wrapped(steps[0][0]), *(wrapped(f"+ {name}") for name, _ in steps[1:]), "all"]
    with style():
        figure = new_figure(9.0, 1.0 + rows_in(names, 0.5))
        axes = figure.add_subplot()
        axes.barh(0, values[0], color=GREY, height=0.6)
        axes.text(values[0] + 0.01 * most, 0, f"{values[0]:.4g} {unit}", va="center", fontsize=8.5)
        for place, (before, after) in enumerate(pairwise(values), 1):
            low, high = sorted((before, after))
            axes.barh(
                place, max(high - low, 0.002 * most), left=low, color=GREEN if after <= before else ORANGE, height=0.6
            )
            axes.plot([before, before], [place - 0.7, place + 0.3], color="#777777", linewidth=0.7)
            change = f"{after - before:+.3g} {unit} ({100 * (after / before - 1):+.1f} %)"
            axes.text(high + 0.01 * most, place, change, va="center", fontsize=8.5)
        last = len(steps)
        axes.barh(last, values[-1], color=GREY, height=0.6)
        faster = f"{values[-1]:.4g} {unit}, {values[0] / values[-1]:.2f} times as fast"
        axes.text(values[-1] + 0.01 * most, last, faster, va="center", fontsize=8.5)
        axes.set_yticks(range(last + 1), names)
        axes.invert_yaxis()
        axes.set_xlim(0, 1.32 * most)
        axes.set(xlabel=f"step ({unit})", title=title)
    return figure
