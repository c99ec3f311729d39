"""Predicted against measured times: of whole steps, and of the ops of one run."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from spipe.errors import SpipeError
from spipe.metrics import step_times
from spipe.ops import Kind
from spipe.plots.style import GROUP_COLOURS, LIGHT, MARKERS, SERIES, new_figure, style, time_unit
from spipe.timed import GROUP_OF, GROUPS, TimedStep
from spipe.trace import WARM_UP_STEPS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def predicted_against_measured(rows: Sequence[Mapping[str, Any]]) -> "Figure":
    """Rows of ``spipe validate --json``: a panel per cluster, errors below it, rows used for fitting hollow."""
    measured = [row for row in rows if row["measured_ms"] is not None]
    if not measured:
        raise SpipeError("no row has a measured time; there is nothing to plot")
    clusters = list(dict.fromkeys(row["cluster"] for row in measured))
    systems = list(dict.fromkeys(row["system"] for row in measured))
    with style():
        figure = new_figure(5.2 * len(clusters), 6.8)
        panels = figure.subplots(2, len(clusters), sharex="col", squeeze=False, height_ratios=[5, 2])
        for cluster, (axes, errors) in zip(clusters, panels.T, strict=True):
            mine = [row for row in measured if row["cluster"] == cluster]
            times = [row[key] / 1e3 for row in mine for key in ("measured_ms", "predicted_ms")]
            _diagonal(axes, 0.85 * min(times), 1.18 * max(times))
            errors.axhspan(-10, 10, color=LIGHT)
            errors.axhline(0, color="#888888", linewidth=0.8)
            for j, system in enumerate(systems):
                for used_for in ("judge", "fit"):
                    found = [row for row in mine if row["system"] == system and row["used_for"] == used_for]
                    colour = SERIES[j % len(SERIES)]
                    look: dict[str, Any] = {
                        "marker": MARKERS[j % len(MARKERS)],
                        "s": 34,
                        "linewidths": 1.2,
                        "edgecolors": colour,
                        "facecolors": colour if used_for == "judge" else "none",
                        "label": system if used_for == "judge" else None,
                        "zorder": 3,
                    }
                    at = [row["measured_ms"] / 1e3 for row in found]
                    axes.scatter(at, [row["predicted_ms"] / 1e3 for row in found], **look)
                    errors.scatter(at, [100 * (row["predicted_ms"] / row["measured_ms"] - 1) for row in found], **look)
            axes.set(ylabel="predicted step (s)", title=cluster)
            errors.set(xlabel="measured step (s)", ylabel="error (%)")
            fitted = any(row["used_for"] == "fit" for row in mine)
            axes.legend(loc="upper left", title="filled: judged, hollow: fitted" if fitted else None)
    return figure


def _diagonal(axes: "Axes", low: float, high: float) -> None:
    """Logarithmic axes, the line of equality and a band of 10 % around it."""
    import math

    ends = [low, high]
    axes.fill_between(ends, [0.9 * x for x in ends], [1.1 * x for x in ends], color=LIGHT, label="within 10 %")
    axes.plot(ends, ends, color="#888888", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    decades = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if math.log10(high / low) < 2.6 else (1,)
    ticks = [step * 10.0**decade for decade in decades for step in steps]
    ticks = [tick for tick in ticks if low < tick < high]
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.set_ticks([], minor=True)


def op_errors(predicted: TimedStep, measured: TimedStep) -> "Figure":
    """Ops of one plan, as simulated and as run: a point per kind, stage and rank, and the error of every group.

    Points are medians over microbatches and steps. The bars are seconds of a step on average over steps, as in
    ``spipe compare``, and what the prediction is off.
    """
    before, after = _durations(predicted), _durations(measured)
    points = [(key, before[key], after[key]) for key in before if after.get(key, 0.0) > 0 and before[key] > 0]
    if not points:
        raise SpipeError(f"{measured.name}: no op took any time; there is nothing to plot")
    with style():
        figure = new_figure(11.0, 5.2)
        scatter, bars = figure.subplots(1, 2, width_ratios=[1, 1.05])
        factor, unit = 1e3, "ms"
        times = [factor * value for _, *both in points for value in both]
        _diagonal(scatter, 0.6 * min(times), 1.7 * max(times))
        shown = [name for name in GROUPS if any(GROUP_OF[Kind(kind)] == name for (kind, *_), _, _ in points)]
        for number, name in enumerate(shown):
            mine = [point for point in points if GROUP_OF[Kind(point[0][0])] == name]
            scatter.scatter(
                [factor * m for _, _, m in mine], [factor * p for _, p, _ in mine], s=22,
                marker=MARKERS[number % len(MARKERS)], color=GROUP_COLOURS[name], edgecolors="#333333", linewidths=0.4,
                label=name, zorder=3,
            )  # fmt: skip
        scatter.set(
            xlabel=f"measured op ({unit})", ylabel=f"predicted op ({unit})", title="Ops: median of each kind and stage"
        )
        scatter.legend(loc="upper left", handletextpad=0.2)
        _totals(bars, predicted, measured)
    return figure


def _totals(axes: "Axes", predicted: TimedStep, measured: TimedStep) -> None:
    before, after = _group_totals(predicted), _group_totals(measured)
    names = [name for name in GROUPS if max(before.get(name, 0.0), after.get(name, 0.0)) > 0]
    factor, unit = time_unit(max([*before.values(), *after.values()]))
    most = factor * max([*before.values(), *after.values()])
    for place, name in enumerate(names):
        p, m = factor * before.get(name, 0.0), factor * after.get(name, 0.0)
        axes.barh(place - 0.2, p, height=0.38, color=GROUP_COLOURS[name], alpha=0.45)
        axes.barh(place + 0.2, m, height=0.38, color=GROUP_COLOURS[name])
        text = f"{round(100 * (p / m - 1)) or 0:+d} %".replace("+0 ", "0 ") if m > 0.001 * most else "measured ~0"
        axes.text(max(p, m) + 0.015 * most, place, text, va="center", fontsize=8)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.18 * most)
    mean = f", mean of {steps}" if (steps := len(_counted(measured))) > 1 else ""
    axes.set(
        xlabel=f"all ops of a step ({unit}{mean}); pale: predicted, full: measured",
        title="Time of all ops in a step, and how far the prediction is off",
    )


def _durations(timed: TimedStep) -> dict[tuple[int, int, int], float]:
    """(kind, stage, rank) -> median seconds over microbatches, buckets and the steps that count."""
    found: dict[tuple[int, int, int], list[float]] = {}
    program, trace = timed.program, timed.trace
    counted = _counted(timed)
    for row, i in enumerate(trace.op):
        if trace.step[row] in counted and program.kind[i] != Kind.FREE:
            key = (program.kind[i], program.stage[i], program.rank[i])
            found.setdefault(key, []).append(trace.end_s[row] - trace.start_s[row])
    return {key: median(values) for key, values in found.items()}


def _group_totals(timed: TimedStep) -> dict[str, float]:
    """Group -> seconds of all its ops in a step, on average over the steps that count."""
    totals: dict[str, float] = {}
    trace, counted = timed.trace, _counted(timed)
    for row, i in enumerate(trace.op):
        kind = Kind(timed.program.kind[i])
        if trace.step[row] in counted and kind != Kind.FREE:
            took_s = (trace.end_s[row] - trace.start_s[row]) / len(counted)
            totals[GROUP_OF[kind]] = totals.get(GROUP_OF[kind], 0.0) + took_s
    return totals


def _counted(timed: TimedStep) -> set[int]:
    """Steps after the warm-up; the step that is meant if there is none, and of a simulation."""
    if timed.trace.source == "simulated":
        return {timed.step}
    return {step for step in step_times(timed.program, timed.trace) if step >= WARM_UP_STEPS} or {timed.step}
