"""What measured ops say of the host that issues them, apart from the device that runs them (GPUs)."""

from collections import defaultdict
from collections.abc import Collection, Sequence
from statistics import median

from spipe.ops import COMPUTE, Kind
from spipe.sim.cost import LAUNCHES
from spipe.sim.fitting import Prior, nonnegative_fit
from spipe.sim.measurements import Measurement

_HOST_BOUND = 0.88  # of the time of ops; where the device never waits for their kernels, issuing them takes less
_LEAST_SHARE = 0.6  # the same for a single stage: that of the head takes the device long, wherever it is
_KNOWN = 0.2  # how surely a profile knows what issuing a layer takes


def bound_by_host(run: Sequence[Measurement]) -> list[Measurement]:
    """Compute ops of a run that took little more than the host needed to issue them: the device waited for kernels.

    Whether it did is asked of all forwards together, and of all recomputes and backwards, which are issued in turns: a
    host that is late with one op can be ahead with the next.
    """
    phases: dict[bool, dict[int, list[Measurement]]] = {True: defaultdict(list), False: defaultdict(list)}
    for op in run:
        if op.kind in COMPUTE and op.issue_s > 0 and not op.is_replayed:
            phases[op.kind is Kind.FORWARD][op.group[1]].append(op)
    found = []
    for stages in phases.values():
        alike = [op for ops in stages.values() for op in ops if not {"embedding", "head"} & op.layer_counts.keys()]
        if alike and _issue_share(alike) > _HOST_BOUND:
            found += [op for ops in stages.values() if _issue_share(ops) > _LEAST_SHARE for op in ops]
    return found


def _issue_share(ops: Sequence[Measurement]) -> float:
    return sum(op.issue_s for op in ops) / sum(op.seconds.median for op in ops)


def issue_seconds(
    ops: Sequence[Measurement], bound: Collection[int], known_s: float | None, noise: float
) -> tuple[float, float]:
    """Seconds in which the host issues a layer, and an op beside its layers, from ops of one pass.

    Those that the host bounded show it, gaps included; where there are none, the host's own clock does. What is known
    of layers decides where all ops have as many.

    Args:
        ops: all with a known ``issue_s``.
        bound: ``id`` of the measurements that the host bounded.
        known_s: what was known of a layer.
        noise: relative spread of the measurements.
    """
    alike = [op for op in ops if not {"embedding", "head"} & op.layer_counts.keys()] or ops
    late = [op for op in alike if id(op) in bound]
    seconds = [op.seconds.median + op.gap_s for op in late] if late else [op.issue_s for op in alike]
    rows = [
        [sum(count * LAUNCHES.get(layer, 1.0) for layer, count in op.layer_counts.items()), 1.0] for op in late or alike
    ]
    prior = Prior([0.0, 1.0], 0.0, median(seconds)) if not known_s else Prior([1.0, 0.0], known_s, _KNOWN * known_s)
    by_layer, by_op = nonnegative_fit(rows, seconds, [prior], noise)
    return float(by_layer), float(by_op)
