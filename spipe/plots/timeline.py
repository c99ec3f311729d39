"""Pipeline Gantt: what every lane of every rank does in a step, and why its compute stands still."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from spipe.errors import SpipeError
from spipe.ops import COMPUTE, Kind
from spipe.plots.style import CAUSE_COLOURS, GROUP_COLOURS, legend, new_figure, style, text_on, time_unit, wrapped
from spipe.show import seconds
from spipe.timed import GROUP_OF, GROUPS, TimedStep

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMNS = 700
"""Slices of the window that a lane of many short ops is aggregated to, at most."""
OPS_PER_SLICE = 8
"""So that how many ops begin in a slice does not change much from one to the next."""
HAIRLINE = 0.06
"""Share of its height that a lane is filled to where it is hardly busy, so that it is seen to be busy at all."""
MOST_ROWS = 36
"""With more lanes than this, those to all peers of a rank are one."""
WIDTH_IN = 11.0


@dataclass(frozen=True)
class Box:
    """One op in the window. Times in seconds from the window's start; ``track`` separates ops that overlap."""

    start: float
    end: float
    group: str
    text: str
    track: int = 0


def timeline(
    timed: TimedStep,
    *,
    window_s: tuple[float, float] | None = None,
    ranks: Sequence[int] | None = None,
    lanes: str = "all",
) -> "Figure":
    """Lanes over time, rank by rank.

    Args:
        timed: the step; ops of its neighbours that reach into the window are shown, too.
        window_s: part of the step to show, seconds from its start; None: all of it.
        ranks: which ranks; None: all.
        lanes: ``all``, or ``compute`` for one row a rank.

    Raises:
        SpipeError: if the window or a rank is not in the step, or the step is not complete.
    """
    metrics = timed.metrics()
    begin, finish = metrics.window_s
    if window_s is not None:
        low, high = window_s
        if not 0 <= low < high or low >= metrics.duration_s:
            raise SpipeError(
                f"window {1e3 * low:g} to {1e3 * high:g} ms should lie within the step, which takes "
                f"{1e3 * metrics.duration_s:.4g} ms"
            )
        begin, finish = begin + low, min(begin + high, finish)
    wanted = list(range(timed.program.layout.num_ranks)) if ranks is None else list(ranks)
    for rank in wanted:
        if rank not in range(timed.program.layout.num_ranks):
            raise SpipeError(f"rank {rank} is not in the plan; it has 0 to {timed.program.layout.num_ranks - 1}")
    many = sum(rank in wanted for rank, _ in timed.lanes()) > MOST_ROWS
    boxes = boxes_of(timed, begin, finish, merge_peers=many)
    rows = [
        (rank, lane)
        for rank, lane in timed.lanes(many)
        if rank in wanted and (lane == "compute" or (lanes == "all" and (rank, lane) in boxes))
    ]
    if not rows:
        raise SpipeError(f"{timed.name}: the plan gives the chosen ranks nothing to do; choose others")
    idle = [[(max(a, begin) - begin, min(b, finish) - begin, cause) for a, b, cause in rank if b > begin and a < finish]
            for rank in metrics.idle]  # fmt: skip
    with style():
        return _draw(timed, rows, boxes, idle, metrics.window_s, begin, finish)


def boxes_of(
    timed: TimedStep, begin: float, finish: float, merge_peers: bool = False
) -> dict[tuple[int, str], list[Box]]:
    """(rank, lane in words) -> its ops that reach into the window, of all steps, in order of their start."""
    program, trace = timed.program, timed.trace
    groups = [GROUP_OF[Kind(kind)] for kind in program.kind]
    places = [(rank, timed.lane(i, merge_peers)) for i, rank in enumerate(program.rank)]
    found: dict[tuple[int, str], list[tuple[float, float, int]]] = {}
    for row, i in enumerate(trace.op):
        start, end = trace.start_s[row], trace.end_s[row]
        if end > begin and start < finish and program.kind[i] != Kind.FREE:
            found.setdefault(places[i], []).append((max(start, begin) - begin, min(end, finish) - begin, i))
    made: dict[tuple[int, str], list[Box]] = {}
    for place, ops in found.items():
        tracks: list[float] = []
        for start, end, i in sorted(ops):
            track = next((t for t, free in enumerate(tracks) if free <= start + 2e-6), len(tracks))
            tracks[track : track + 1] = [end]
            made.setdefault(place, []).append(
                Box(
                    start,
                    end,
                    groups[i],
                    _text(program.stage_name(program.stage[i]), program.kind[i], program.index[i]),
                    track,
                )
            )
    return made


def _text(stage: str, kind: int, index: int) -> str:
    return f"{stage} {'m' if kind in COMPUTE else ''}{index}" if kind in COMPUTE else stage


