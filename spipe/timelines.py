"""Traces of one program beside each other: a step of each, starting at the same time."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spipe.metrics import StepMetrics
from spipe.trace import Trace


@dataclass(frozen=True)
class Window:
    """The part of a trace that is shown: seconds on the trace's clock.

    ``idle``: per rank, when its compute lane stands still and why, as (start, end, cause).
    """

    trace: Trace
    begin_s: float
    end_s: float
    idle: tuple[tuple[tuple[float, float, str], ...], ...] = ()

    @classmethod
    def of(cls, trace: Trace, step: StepMetrics) -> "Window":
        """The window of an analysed step."""
        return cls(trace, *step.window_s, step.idle)

    def rows(self) -> list[int]:
        """Rows of ops that overlap with the window."""
        return [
            row
            for row, (start, end) in enumerate(zip(self.trace.start_s, self.trace.end_s, strict=True))
            if end > self.begin_s and start < self.end_s
        ]


def save_together(windows: Mapping[str, Window], path: str | Path) -> None:
    """Write one Chrome trace (for Perfetto) in which every rank is a process for each name, from time 0 on."""
    events: list[dict[str, Any]] = []
    heads: list[dict[str, Any]] = []
    threads: dict[tuple[int, str], int] = {}
    for order, (name, window) in enumerate(windows.items()):
        trace = window.trace
        for row in window.rows():
            i = trace.op[row]
            process = trace.ranks[i] * len(windows) + order
            thread = threads.get((process, trace.lanes[i]))
            if thread is None:
                thread = threads[process, trace.lanes[i]] = len(threads)
                names = {"process_name": f"rank {trace.ranks[i]}, {name}", "thread_name": trace.lanes[i]}
                for what, text in names.items():
                    heads.append({"name": what, "ph": "M", "pid": process, "tid": thread, "args": {"name": text}})
            start, end = trace.start_s[row], trace.end_s[row]
            events.append(
                {
                    "name": trace.names[i],
                    "cat": trace.names[i].split()[0],
                    "ph": "X",
                    "pid": process,
                    "tid": thread,
                    "ts": (start - window.begin_s) * 1e6,
                    "dur": (end - start) * 1e6,
                    "args": {"op": i, "step": trace.step[row]},
                }
            )
    document = {"traceEvents": heads + events, "displayTimeUnit": "ms", "metadata": {"names": list(windows)}}
    Path(path).write_text(json.dumps(document, separators=(",", ":"), allow_nan=False))
