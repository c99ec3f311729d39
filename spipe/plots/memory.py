"""Memory over a step: what every accelerator and host has in use, item by item, below what is planned and usable."""

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from spipe.memory import memory
from spipe.occupancy import DEVICE_ITEMS, occupancy
from spipe.plots.style import (
    AMBER,
    BLUE,
    DARK,
    GREEN,
    LIGHT,
    ORANGE,
    PURPLE,
    SKY,
    YELLOW,
    bytes_unit,
    legend,
    new_figure,
    style,
    time_unit,
)
from spipe.show import size
from spipe.timed import TimedStep

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ITEM_COLOURS = {
    **dict(zip(DEVICE_ITEMS, ("#D0D0D0", DARK, AMBER, ORANGE, YELLOW, PURPLE, BLUE), strict=True)),
    "saved by forwards": SKY,
    "master weights and moments": "#8C8C8C",
    "undo data": "#BDBDBD",
    "ranks": GREEN,
}
_WORDS = {"ranks": "what the ranks hold"}
SLICES = 350
"""Moments that are drawn of a step with more."""
MOST_PANELS = 8
"""Ranks and hosts that get a panel; of more, the fullest."""

FAR = 2.5
"""Usable memory above so many times what is planned is not drawn to scale."""


def memory_over_time(timed: TimedStep) -> "Figure":
    """A panel per rank and per host (of many, the fullest): items in use over time.

    Dashed: what the plan reserves, from the start of a run to its end. Solid: what is usable; an arrow where it is far
    above.
    """
    assert timed.plan is not None
    used, report = occupancy(timed), memory(timed.plan)
    ranks = _fullest(report.rank_bytes)
    hosts = _fullest(report.host_bytes)[: max(1, MOST_PANELS - len(ranks))]
    panels = [(f"rank {r}", used.ranks[r], report.rank_bytes[r], report.rank_capacity_bytes) for r in ranks]
    panels += [(f"host {h}", used.hosts[h], report.host_bytes[h], report.host_capacity_bytes) for h in hosts]
    columns = 2 if len(panels) > 1 else 1
    rows = -(-len(panels) // columns)
    with style():
        figure = new_figure(5.4 * columns, 0.8 + 2.3 * rows)
        factor, unit = time_unit(float(used.times_s[-1]))
        for number, (name, items, planned, capacity) in enumerate(panels, 1):
            axes = figure.add_subplot(rows, columns, number)
            _panel(axes, factor * used.times_s, items, planned, capacity)
            axes.set_title(name, fontsize=9)
            if number > len(panels) - columns:
                axes.set_xlabel(f"time in the step ({unit})")
        names = [name for name in ITEM_COLOURS if any(name in items for _, items, _, _ in panels)]
        legend(figure, {_WORDS.get(name, name): ITEM_COLOURS[name] for name in names}, columns=5 if columns == 2 else 3)
    return figure


def _fullest(num_bytes: tuple[int, ...]) -> list[int]:
    most = sorted(range(len(num_bytes)), key=lambda place: -num_bytes[place])
    return sorted(most[: MOST_PANELS - 1])


def _thinned(times: np.ndarray, items: dict[str, np.ndarray]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Of many times, the fullest moment of each of SLICES slices."""
    if len(times) <= SLICES or not items:
        return times, items
    total = sum(items.values(), np.zeros(len(times)))
    edges = np.unique(np.searchsorted(times, np.linspace(times[0], times[-1], SLICES + 1)[:-1]))
    most = [begin + int(np.argmax(total[begin:end])) for begin, end in pairwise([*edges, len(times)])]
    kept = np.unique([0, *most, len(times) - 1])
    return times[kept], {name: values[kept] for name, values in items.items()}


def _panel(axes: "Axes", times: np.ndarray, items: dict[str, np.ndarray], planned: float, capacity: float) -> None:
    top = max(planned, float(np.max(sum(items.values()))) if items else 0.0)
    near = capacity <= FAR * top
    times, items = _thinned(times, items)
    divisor, unit = bytes_unit(top)
    base = np.zeros(len(times))
    for name, colour in ITEM_COLOURS.items():
        if name in items:
            upper = base + items[name] / divisor
            axes.fill_between(times, base, upper, step="post", color=colour, linewidth=0)
            base = upper
    axes.axhline(planned / divisor, color="#222222", linestyle="--", linewidth=1)
    end = times[-1]
    limit = 1.22 * (capacity if near else top) / divisor
    crossed = near and 0 <= capacity - planned < 0.09 * limit * divisor  # the line of what is usable would cross it
    above = capacity if crossed else planned
    axes.text(end, above / divisor + 0.012 * limit, f"planned {size(planned)}", ha="right", va="bottom", fontsize=7.5)
    if near:
        axes.axhline(capacity / divisor, color="#B00020", linewidth=1.2)
        axes.text(
            0,
            capacity / divisor + 0.012 * limit,
            f" usable {size(capacity)}",
            va="bottom",
            fontsize=7.5,
            color="#B00020",
        )
    else:
        axes.text(0, 0.98 * limit, f" \u2191 usable {size(capacity)}", va="top", fontsize=7.5, color="#B00020")
    axes.set_xlim(0, end)
    axes.set_ylim(0, limit)
    axes.set_ylabel(f"in use ({unit})")
    axes.patch.set_facecolor("white")
    axes.grid(axis="y", color=LIGHT, linewidth=0.5)
