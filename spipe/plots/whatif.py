"""What machines one could have would bring and cost."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from spipe.errors import SpipeError
from spipe.plots.style import BLACK, BLUE, ORANGE, SKY, new_figure, rows_in, style, wrapped

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LETTER_IN, PANEL_IN = 0.068, 4.2
"""Width of a letter and of one of the two panels, about, by which room for text is left."""


def what_if(rows: Sequence[Mapping[str, Any]]) -> "Figure":
    """Rows of ``spipe whatif --json``: tokens per second of every offer (black: interval, where known), with its best
    upgrade, and dollars by rent or to buy.
    """
    bases = [row for row in rows if not row["upgrade"]]
    if not bases:
        raise SpipeError("no machine in these rows; there is nothing to plot")
    names = [
        row["offer"] if len({r["model"] for r in bases}) == 1 else f"{row['model']}, {row['offer']}" for row in bases
    ]
    labels = [wrapped(name) for name in names]
    with style():
        from matplotlib.ticker import MaxNLocator

        figure = new_figure(12.0, 1.4 + rows_in(labels, 0.57))
        speed, cost = figure.subplots(1, 2, sharey=True)
        places = list(range(len(bases)))[::-1]
        speeds, costs = list[tuple[float, str]](), list[tuple[float, str]]()  # per row, where bars end and what it says
        for place, base in zip(places, bases, strict=True):
            mine = [
                row for row in rows if row["upgrade"] and (row["model"], row["offer"]) == (base["model"], base["offer"])
            ]
            best = max((row for row in mine if row["feasible"]), key=lambda row: row["tokens_per_s"], default=None)
            own = base["tokens_per_s"] or 0.0
            speed.barh(place, own, height=0.6, color=BLUE)
            end, text = own, f"{own:,.0f}" if own else "does not fit"
            if best is not None and best["tokens_per_s"] > 1.005 * own:
                end = best["tokens_per_s"]
                speed.barh(place, end - own, left=own, height=0.6, color=SKY, alpha=0.6)
                text += f"\nwith {best['upgrade']}: {end:,.0f}"
            if known := base.get("interval_s"):
                low, high = (own * base["step_s"] / seconds for seconds in reversed(known))
                speed.plot([low, high], [place, place], color=BLACK, linewidth=1.2, marker="|", markersize=7)
                end = max(end, high)
            speeds.append((end, text))
            shown = base if base["feasible"] or best is None else best
            rent = shown["rent_dollars_per_billion_tokens"]
            if rent is not None:
                cost.barh(place, rent, height=0.6, color=ORANGE, alpha=1.0 if shown is base else 0.5)
            costs.append((rent or 0.0, "" if rent is None else f"${rent:,.0f}{_to_buy(shown)}"))
        for axes, ends in ((speed, speeds), (cost, costs)):
            _write(axes, places, ends)
            axes.xaxis.set_major_locator(MaxNLocator(5))
        speed.set_yticks(places, labels)
        speed.xaxis.set_major_formatter("{x:,.0f}")
        cost.xaxis.set_major_formatter("${x:,.0f}")
        cost.tick_params(axis="y", length=0)
        interval = "; black: 90 % interval" if any(row.get("interval_s") for row in bases) else ""
        speed.set_xlabel(f"tokens per second\n(light: with the upgrade that helps most{interval})")
        cost.set_xlabel("dollars of rent per billion tokens\n(at the prices described)")
    return figure


def _write(axes: "Axes", places: Sequence[int], ends: Sequence[tuple[float, str]]) -> None:
    """What each row says, right of its bars, and room for it."""
    longest = max(end for end, _ in ends) or 1.0
    limit = longest
    for place, (end, text) in zip(places, ends, strict=True):
        axes.text(end + 0.02 * longest, place, text, va="center", fontsize=8)
        share = min(0.75, LETTER_IN * max(map(len, text.split("\n"))) / PANEL_IN)
        limit = max(limit, (end + 0.02 * longest) / (1 - share))
    axes.set_xlim(0, limit)


def _to_buy(row: Mapping[str, Any]) -> str:
    """What it costs to buy, and when that has cost less than renting."""
    if row.get("purchase_dollars") is None:
        return ""
    text = f"\nto buy: ${row['purchase_dollars']:,.0f}"
    month = row.get("break_even_month")
    return text if month is None else f"{text}, even after {month:.0f} months"