def _draw(
    timed: TimedStep,
    rows: list[tuple[int, str]],
    boxes: dict[tuple[int, str], list[Box]],
    idle: list[list[tuple[float, float, str]]],
    step_s: tuple[float, float],
    begin: float,
    finish: float,
) -> "Figure":
    heights = [1.0 if lane == "compute" else 0.55 for _, lane in rows]
    strips = [0.28 if lane == "compute" else 0.0 for _, lane in rows]
    gaps = [0.0 if n == 0 else 0.55 if rank != rows[n - 1][0] else 0.12 for n, (rank, _) in enumerate(rows)]
    total = sum(heights) + sum(strips) + sum(gaps)
    unit_in = min(0.34, max(26.0 / total, 0.1))
    figure = new_figure(WIDTH_IN, 1.5 + unit_in * total)
    axes = figure.add_subplot()
    factor, unit = time_unit(finish - step_s[0])
    offset, at = begin - step_s[0], 0.0
    used: set[str] = set()
    causes: set[str] = set()
    labels: list[tuple[float, str]] = []
    font = max(5.0, min(8.5, 24 * unit_in))
    for (rank, lane), height, strip, gap in zip(rows, heights, strips, gaps, strict=True):
        if gap > 0.5:
            axes.axhline(at + gap / 2, color="#BBBBBB", linewidth=0.6)
        at += gap
        used |= draw_lane(axes, boxes.get((rank, lane), []), at, height, offset, finish - begin, factor)
        if lane == "compute":
            causes |= draw_idle(axes, idle[rank], at + height, strip, offset, finish - begin, factor)
        labels.append((at + height / 2, f"rank {rank}  {lane}" if lane == "compute" else lane))
        at += height + strip
    axes.set_yticks([y for y, _ in labels], [text for _, text in labels], fontsize=font)
    axes.tick_params(axis="y", length=0)
    for label in axes.get_yticklabels():
        if label.get_text().startswith("rank"):
            label.set_fontweight("bold")
    axes.set_ylim(at + 0.1, -0.1)
    axes.set_xlim(factor * offset, factor * (offset + finish - begin))
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(f"time since the verdict of the step before ({unit})" if _has_before(timed) else f"time ({unit})")
    ranks = sorted({rank for rank, _ in rows})
    idle_s = sum(end - start for rank in ranks for start, end, _ in idle[rank])
    part = "" if (begin, finish) == step_s else f"{seconds(finish - begin)} of "
    title = (
        f"{timed.name}: {timed.trace.source} step {timed.step}, {part}{seconds(step_s[1] - step_s[0])}, "
        f"compute lanes {100 * (1 - idle_s / (finish - begin) / len(ranks)):.1f} % busy"
    )
    axes.set_title(wrapped(title, 120))
    entries = {name: GROUP_COLOURS[name] for name in GROUPS if name in used}
    legend(figure, entries, columns=11)
    idle_entries = {cause: CAUSE_COLOURS[cause] for cause in CAUSE_COLOURS if cause in causes}
    legend(figure, idle_entries, columns=11, place="outside lower left", title="strip below compute: why it is idle")
    return figure


def _has_before(timed: TimedStep) -> bool:
    return timed.step - 1 in set(timed.trace.step)


def draw_lane(
    axes: "Axes", boxes: list[Box], top: float, height: float, offset: float, duration: float, factor: float
) -> set[str]:
    """Draw a lane; returns the groups seen in it. Where ops are thinner than a slice, what fills each slice instead."""
    if not boxes:
        return set()
    slice_s = duration / COLUMNS
    tracks = 1 + max(box.track for box in boxes)
    short = sum(box.end - box.start < 1.5 * slice_s for box in boxes)
    tall = height >= 1.0
    if len(boxes) > COLUMNS * (2.0 if tall else 0.5) or (len(boxes) > 150 and short > 0.5 * len(boxes) and not tall):
        parts = [(box.start, box.end, box.group) for box in boxes]
        return _slices(axes, parts, GROUP_COLOURS, top, height, offset, duration, factor)
    by_group: dict[str, list[Box]] = {}
    for box in boxes:
        by_group.setdefault(box.group, []).append(box)
    each = height / tracks
    for group, mine in by_group.items():
        spans = []
        for box in mine:
            wide_s = max(box.end - box.start, 0.5 * slice_s)
            left = min(box.start, duration - wide_s)  # what ends the step is seen, too
            spans.append((factor * (offset + left), top + box.track * each, factor * wide_s, each))
        _rectangles(axes, spans, GROUP_COLOURS[group])
    wide = [box for box in boxes if box.end - box.start > 4 * slice_s]
    at = [factor * (offset + box.start) for box in wide]
    upper = [top + box.track * each for box in wide]
    gap = [math.nan] * len(wide)
    x, y = np.array([at, at, gap]).T.ravel(), np.array([upper, [low + each for low in upper], gap]).T.ravel()
    axes.plot(x, y, color="white", linewidth=0.5)  # between ops
    for box in wide:
        _write(axes, box, top, each, offset, duration, factor)
    return set(by_group)


