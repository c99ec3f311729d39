"""What a search found: speed against memory, and which plans no other beats in all three."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from spipe.errors import SpipeError
from spipe.plots.style import BLACK, MARKERS, SERIES, bytes_unit, new_figure, style, time_unit

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PLACES = (("rank_bytes", "memory of the fullest accelerator"), ("host_bytes", "memory of the fullest host"))


def search_front(result: Mapping[str, Any]) -> "Figure":
    """A result of ``spipe search --json``: every simulated plan, and the front as a line."""
    candidates, front = result["candidates"], result["front"]
    if not candidates:
        raise SpipeError("the search simulated no plan; there is nothing to plot")
    schedules = list(dict.fromkeys(row["schedule"] for row in candidates))
    factor, unit = time_unit(max(row["step_s"] for row in candidates))
    with style():
        figure = new_figure(10.0, 4.4)
        for axes, (key, title) in zip(figure.subplots(1, 2, sharey=True), _PLACES, strict=True):
            divisor, size = bytes_unit(max(row[key] for row in candidates))
            for number, schedule in enumerate(schedules):
                mine = [row for row in candidates if row["schedule"] == schedule]
                axes.scatter(
                    [row[key] / divisor for row in mine], [factor * row["step_s"] for row in mine], s=26, alpha=0.75,
                    marker=MARKERS[number % len(MARKERS)], color=SERIES[number % len(SERIES)], linewidths=0,
                    label=schedule,
                )  # fmt: skip
            steps = _least(front, key)
            axes.step(
                [row[key] / divisor for row in steps], [factor * row["step_s"] for row in steps], where="post",
                color=BLACK, linewidth=1.0, label="not beaten: less memory is slower",
            )  # fmt: skip
            if result.get("lower_bound_s"):
                axes.axhline(factor * result["lower_bound_s"], color="#888888", linestyle="--", linewidth=0.9,
                             label="no plan of this search is faster")  # fmt: skip
            axes.set_xlabel(f"{title} ({size})")
            axes.set_ylim(bottom=0)
            axes.margins(x=0.08)
        figure.axes[0].set_ylabel(f"predicted step ({unit})")
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside upper left", ncols=6)
    return figure


def _least(front: Sequence[Mapping[str, Any]], key: str) -> list[Mapping[str, Any]]:
    """Of the front, the rows that are fastest for their memory of one place, by ascending memory."""
    kept: list[Mapping[str, Any]] = []
    for row in sorted(front, key=lambda row: (row[key], row["step_s"])):
        if not kept or row["step_s"] < kept[-1]["step_s"]:
            kept.append(row)
    return kept
