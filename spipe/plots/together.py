"""A step of several traces of one program, such as a prediction and a run, on one axis of time."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from spipe.ops import Kind
from spipe.plots.style import DARK, GROUP_COLOURS, legend, new_figure, style, time_unit
from spipe.program import Program
from spipe.timed import GROUP_OF, GROUPS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from spipe.timelines import Window

_TRACKS = {
    "compute": ("forward", "recompute", "backward", "weight gradient"),
    "optimizer": ("optimizer",),
    "copies": ("weights", "gradients"),
    "messages": ("activations", "activation gradients", "stage inputs"),
}
"""Rows of a rank -> the groups of ops that they show."""


def timelines(program: Program, windows: "Mapping[str, Window]") -> "Figure":
    """What compute, optimizer, copies and messages of each rank do, a row for every window, and where the steps end."""
    track_of = {group: track for track, groups in _TRACKS.items() for group in groups}
    bars: dict[tuple[int, str, str], dict[str, list[tuple[float, float]]]] = {}
    longest = max(window.end_s - window.begin_s for window in windows.values())
    factor, unit = time_unit(longest)
    for name, window in windows.items():
        trace = window.trace
        for row in window.rows():
            i = trace.op[row]
            group = GROUP_OF[Kind(program.kind[i])]
            if group in track_of:
                start, length = trace.start_s[row] - window.begin_s, trace.end_s[row] - trace.start_s[row]
                mine = bars.setdefault((program.rank[i], track_of[group], name), {})
                mine.setdefault(group, []).append((factor * start, factor * length))
    rows = [
        (rank, track, name)
        for rank in range(program.layout.num_ranks)
        for track in _TRACKS
        for name in windows
        if (rank, track, name) in bars
    ]
    used = {group for row in rows for group in bars[row]}
    with style():
        figure = new_figure(11.0, 1.4 + 0.26 * len(rows))
        axes = figure.add_subplot()
        for place, shown in enumerate(rows):
            for group, spans in bars[shown].items():
                axes.broken_barh(spans, (place - 0.4, 0.8), facecolors=GROUP_COLOURS[group], edgecolors="none")
        axes.set_yticks(range(len(rows)), [f"rank {rank} {track}, {name}" for rank, track, name in rows], fontsize=7)
        axes.set_ylim(len(rows) - 0.4, -1.6)
        ends = sorted((factor * (window.end_s - window.begin_s), name) for name, window in windows.items())
        for number, (end, name) in enumerate(ends):
            axes.axvline(end, color=DARK, linewidth=0.8, linestyle=("-", "--", ":")[number % 3])
            side = ("right", "left")[number % 2]
            axes.text(end, -0.7, f" {name}: {end:.4g} {unit} ", fontsize=7, va="bottom", ha=side)
        axes.set(xlim=(0, 1.12 * factor * longest), xlabel=f"time from the start of the step ({unit})")
        legend(figure, {group: GROUP_COLOURS[group] for group in GROUPS if group in used}, columns=11)
        return figure
