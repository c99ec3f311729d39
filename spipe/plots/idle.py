"""Idle time by cause: of several systems, or of the ranks of one."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from spipe.errors import SpipeError
from spipe.metrics import CAUSES
from spipe.plots.style import BUSY, CAUSE_COLOURS, legend, new_figure, rows_in, style, text_on, wrapped
from spipe.show import seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def idle_time(results: Mapping[str, Mapping[str, Any]]) -> "Figure":
    """Results of ``spipe simulate --json`` by name: what the compute lanes do, and why they stand still.

    One result with ``bubbles_by_rank`` is shown rank by rank.
    """
    bars: dict[str, dict[str, float]] = {}
    for name, result in results.items():
        step_s = result["predicted"]["step_s"]
        bars[f"{wrapped(name)}\n{seconds(step_s)} a step"] = {"busy": sum(result["busy_s"]), **result["bubbles"]}
    if len(results) == 1 and len((result := next(iter(results.values()))).get("bubbles_by_rank", ())) > 1:
        for rank, (busy, causes) in enumerate(zip(result["busy_s"], result["bubbles_by_rank"], strict=True)):
            bars[f"rank {rank}"] = {"busy": busy, **causes}
    shares = {name: _percent(parts) for name, parts in bars.items()}
    shown = [part for part in ("busy", *CAUSES) if any(parts.get(part, 0.0) > 1e-6 for parts in shares.values())]
    with style():
        figure = new_figure(10.5, 1.35 + rows_in(bars, 0.46))
        whole, idle = figure.subplots(1, 2, sharey=True, width_ratios=[1, 1.4])
        _stack(whole, shares, shown, least_labelled=9.0)
        most = _stack(idle, shares, [part for part in shown if part != "busy"], least_labelled=None)
        whole.set_yticks(range(len(bars)), list(bars))
        whole.invert_yaxis()
        whole.set(xlim=(0, 100), xlabel="time of all compute lanes (%)")
        idle.set(xlim=(0, 1.12 * max(most, 0.1)), xlabel="idle time alone (% of the same)")
        idle.tick_params(axis="y", length=0)
        legend(
            figure,
            {part: BUSY if part == "busy" else CAUSE_COLOURS[part] for part in shown},
            columns=11 if len(shown) < 10 else 6,
        )
    return figure


def _stack(
    axes: "Axes", shares: Mapping[str, Mapping[str, float]], shown: list[str], least_labelled: float | None
) -> float:
    """Bars of the parts one behind the other, with the share where it fits; returns the longest bar."""
    left = [0.0] * len(shares)
    longest = max(sum(parts.get(part, 0.0) for part in shown) for parts in shares.values())
    least = 0.07 * longest if least_labelled is None else least_labelled
    for part in shown:
        widths = [parts.get(part, 0.0) for parts in shares.values()]
        colour = BUSY if part == "busy" else CAUSE_COLOURS[part]
        axes.barh(range(len(shares)), widths, left=left, color=colour, edgecolor="white", linewidth=0.5, height=0.72)
        for place, (width, start) in enumerate(zip(widths, left, strict=True)):
            if width >= least > 0:
                text = f"{width:.0f}" if least_labelled else f"{width:.1f}"
                middle = start + width / 2
                axes.text(middle, place, text, ha="center", va="center", fontsize=8, color=text_on(colour))
        left = [a + b for a, b in zip(left, widths, strict=True)]
    if least_labelled is None:
        for place, end in enumerate(left):
            axes.text(end + 0.01 * longest, place, f"{end:.1f} %", va="center", fontsize=8.5)
    return longest


def _percent(parts: Mapping[str, float]) -> dict[str, float]:
    whole = sum(parts.values())
    if not whole > 0:
        raise SpipeError("a step in which no time passes; there is nothing to plot")
    return {name: 100 * value / whole for name, value in parts.items()}
