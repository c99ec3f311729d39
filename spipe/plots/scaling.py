"""Throughput over the number of accelerators."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from spipe.errors import SpipeError
from spipe.plots.style import GREY, MARKERS, SERIES, new_figure, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def scaling(series: Mapping[str, Sequence[tuple[int, float]]]) -> "Figure":
    """Curves by name: points of (accelerators, tokens per second), each with the line of perfect scaling.

    Raises:
        SpipeError: if no curve has two numbers of accelerators.
    """
    curves = {name: sorted(points) for name, points in series.items() if points}
    if all(len({count for count, _ in points}) < 2 for points in curves.values()):
        found = "; ".join(f"{name}: {points[0][0]} accelerators" for name, points in curves.items()) or "nothing"
        raise SpipeError(
            f"scaling needs one model, schedule and accelerator with two numbers of accelerators or more, not {found}; "
            "give plans, runs or results of `spipe search --json` for more of them"
        )
    from matplotlib.ticker import LogLocator, NullLocator

    counts = sorted({count for points in curves.values() for count, _ in points})
    with style():
        figure = new_figure(9.6, 4.2)
        speed, share = figure.subplots(1, 2)
        for number, (name, points) in enumerate(curves.items()):
            colour, marker = SERIES[number % len(SERIES)], MARKERS[number % len(MARKERS)]
            first, base = points[0]
            x = [count for count, _ in points]
            speed.plot(x, [value for _, value in points], color=colour, marker=marker, markersize=5, label=name)
            speed.plot(x, [base * count / first for count in x], color=colour, linestyle=":", linewidth=1)
            share.plot(x, [100 * value * first / (base * count) for count, value in points], color=colour,
                       marker=marker, markersize=5, label=name)  # fmt: skip
        share.axhline(100, color=GREY, linestyle=":", linewidth=1)
        for axes in (speed, share):
            axes.set_xscale("log", base=2)
            axes.set_xticks(counts, [str(count) for count in counts])
            axes.set_xticks([], minor=True)
            axes.set_xlabel("accelerators")
            axes.margins(x=0.06)
        speed.set(ylabel="tokens per second", title="Throughput (dotted: perfect scaling)")
        share.set(ylabel="of perfect scaling (%)", title="Efficiency, against the fewest accelerators")
        share.set_ylim(0, max(110.0, share.get_ylim()[1]))
        speed.set_yscale("log")  # perfect scaling is a straight line
        low, high = speed.get_ylim()
        speed.yaxis.set_major_locator(LogLocator(subs=_ticks(high / low)))
        speed.yaxis.set_major_formatter("{x:,.0f}" if low > 1 else "{x:g}")
        speed.yaxis.set_minor_locator(NullLocator())
        speed.legend(loc="upper left")
    return figure


def _ticks(ratio: float) -> tuple[float, ...]:
    """Ticks of a decade on an axis over so large a range."""
    return (1, 1.5, 2, 3, 4, 5, 7) if ratio < 8 else (1, 2, 5) if ratio < 300 else (1,)
