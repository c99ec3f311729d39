"""How a run went: loss and speed over its steps."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from spipe.errors import SpipeError
from spipe.plots.style import BLUE, GREEN, ORANGE, new_figure, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_POINTS = 2000
"""Steps that are drawn of a longer run, evenly spaced."""


def training(rows: Sequence[Mapping[str, Any]]) -> "Figure":
    """Rows of ``metrics.jsonl``: loss (and validation loss), and tokens per second, by step.

    Raises:
        SpipeError: if there is no row.
    """
    if not rows:
        raise SpipeError("no step is in the metrics; there is nothing to plot")
    held = [row for row in rows if row.get("validation_loss") is not None]
    rows = rows[:: max(1, len(rows) // MOST_POINTS)]
    steps = [row["step"] + 1 for row in rows]
    nan = float("nan")
    mark = "." if len(rows) < 60 else None
    with style():
        figure = new_figure(10.0, 3.2)
        loss, speed = figure.subplots(1, 2)
        loss.plot(
            steps,
            [nan if row["loss"] is None else row["loss"] for row in rows],
            color=BLUE,
            marker=mark,
            label="training",
        )
        if held:
            loss.plot([row["step"] + 1 for row in held], [row["validation_loss"] for row in held], color=ORANGE,
                      marker="s", label="validation")  # fmt: skip
            loss.legend()
        loss.set(xlabel="step", ylabel="loss (nats per token)")
        speed.plot(steps, [row["tokens_per_s"] for row in rows], color=GREEN, marker=mark)
        speed.set(xlabel="step", ylabel="tokens per second")
        speed.set_ylim(bottom=0)
        speed.yaxis.set_major_formatter("{x:,.0f}")
        for axes in (loss, speed):
            axes.xaxis.get_major_locator().set_params(integer=True)
    return figure
