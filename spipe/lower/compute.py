"""Compute ops: every rank's order as given."""

from spipe.errors import SpipeError
from spipe.layout import Layout
from spipe.lower.draft import Draft
from spipe.ops import Kind
from spipe.schedules import ComputeOrder


def add_compute(draft: Draft, order: ComputeOrder) -> None:
    """FORWARD, RECOMPUTE, BACKWARD and WEIGHT_GRADIENT."""
    if draft.options.recompute == "never":
        require_passes_together(draft.layout)
    forward, recompute, backward, last = draft.forward, draft.recompute, draft.backward, draft.last_backward
    for rank, steps in enumerate(order):
        first, lane = len(draft.kind), draft.lane_number("compute", rank) if steps else -1
        for pass_, k, m in steps:
            if pass_ == "F":
                forward[k][m] = draft.add(Kind.FORWARD, k, m, rank, lane, [])
                continue
            stage = draft.num_forward + k
            if pass_ == "W":
                last[k][m] = draft.add(Kind.WEIGHT_GRADIENT, stage, m, rank, lane, [backward[k][m]])
            else:
                recompute[k][m] = op = draft.add(Kind.RECOMPUTE, stage, m, rank, lane, [])
                backward[k][m] = last[k][m] = draft.add(Kind.BACKWARD, stage, m, rank, lane, [op])
        draft.compute[rank] = list(range(first, len(draft.kind)))
    missing = [f"F{k} m{row.index(-1)}" for k, row in enumerate(forward) if -1 in row]
    missing += [f"B{k} m{row.index(-1)}" for k, row in enumerate(backward) if -1 in row]
    if missing:
        raise SpipeError(f"the compute order has no entry for {', '.join(missing[:5])}")


def require_passes_together(layout: Layout) -> None:
    """Raises SpipeError unless every forward stage is also a backward stage, on the same rank."""
    for k, stage in enumerate(layout.forward):
        if layout.backward[k : k + 1] != (stage,):
            raise SpipeError(
                f"recompute = never keeps what a forward saves for its backward on its rank, but forward stage {k} "
                f"(layers {stage.first}..{stage.stop - 1}, rank {stage.rank}) is not backward stage {k}, too; "
                "use recompute = early, or a schedule that runs both passes of a stage on one rank"
            )