def _write(axes: "Axes", box: Box, top: float, height: float, offset: float, duration: float, factor: float) -> None:
    """The op's stage and microbatch inside its box, if they fit."""
    room_in = (box.end - box.start) / duration * (WIDTH_IN - 1.6)
    size = 6.0
    if height < 0.9 or room_in < 0.075 * len(box.text) * size / 7.0 + 0.04:
        return
    axes.text(
        factor * (offset + (box.start + box.end) / 2),
        top + height / 2,
        box.text,
        fontsize=size,
        ha="center",
        va="center",
        color=text_on(GROUP_COLOURS[box.group]),
        clip_on=True,
    )


def _slices(
    axes: "Axes",
    spans: Sequence[tuple[float, float, str]],
    colours: Mapping[str, str],
    top: float,
    height: float,
    offset: float,
    duration: float,
    factor: float,
) -> set[str]:
    """Stacked shares of each slice of time: the filled height is the share of it that (start, end, name) cover.

    Where that is hardly anything, a hairline says that there is something. Returns the names.
    """
    names = [name for name in colours if any(name == found for *_, found in spans)]
    edges = slices(np.array([start for start, *_ in spans]), offset, duration)
    share = np.zeros((len(names), len(edges) - 1))
    for number, name in enumerate(names):
        mine = np.array([(start, end) for start, end, found in spans if found == name])
        share[number] = covered(mine[:, 0], mine[:, 1], edges)
    busy = share.sum(axis=0)
    share /= np.where(busy > 1, busy, 1.0)  # several at a time: their mix
    share *= np.where((busy > 0) & (busy < HAIRLINE), HAIRLINE / np.maximum(busy, 1e-12), 1.0)
    bottom = np.full(len(edges) - 1, top + height)
    for number, name in enumerate(names):
        upper = bottom - height * share[number]
        axes.stairs(upper, factor * (offset + edges), baseline=bottom, fill=True, color=colours[name], linewidth=0)
        bottom = upper
    return set(names)


def slices(starts: np.ndarray, offset: float, duration: float) -> np.ndarray:
    """Edges of slices of the window (seconds from its start): round numbers of the axis, which begins at ``offset``.

    They are so long that OPS_PER_SLICE begin in each, and at most a two-hundredth of the window.
    """
    usual = float(np.median(np.diff(np.sort(starts)))) if len(starts) > 1 else 0.0
    least = max(duration / COLUMNS, min(OPS_PER_SLICE * usual, duration / 200))
    power = 10.0 ** math.floor(math.log10(least))
    length = next(digit * power for digit in (1, 2, 5, 10) if digit * power >= least * (1 - 1e-9))
    inside = np.arange(math.floor(offset / length) + 1, math.ceil((offset + duration) / length)) * length - offset
    return np.array([0.0, *inside[(inside > 0) & (inside < duration)], duration])


def covered(starts: np.ndarray, ends: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Share of each slice between ``edges`` that the intervals cover, added up over intervals."""
    order_s, order_e = np.sort(starts), np.sort(ends)
    # seconds covered before t = sum over intervals of clip(t - start) - clip(t - end)
    before = _ramp(order_s, edges) - _ramp(order_e, edges)
    return np.asarray(np.diff(before) / np.diff(edges))


def _ramp(points: np.ndarray, at: np.ndarray) -> np.ndarray:
    """For each ``t`` of ``at``: the sum of ``t - p`` over the points ``p`` before it."""
    count = np.searchsorted(points, at)
    sums = np.concatenate([[0.0], np.cumsum(points)])
    return np.asarray(count * at - sums[count])


def draw_idle(
    axes: "Axes",
    idle: list[tuple[float, float, str]],
    top: float,
    height: float,
    offset: float,
    duration: float,
    factor: float,
) -> set[str]:
    """The thin strip below a compute lane that says why it is idle; returns the causes."""
    if len(idle) > COLUMNS / 2:
        return _slices(axes, idle, CAUSE_COLOURS, top, height, offset, duration, factor)
    by_cause: dict[str, list[tuple[float, float, float, float]]] = {}
    for start, end, cause in idle:
        by_cause.setdefault(cause, []).append((factor * (offset + start), top, factor * (end - start), height))
    for cause, spans in by_cause.items():
        _rectangles(axes, spans, CAUSE_COLOURS[cause])
    return set(by_cause)


def _rectangles(axes: "Axes", spans: list[tuple[float, float, float, float]], colour: str) -> None:
    """Boxes (x, y, width, height) of one colour as one path, which keeps vector files small."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    x, y, width, height = np.array(spans).T
    corners = [(x, y), (x + width, y), (x + width, y + height), (x, y + height), (x, y)]
    points = np.array(corners).transpose(2, 0, 1).reshape(-1, 2)
    codes = np.tile([Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY], len(spans))
    axes.add_patch(PathPatch(Path(points, codes), facecolor=colour, linewidth=0))
