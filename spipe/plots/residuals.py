"""What a calibration left unexplained."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from spipe.errors import SpipeError
from spipe.plots.style import BLUE, ORANGE, new_figure, style
from spipe.show import seconds
from spipe.show_measured import quantity

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def residuals(result: Mapping[str, Any]) -> "Figure":
    """A result of ``spipe calibrate --json``: spread around every fitted value, and what runs are predicted to take.

    Raises:
        SpipeError: if nothing was fitted.
    """
    fits, runs = result["fits"], result["runs"]
    if not fits:
        raise SpipeError("nothing was fitted; there is nothing to plot")
    with style():
        figure = new_figure(10.5, 1.3 + 0.24 * max(len(fits), 2 * len(runs)))
        spread, error = figure.subplots(1, 2, width_ratios=[1.5, 1])
        values = [100 * row["spread"] for row in fits]
        most = max([*values, 1.0])
        spread.hlines(range(len(fits)), 0, values, color=BLUE, linewidth=1.2)
        spread.scatter(values, range(len(fits)), color=BLUE, s=18, zorder=3)
        for place, row in enumerate(fits):
            text = f"{quantity(row['value'], row['unit'])}, {row['samples']} samples"
            spread.text(values[place] + 0.025 * most, place, text, va="center", fontsize=7.5, color="#444444")
        spread.set_yticks(range(len(fits)), [row["what"] for row in fits], fontsize=8)
        spread.set_ylim(len(fits) - 0.4, -0.6)
        spread.set_xlim(0, 1.45 * most)
        spread.set(xlabel="spread of the samples around the fit (%)", title="Fitted values")
        errors = [100 * row["error"] for row in runs]
        limit = 1.6 * max([*map(abs, errors), 2.0])
        error.barh(range(len(runs)), errors, color=ORANGE, height=0.5)
        error.axvline(0, color="#444444", linewidth=0.8)
        for place, row in enumerate(runs):
            text = f"{errors[place]:+.1f} %  ({seconds(row['predicted_s'])} for {seconds(row['measured_s'])})"
            error.text(0, place - 0.33, text, va="bottom", ha="center", fontsize=8)
        error.set_yticks(range(len(runs)), [f"run {row['run']}" for row in runs])
        error.set_ylim(max(len(runs), 0.3 * len(fits)) - 0.3, -1.0)
        error.set_xlim(-limit, limit)
        error.set(xlabel="predicted over measured step, less 1 (%)", title="Runs it was fitted to")
    return figure
