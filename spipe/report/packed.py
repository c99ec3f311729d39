"""The timeline's data, packed for the page: typed arrays in base64, one row of a lane after another."""

import base64
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from spipe.metrics import analyse
from spipe.ops import Kind
from spipe.plots.style import CAUSE_COLOURS, GROUP_COLOURS
from spipe.timed import GROUP_OF, GROUPS, TimedStep

MOST_OPS = 150_000
"""Timed ops in a report; of a longer trace, its last steps (36 bytes an op before encoding)."""
MOST_STEPS_EXPLAINED = 30
"""Steps whose idle intervals are attributed, the last ones."""


def packed(timed: TimedStep) -> dict[str, Any]:
    """All that the page's script needs, as JSON values. Times in seconds from the first op shown."""
    program, trace = timed.program, timed.trace
    steps = shown_steps(timed)
    rows = timed.lanes()
    row_number = {row: number for number, row in enumerate(rows)}
    rows_of_op = [row_number[rank, timed.lane(i)] for i, rank in enumerate(program.rank)]
    groups = list(GROUPS)
    step, op = np.array(trace.step, dtype=np.uint32), np.array(trace.op, dtype=np.uint32)
    start, end, ready = (np.array(column, dtype=np.float64) for column in (trace.start_s, trace.end_s, trace.ready_s))
    free = np.array([kind == Kind.FREE for kind in program.kind])
    keep = np.isin(step, steps) & ~free[op]
    order = np.lexsort((start[keep], np.array(rows_of_op)[op[keep]]))
    step, op, start, end, ready = (column[keep][order] for column in (step, op, start, end, ready))
    origin = float(start.min())
    counts = np.bincount(np.array(rows_of_op)[op], minlength=len(rows))
    return {
        "source": trace.source,
        "rows": [{"rank": rank, "lane": lane} for rank, lane in rows],
        "first": np.concatenate([[0], np.cumsum(counts)]).tolist(),
        "groups": [{"name": name, "colour": GROUP_COLOURS[name]} for name in groups],
        "causes": [{"name": name, "colour": colour} for name, colour in CAUSE_COLOURS.items()],
        "names": list(trace.names),
        "group": [groups.index(GROUP_OF[Kind(kind)]) for kind in program.kind],
        "row": rows_of_op,
        "after": [list(dependencies) for dependencies in program.dependencies],
        "step": _array(step, np.uint32),
        "op": _array(op, np.uint32),
        "start": _array(start - origin, np.float64),
        "end": _array(end - origin, np.float64),
        "waited": _array(np.maximum(start - ready, 0), np.float32),
        "notes": {f"{s},{i}": note for (s, i), note in trace.notes.items()},
        "idle": _idle(timed, steps, origin),
        "home": [time - origin for time in timed.metrics().window_s],
        "left_out": len(trace.steps()) - len(steps),
    }


def shown_steps(timed: TimedStep) -> list[int]:
    """The last steps of the trace that fit, and always the one that is meant."""
    counts = Counter(timed.trace.step)
    steps: list[int] = []
    total = 0
    for step in sorted(counts, reverse=True):
        total += counts[step]
        if steps and total > MOST_OPS and timed.step in steps:
            break
        steps.append(step)
    return sorted(steps)


def _idle(timed: TimedStep, steps: Sequence[int], origin: float) -> list[list[float]]:
    """[rank, begin, end, number of the cause] of complete steps.

    The first step of a trace, whose window is not the distance of two verdicts, would overlap the next one.
    """
    counts = Counter(timed.trace.step)
    numbers = {cause: number for number, cause in enumerate(CAUSE_COLOURS)}
    whole = [step for step in steps if counts[step] == len(timed.program) and step - 1 in counts]
    if timed.program.options.optimizer == "stale":
        whole = whole[:-1]
    found = []
    for step in sorted({*whole[-MOST_STEPS_EXPLAINED:], timed.step}):
        for rank, intervals in enumerate(analyse(timed.program, timed.trace, step).idle):
            found += [[rank, begin - origin, end - origin, numbers[cause]] for begin, end, cause in intervals]
    return found


def _array(values: Any, kind: Any) -> str:
    little = np.dtype(kind).newbyteorder("<")
    return base64.b64encode(np.ascontiguousarray(values, dtype=little).tobytes()).decode()
