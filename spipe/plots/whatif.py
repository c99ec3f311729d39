"""What machines one could have would bring and cost."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from spipe.errors import SpipeError
from spipe.plots.style import BLACK, BLUE, ORANGE, SKY, new_figure, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
    with style():
        figure = new_figure(10.5, 1.4 + 0.55 * len(bases))
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
            speed.barh(place, own, height=0.6, color=BLUE)
            end, text = own, f"{own:,.0f}" if own else "does not fit"
            if best is not None and best["tokens_per_s"] > 1.005 * own:
                end = best["tokens_per_s"]
                speed.barh(place, end - own, left=own, height=0.6, color=SKY, alpha=0.6)
                text += f"   with {best['upgrade']}: {end:,.0f}"
            if known := base.get("interval_s"):
                low, high = (own * base["step_s"] / seconds for seconds in reversed(known))
                speed.plot([low, high], [place, place], color=BLACK, linewidth=1.2, marker="|", markersize=7)
                end = max(end, high)
            speed.text(end + 0.02 * fastest, place, text, va="center", fontsize=8)
            shown = base if base["feasible"] or best is None else best
            rent = shown["rent_dollars_per_billion_tokens"]
            if rent is not None:
                cost.barh(place, rent, height=0.6, color=ORANGE, alpha=1.0 if shown is base else 0.5)
                cost.text(rent + 0.02 * dearest, place, f"{rent:,.0f}{_to_buy(shown)}", va="center", fontsize=8)
        speed.set_yticks(places, names)
        speed.xaxis.set_major_formatter("{x:,.0f}")
        cost.xaxis.set_major_formatter("{x:,.0f}")
        cost.tick_params(axis="y", length=0)
        speed.set_xlim(0, 1.6 * (fastest or 1.0))
        cost.set_xlim(0, 2.05 * (dearest or 1.0))
        interval = "; black: 90 % interval" if any(row.get("interval_s") for row in bases) else ""
        speed.set_xlabel(f"tokens per second (light: with the upgrade that helps most{interval})")
        cost.set_xlabel("dollars of rent per billion tokens, at the prices described")
    return figure


def _to_buy(row: Mapping[str, Any]) -> str:
    """What it costs to buy, and when that has cost less than renting."""
    if row.get("purchase_dollars") is None:
        return ""
    text = f"   to buy: {row['purchase_dollars']:,.0f}"
    month = row.get("break_even_month")
    return text if month is None else f"{text}, even after {month:.0f} months"
