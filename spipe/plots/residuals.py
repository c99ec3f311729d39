"""What a calibration left unexplained."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spipe.errors import SpipeError
from spipe.plots.style import BLUE, ORANGE, SKY, new_figure, style, wrapped
from spipe.show import seconds
from spipe.show_measured import quantity

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def residuals(result: Mapping[str, Any]) -> "Figure":
    """A result of ``spipe calibrate --json``: spread around every fitted value, and what runs are predicted to take.

    Raises:
        SpipeError: if nothing was fitted.
    """
    fits, runs = result["fits"], [*result["runs"], *result.get("held_out", ())]
    if not fits:
        raise SpipeError("nothing was fitted; there is nothing to plot")
    names = list(dict.fromkeys(row.get("name", f"run {row.get('run')}") for row in runs))
    beside = 1.2 + 0.5 * len(names)
    with style():
        height = max(1.3 + 0.24 * len(fits), beside + 0.5)
        figure = new_figure(10.5, height)
        cells = figure.add_gridspec(2, 2, width_ratios=[1.5, 1], height_ratios=[beside, height - beside])
        _fits(figure.add_subplot(cells[:, 0]), fits)
        steps, below = figure.add_subplot(cells[0, 1]), figure.add_subplot(cells[1, 1])
        _runs(steps, names, result["runs"], result.get("held_out", ()))
        below.axis("off")
        below.legend(*steps.get_legend_handles_labels(), loc="upper center", ncols=2)
    return figure


def _fits(axes: "Axes", fits: list[Mapping[str, Any]]) -> None:
    values = [100 * row["spread"] for row in fits]
    most = max([*values, 1.0])
    axes.hlines(range(len(fits)), 0, values, color=BLUE, linewidth=1.2)
    axes.scatter(values, range(len(fits)), color=BLUE, s=18, zorder=3)
    for place, row in enumerate(fits):
        samples = f"{row['samples']} sample{'s' if row['samples'] > 1 else ''}" if row["samples"] else "from others"
        text = f"{quantity(row['value'], row['unit'])}, {samples}"
        axes.text(values[place] + 0.025 * most, place, text, va="center", fontsize=7.5, color="#444444")
    axes.set_yticks(range(len(fits)), [row["what"] for row in fits], fontsize=8)
    axes.set_ylim(len(fits) - 0.4, -0.6)
    axes.set_xlim(0, 1.45 * most)
    axes.set(xlabel="spread of the samples around the fit (%)", title="Fitted values")


def _runs(axes: "Axes", names: list[str], fitted: list[Mapping[str, Any]], held_out: list[Mapping[str, Any]]) -> None:
    """Errors of the runs: by the fit to all, and, where there is one, by a fit that had not seen them."""
    limit = 1.9 * max([*(100 * abs(row["error"]) for row in (*fitted, *held_out)), 2.0])
    measured: dict[str, float] = {}
    kinds = [("seen by the fit", fitted, SKY), ("not seen by the fit", held_out, ORANGE)]
    for order, (label, rows, colour) in enumerate(kinds):
        height = 0.36 if held_out else 0.5
        shift = (order - 0.5) * height if held_out else 0.0
        for number, row in enumerate(rows):
            name = row.get("name", f"run {row.get('run')}")
            measured[name] = row["measured_s"]
            place, error = names.index(name) + shift, 100 * row["error"]
            axes.barh(place, error, color=colour, height=height, label=None if number else label)
            side, gap = ("left", 0.02) if error >= 0 else ("right", -0.02)
            axes.text(error + gap * limit, place, f"{error:+.1f} %", va="center", ha=side, fontsize=7.5)
    axes.axvline(0, color="#444444", linewidth=0.8)
    short = [Path(name).name for name in names]
    shown = short if len(set(short)) == len(short) else names
    axes.set_yticks(
        range(len(names)),
        [f"{wrapped(text)}\n{seconds(measured[name])}" for text, name in zip(shown, names, strict=True)],
        fontsize=8,
    )
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlim(-limit, limit)
    axes.set(xlabel="predicted against measured (%)", title="Steps of runs")
