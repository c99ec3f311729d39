"""A step of several traces of one program, such as a prediction and a run, on one axis of time."""

from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING

from spipe.plots.style import CAUSE_COLOURS, DARK, GROUP_COLOURS, legend, new_figure, style, time_unit
from spipe.plots.timeline import Box, boxes_of, draw_idle, draw_lane
from spipe.program import Program
from spipe.show import seconds
from spipe.timed import GROUPS, TimedStep

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from spipe.timelines import Window

LEAST_SHARE = 0.004
"""Lanes that are busy for less of the step than this in all traces are left out."""
MOST_ROWS = 60
"""With more rows than this, only compute lanes are shown."""
STRIP, CLOSE, BETWEEN_LANES, BETWEEN_RANKS = 0.28, 0.1, 0.35, 0.9
"""Heights of gaps and of the strip below a compute lane, where a lane has 1."""


def timelines(program: Program, windows: "Mapping[str, Window]") -> "Figure":
    """Lanes of each rank with a row for every window, why compute is idle in each, and where each step ends."""
    steps = {name: TimedStep(name, program, window.trace, 0) for name, window in windows.items()}
    boxes = {
        name: boxes_of(timed, windows[name].begin_s, windows[name].end_s, merge_peers=True)
        for name, timed in steps.items()
    }
    lasts = {name: window.end_s - window.begin_s for name, window in windows.items()}
    longest = max(lasts.values())
    lanes = [
        lane
        for lane in next(iter(steps.values())).lanes(merge_peers=True)
        if any(_seconds(boxes[name].get(lane, [])) > LEAST_SHARE * lasts[name] for name in windows)
    ]
    if len(lanes) * len(windows) > MOST_ROWS:
        lanes = [lane for lane in lanes if lane[1] == "compute"]
    factor, unit = time_unit(longest)
    with style():
        tall = _height(lanes, len(windows))
        unit_in = min(0.24, 30.0 / tall)
        figure = new_figure(11.0, 1.9 + unit_in * tall)
        axes = figure.add_subplot()
        at, used, causes = 0.0, set(), set()
        ticks: list[tuple[float, str, bool]] = []
        for number, (rank, lane) in enumerate(lanes):
            if number:
                at += BETWEEN_LANES if lanes[number - 1][0] == rank else BETWEEN_RANKS
            for order, (name, window) in enumerate(windows.items()):
                at += CLOSE if order else 0.0
                mine = boxes[name].get((rank, lane), [])
                if mine:
                    used |= draw_lane(axes, mine, at, 1.0, 0.0, lasts[name], factor)
                title = (f"rank {rank}  {lane}: " if lane == "compute" else f"{lane}: ") if order == 0 else ""
                ticks.append((at + 0.5, title + name, lane == "compute" and order == 0))
                at += 1.0
                if lane == "compute" and window.idle:
                    begin = window.begin_s
                    idle = [(start - begin, end - begin, why) for start, end, why in window.idle[rank]]
                    causes |= draw_idle(axes, idle, at, STRIP, 0.0, lasts[name], factor)
                    at += STRIP
        font = max(5.0, min(8.0, 36 * unit_in))
        axes.set_yticks([y for y, *_ in ticks], [text for _, text, _ in ticks], fontsize=font)
        axes.tick_params(axis="y", length=0)
        for label, (*_, bold) in zip(axes.get_yticklabels(), ticks, strict=True):
            label.set_fontweight("bold" if bold else "normal")
        for number, (name, last) in enumerate(lasts.items()):
            axes.axvline(factor * last, color=DARK, linewidth=0.9, linestyle=("-", "--", ":")[number % 3], label=name)
        axes.set_ylim(at + 0.2, -0.2)
        axes.set(xlim=(0, 1.01 * factor * longest), xlabel=f"time since the verdict of the step before ({unit})")
        axes.spines["left"].set_visible(False)
        names = ("solid", "dashed", "dotted")
        axes.set_title("step:  " + ",  ".join(
            f"{name} {seconds(last)} ({names[number % 3]} line)" for number, (name, last) in enumerate(lasts.items())
        ))  # fmt: skip
        legend(figure, {group: GROUP_COLOURS[group] for group in GROUPS if group in used}, columns=11)
        entries = {cause: colour for cause, colour in CAUSE_COLOURS.items() if cause in causes}
        legend(figure, entries, columns=11, place="outside lower left", title="strip below compute: why it is idle")
        return figure


def _seconds(boxes: list[Box]) -> float:
    return sum(box.end - box.start for box in boxes)


def _height(lanes: list[tuple[int, str]], rows: int) -> float:
    """Of all lanes, in rows."""
    gaps = sum(BETWEEN_LANES if a[0] == b[0] else BETWEEN_RANKS for a, b in pairwise(lanes))
    strips = STRIP * sum(lane == "compute" for _, lane in lanes)
    return len(lanes) * (rows + CLOSE * (rows - 1)) + rows * strips + gaps
