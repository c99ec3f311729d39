"""Stability: whether the steps of a run are alike enough to calibrate with, and what to say if they are not."""

from collections.abc import Sequence
from itertools import combinations
from statistics import median

from spipe.ops import COMPUTE
from spipe.program import Program
from spipe.sim.fitting import Samples
from spipe.trace import Trace

UNDISTURBED = 0.85
"""Least share of the processor that compute ops of a run on an idle machine have."""
_DRIFT = 0.05  # change of a step time from the first to the last step that is worth a warning
_OUTLIER = 1.3  # a step that takes so many times the median is one
_FEW = 5  # steps, fewer of which tell little


def warnings_of(program: Program, trace: Trace, times: Sequence[float], warmup: int) -> list[str]:
    """What makes a run doubtful, with the evidence.

    Args:
        times: seconds of the steps that count, in order.
        warmup: steps of the trace that do not count.
    """
    found = []
    middle, spread = median(times), Samples.of(times).spread
    if len(times) < _FEW:
        found.append(f"only {len(times)} step{'s' * (len(times) > 1)} count; run longer to know how much they vary")
    change = trend(times) * (len(times) - 1) / middle
    if len(times) >= _FEW and abs(change) > max(_DRIFT, 3 * spread / middle):
        why = "the device gets hot and lowers its clocks, or something else was started" if change > 0 else (
            "the warm-up was longer than the steps left out"
        )  # fmt: skip
        found.append(f"steps became {abs(change):.0%} {'slower' if change > 0 else 'faster'} during the run: {why}")
    outliers = [seconds for seconds in times if seconds > _OUTLIER * middle]
    if outliers:
        found.append(
            f"{len(outliers)} of {len(times)} steps took over {_OUTLIER:g} times the median ({max(outliers):.4g} s "
            f"against {middle:.4g} s); medians leave them out"
        )
    share = processor_share(program, trace, warmup)
    if share is not None and share < UNDISTURBED:
        found.append(
            f"compute ops had the processor for only {share:.0%} of their time: something else uses it, or ranks and "
            "optimizer threads are more than the cores"
        )
    return found


def trend(times: Sequence[float]) -> float:
    """Seconds by which a step is slower than the one before: the median slope of all pairs (Theil and Sen)."""
    slopes = [(times[j] - times[i]) / (j - i) for i, j in combinations(range(len(times)), 2)]
    return median(slopes) if slopes else 0.0


def processor_share(program: Program, trace: Trace, warmup: int = 0) -> float | None:
    """Processor time of compute ops over their duration; None where the trace has none (on GPUs)."""
    if str(trace.metadata.get("device", "")).startswith("cuda"):
        return None
    used = lasted = 0.0
    for step, i, start, end, cpu_s in zip(
        trace.step, trace.op, trace.start_s, trace.end_s, trace.cpu_s, strict=True
    ):  # fmt: skip
        if step >= warmup and program.kind[i] in COMPUTE and cpu_s > 0:
            used += cpu_s
            lasted += end - start
    return used / lasted if lasted > 0 else None
