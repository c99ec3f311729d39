"""The CPU optimizer under the roof of the memory it runs on."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from spipe.errors import SpipeError
from spipe.plots.style import MARKERS, SERIES, new_figure, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BYTES_PER_PARAMETER = 28
"""Traffic of a step: gradient, master and moments read; master, moments and weight written."""
_ROOFS = (("streams", "the same streams without arithmetic", "-"), ("triad", "STREAM triad", "--"))


def adam_roofline(result: Mapping[str, Any]) -> "Figure":
    """A result of ``scripts/bench_adam.py --json``: bandwidth by size and by threads, below what memory gives.

    Raises:
        SpipeError: if it has no case.
    """
    cases = result["cases"]
    if not cases:
        raise SpipeError("the benchmark has no case; there is nothing to plot")
    most_threads = max(case["threads"] for case in cases)
    by_size = sorted((case for case in cases if case["threads"] == most_threads), key=lambda case: case["count"])
    size = max((case["count"] for case in cases if case["threads"] < most_threads), default=0)
    by_threads = sorted((case for case in cases if case["count"] == size), key=lambda case: case["threads"])
    with style():
        panels = 2 if len(by_threads) > 1 else 1
        figure = new_figure(5.4 * panels, 4.2)
        axes = figure.subplots(1, panels, sharey=True, squeeze=False)[0]
        _curves(axes[0], by_size, "count")
        axes[0].set_xscale("log")
        axes[0].xaxis.set_major_formatter("{x:.0e}")
        axes[0].set(xlabel=f"parameters ({most_threads} threads)", ylabel="memory traffic (GB/s)")
        if panels == 2:
            _curves(axes[1], by_threads, "threads")
            counts = [case["threads"] for case in by_threads]
            axes[1].set_xscale("log", base=2)
            axes[1].set_xticks(counts, [str(count) for count in counts])
            axes[1].set_xticks([], minor=True)
            axes[1].set_xlabel(f"threads ({size:.0e} parameters)".replace("e+0", "e"))
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper left", ncols=3)
    return figure


def _curves(axes: "Axes", cases: list[Mapping[str, Any]], key: str) -> None:
    x = [case[key] for case in cases]
    for name, title, line in _ROOFS:
        ratios = [case.get(f"ratio_to_{'same_streams' if name == 'streams' else name}") for case in cases]
        roof = [
            case["bytes_per_s"] / ratio / 1e9 if ratio else math.nan for case, ratio in zip(cases, ratios, strict=True)
        ]
        axes.plot(x, roof, color="#666666", linestyle=line, linewidth=1.1, label=title)
    ours = [case["bytes_per_s"] / 1e9 for case in cases]
    axes.plot(x, ours, color=SERIES[0], marker=MARKERS[0], label="spipe", linewidth=1.8)
    others = (("torch_fused", "torch fused"), ("torch_passes", "torch, same result"), ("deepspeed", "DeepSpeed"))
    for number, (name, title) in enumerate(others, 1):
        ratios = [case.get(f"ratio_to_{name}") for case in cases]
        if any(ratios):
            rates = [mine / ratio if ratio else math.nan for mine, ratio in zip(ours, ratios, strict=True)]
            axes.plot(x, rates, color=SERIES[number], marker=MARKERS[number], markersize=5, linewidth=1.1,
                      label=f"{title} (as if it moved {BYTES_PER_PARAMETER} bytes)")  # fmt: skip
    axes.set_ylim(bottom=0)
    axes.margins(x=0.08)
