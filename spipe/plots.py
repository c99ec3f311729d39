"""Figures from result files: predicted against measured times, idle time by cause."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spipe.errors import SpipeError
from spipe.metrics import CAUSES
from spipe.ops import SENDS, Kind
from spipe.program import Program
from spipe.timelines import Window

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")
_COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#8C564B",
    "#7F7F7F",
    "#BCBD22",
    "#17BECF",
)
_MARKERS = ("o", "s", "^", "D")


def _figure(width: float, height: float) -> "Figure":
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save(figure: "Figure", path: Path) -> None:
    """Write a figure; the same data give the same bytes."""
    import matplotlib

    if path.suffix not in SUFFIXES:
        raise SpipeError(f"{path}: a figure's name should end in {', '.join(SUFFIXES)}")
    empty = {".png": {"Software": None}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    with matplotlib.rc_context({"svg.hashsalt": "spipe"}):
        figure.savefig(path, dpi=150, metadata=empty[path.suffix])


def predicted_against_measured(rows: Sequence[Mapping[str, Any]]) -> "Figure":
    """Rows of ``spipe validate --json``: a panel per cluster, errors below it, rows used for fitting hollow."""
    measured = [row for row in rows if row["measured_ms"] is not None]
    if not measured:
        raise SpipeError("no row has a measured time; there is nothing to plot")
    clusters = list(dict.fromkeys(row["cluster"] for row in measured))
    systems = list(dict.fromkeys(row["system"] for row in measured))
    figure = _figure(5.2 * len(clusters), 6.8)
    panels = figure.subplots(2, len(clusters), sharex="col", squeeze=False, height_ratios=[5, 2])
    for cluster, (axes, errors) in zip(clusters, panels.T, strict=True):
        mine = [row for row in measured if row["cluster"] == cluster]
        times = [row[key] / 1e3 for row in mine for key in ("measured_ms", "predicted_ms")]
        ends = [0.85 * min(times), 1.18 * max(times)]
        axes.fill_between(ends, [0.9 * x for x in ends], [1.1 * x for x in ends], color="#DDDDDD", label="within 10 %")
        axes.plot(ends, ends, color="#888888", linewidth=0.8)
        errors.axhspan(-10, 10, color="#DDDDDD")
        errors.axhline(0, color="#888888", linewidth=0.8)
        for j, system in enumerate(systems):
            for used_for in ("judge", "fit"):
                found = [row for row in mine if row["system"] == system and row["used_for"] == used_for]
                colour = _COLOURS[j % len(_COLOURS)]
                look: dict[str, Any] = {
                    "marker": _MARKERS[j % len(_MARKERS)],
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
        axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, title=cluster, ylabel="predicted step (s)")
        errors.set(xlabel="measured step (s)", ylabel="error (%)")
        ticks = [t for t in (5, 10, 20, 50, 100, 200, 400) if ends[0] < t < ends[1]]
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_ticks(ticks, [str(t) for t in ticks])
            axis.set_ticks([], minor=True)
        axes.legend(frameon=False, loc="upper left", title="filled: judged, hollow: fitted")
    return figure


def idle_time(results: Mapping[str, Mapping[str, Any]]) -> "Figure":
    """Results of ``spipe simulate --json`` by name: what the compute lanes do, and why they stand still."""
    names = list(results)
    parts: dict[str, list[float]] = {"busy": []}
    for name in names:
        result = results[name]
        busy = sum(result["busy_s"])
        whole = busy + result["idle_s"]
        parts["busy"].append(100 * busy / whole)
        for cause in CAUSES:
            parts.setdefault(cause, []).append(100 * result["bubbles"].get(cause, 0.0) / whole)
    figure = _figure(8.0, 1.4 + 0.5 * len(names))
    axes = figure.add_subplot()
    left = [0.0] * len(names)
    for j, (part, widths) in enumerate(parts.items()):
        if max(widths) < 0.05:
            continue
        colour = "#D9D9D9" if part == "busy" else _COLOURS[(j - 1) % len(_COLOURS)]
        axes.barh(range(len(names)), widths, left=left, color=colour, label=part, edgecolor="white", linewidth=0.5)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    seconds = [f"{name}\n{results[name]['predicted']['step_s']:.4g} s a step" for name in names]
    axes.set_yticks(range(len(names)), seconds)
    axes.invert_yaxis()
    axes.set(xlim=(0, 100), xlabel="time of all compute lanes (%)")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.legend(loc="outside upper center", ncols=6, frameon=False)
    return figure


_COPIES = (Kind.FETCH, Kind.OFFLOAD_GRAD, Kind.LOAD_STAGE_INPUT, Kind.STORE_STAGE_INPUT, Kind.STORE_WEIGHTS)
_TRACKS: dict[str, dict[Kind, tuple[str, str]]] = {
    "compute": {
        Kind.FORWARD: ("forward", _COLOURS[0]),
        Kind.RECOMPUTE: ("recompute", _COLOURS[5]),
        Kind.BACKWARD: ("backward", _COLOURS[2]),
        Kind.WEIGHT_GRADIENT: ("weight gradient", _COLOURS[7]),
    },
    "optimizer": {Kind.STEP: ("step", _COLOURS[1])},
    "copies": dict.fromkeys(_COPIES, ("copies", _COLOURS[4])),
    "messages": dict.fromkeys(sorted(SENDS), ("messages", _COLOURS[3])),
}
"""Rows of a timeline: what is shown there, by kind of op, with its name and colour."""


def timelines(program: Program, windows: Mapping[str, Window]) -> "Figure":
    """A step of every window on one axis of time: what the compute lane, optimizer and copies of each rank do."""
    tracks = [
        (rank, name, track)
        for rank in range(program.layout.num_ranks)
        for track, kinds in _TRACKS.items()
        for name in windows
        if any(program.rank[i] == rank and program.kind[i] in kinds for i in range(len(program)))
    ]
    figure = _figure(12.0, 1.2 + 0.26 * len(tracks))
    axes = figure.add_subplot()
    legend: dict[str, Any] = {}
    rows = {name: window.rows() for name, window in windows.items()}
    for place, (rank, name, track) in enumerate(tracks):
        window = windows[name]
        for kind, (text, colour) in _TRACKS[track].items():
            trace = window.trace
            mine = [row for row in rows[name] if program.kind[i := trace.op[row]] == kind and program.rank[i] == rank]
            bars = [(trace.start_s[row] - window.begin_s, trace.end_s[row] - trace.start_s[row]) for row in mine]
            if bars:
                drawn = axes.broken_barh(bars, (place - 0.4, 0.8), facecolors=colour, edgecolors="none")
                legend.setdefault(text, drawn)
    axes.set_yticks(range(len(tracks)), [f"rank {rank} {track}, {name}" for rank, name, track in tracks], fontsize=7)
    axes.invert_yaxis()
    longest = max(window.end_s - window.begin_s for window in windows.values())
    ends = sorted((window.end_s - window.begin_s, name) for name, window in windows.items())
    for number, (end, name) in enumerate(ends):
        axes.axvline(end, color="#444444", linewidth=0.8, linestyle=("-", "--", ":")[number % 3])
        axes.text(end, -0.7, f" {name}: {end:.4g} s ", fontsize=7, va="bottom", ha=("right", "left")[number % 2])
    axes.set(xlim=(0, 1.12 * longest), xlabel="seconds from the start of the step")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(legend.values(), legend.keys(), loc="outside upper center", ncols=7, frameon=False)
    return figure


def what_if(rows: Sequence[Mapping[str, Any]]) -> "Figure":
    """Rows of ``spipe whatif --json``: tokens per second of every offer, its best upgrade, and dollars by rent."""
    bases = [row for row in rows if not row["upgrade"]]
    names = [
        row["offer"] if len({r["model"] for r in bases}) == 1 else f"{row['model']}, {row['offer']}" for row in bases
    ]
    figure = _figure(10.5, 1.4 + 0.55 * len(bases))
    speed, cost = figure.subplots(1, 2, sharey=True)
    places = list(range(len(bases)))[::-1]
    fastest = max((row["tokens_per_s"] or 0.0 for row in rows), default=0.0)
    dearest = max((row["rent_dollars_per_billion_tokens"] or 0.0 for row in rows), default=0.0)
    for place, base in zip(places, bases, strict=True):
        mine = [
            row for row in rows if row["upgrade"] and (row["model"], row["offer"]) == (base["model"], base["offer"])
        ]
        best = max((row for row in mine if row["feasible"]), key=lambda row: row["tokens_per_s"], default=None)
        own = base["tokens_per_s"] or 0.0
        speed.barh(place, own, height=0.6, color=_COLOURS[0])
        end, text = own, f"{own:,.0f}" if own else "does not fit"
        if best is not None and best["tokens_per_s"] > 1.005 * own:
            end = best["tokens_per_s"]
            speed.barh(place, end - own, left=own, height=0.6, color=_COLOURS[5], alpha=0.6)
            text += f"   with {best['upgrade']}: {end:,.0f}"
        speed.text(end + 0.02 * fastest, place, text, va="center", fontsize=8)
        shown = base if base["feasible"] or best is None else best
        rent = shown["rent_dollars_per_billion_tokens"]
        if rent is not None:
            cost.barh(place, rent, height=0.6, color=_COLOURS[1], alpha=1.0 if shown is base else 0.5)
            cost.text(rent + 0.02 * dearest, place, f"{rent:,.0f}", va="center", fontsize=8)
    speed.set_yticks(places, names)
    speed.set_xlim(0, 1.6 * (fastest or 1.0))
    cost.set_xlim(0, 1.25 * (dearest or 1.0))
    speed.set_xlabel("tokens per second (light: with the upgrade that helps most)")
    cost.set_xlabel("dollars of rent per billion tokens (example prices)")
    for axes in (speed, cost):
        axes.spines[["top", "right"]].set_visible(False)
    return figure
