"""Traces: timed ops, simulated or measured, in one format that Perfetto and chrome://tracing open.

The simulator and the runtime both write this; ``spipe.metrics`` and calibration read it. All times are seconds on one
clock. ``ready``: the op's dependencies were done. ``start``: its lane began it; a transfer starts when both sides are
there. ``end``: it was done. ``cpu_s``: processor time it used, where the op ran on CPU threads; in lanes of
GPUs, how long the host took to issue it (NaN where neither is known).
"""

import json
import math
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spipe.errors import SpipeError
from spipe.program import Program

if TYPE_CHECKING:
    import pandas as pd

SCHEMA_VERSION = 1
ROUNDING_S = 2e-6
"""An op may seem to end so much before its start: clocks of devices are no finer."""
WARM_UP_STEPS = 3
"""First steps of a run that do not count."""
_TIMES = ("ready_s", "start_s", "end_s", "cpu_s")


@dataclass
class Trace:
    """Timed ops of one or more training steps, as parallel columns.

    Attributes:
        source: ``simulated`` or ``measured``.
        names, ranks, lanes: text, rank and lane of each op of the program, by op number.
        step, op: which step and which op a row is about.
        ready_s, start_s, end_s, cpu_s: times of the row, see the module text.
        notes: what came of an op, by (step, op): ``rollback``, ``bypass``.
        metadata: anything else worth keeping (plan digest, device, host); JSON values.
    """

    source: str
    names: Sequence[str]
    ranks: Sequence[int]
    lanes: Sequence[str]
    step: "array[int]" = field(default_factory=lambda: array("l"))
    op: "array[int]" = field(default_factory=lambda: array("l"))
    ready_s: "array[float]" = field(default_factory=lambda: array("d"))
    start_s: "array[float]" = field(default_factory=lambda: array("d"))
    end_s: "array[float]" = field(default_factory=lambda: array("d"))
    cpu_s: "array[float]" = field(default_factory=lambda: array("d"))
    notes: dict[tuple[int, int], str] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def empty(cls, program: Program, source: str, **metadata: Any) -> "Trace":
        """A trace of ``program`` without rows."""
        lanes = [str(lane) for lane in program.lanes]
        return cls(
            source,
            [str(program.op(i)) for i in range(len(program))],
            program.rank,
            [lanes[lane] for lane in program.lane],
            metadata=metadata,
        )

    def add(self, step: int, op: int, ready_s: float, start_s: float, end_s: float, cpu_s: float = math.nan) -> None:
        """Add one timed op."""
        self.step.append(step)
        self.op.append(op)
        self.ready_s.append(ready_s)
        self.start_s.append(start_s)
        self.end_s.append(end_s)
        self.cpu_s.append(cpu_s)

    def __len__(self) -> int:
        return len(self.op)

    def steps(self) -> list[int]:
        """The steps that have rows, ascending."""
        return sorted(set(self.step))

    def rows(self, step: int) -> dict[int, int]:
        """Op number -> row, for one step."""
        return {op: row for row, (s, op) in enumerate(zip(self.step, self.op, strict=True)) if s == step}

    def frame(self) -> "pd.DataFrame":
        """One row per timed op: step, op, name, kind, stage, rank, lane, times, duration (seconds)."""
        import pandas as pd

        names = [self.names[i] for i in self.op]
        frame = pd.DataFrame(
            {
                "step": self.step,
                "op": self.op,
                "name": names,
                "kind": [name.split()[0] for name in names],
                "stage": [name.split()[1] for name in names],
                "rank": [self.ranks[i] for i in self.op],
                "lane": [self.lanes[i] for i in self.op],
                **{column: getattr(self, column) for column in _TIMES},
            }
        )
        frame["duration_s"] = frame["end_s"] - frame["start_s"]
        return frame

    def check_matches(self, program: Program, where: str) -> None:
        """Raises SpipeError unless the trace is of this program."""
        names = [str(op) for op in program.ops]
        if list(self.names) != names or list(self.ranks) != program.rank:
            raise SpipeError(
                f"{where}: this trace has {len(self.names)} ops a step that are not the {len(names)} ops of the plan: "
                "it belongs to another plan; give the plan that was run"
            )

    def check_complete(self, where: str) -> None:
        """Raises SpipeError unless every step that has rows has all ops of the program."""
        counts = Counter(self.step)
        for step in sorted(counts):
            if counts[step] < len(self.names):
                missing = min(
                    set(range(len(self.names))) - {op for s, op in zip(self.step, self.op, strict=True) if s == step}
                )
                raise SpipeError(
                    f"{where}: step {step} of the trace has {counts[step]} of {len(self.names)} ops "
                    f"({self.names[missing]} is missing): the trace is not complete; run again to make a new one"
                )

    def save(self, path: str | Path) -> None:
        """Write Chrome trace-event JSON: a process per rank, a thread per lane, microseconds; exact seconds in args."""
        origin = min(self.start_s, default=0.0)
        threads: dict[tuple[int, str], int] = {}
        events: list[dict[str, Any]] = []
        for row, i in enumerate(self.op):
            rank, lane = self.ranks[i], self.lanes[i]
            thread = threads.setdefault((rank, lane), len(threads))
            args: dict[str, Any] = {"op": i, "step": self.step[row]}
            for column in _TIMES:
                value = getattr(self, column)[row]
                if not math.isnan(value):
                    args[column] = value
            note = self.notes.get((self.step[row], i))
            if note:
                args["note"] = note
            start, end = self.start_s[row], self.end_s[row]
            events.append(
                {
                    "name": self.names[i],
                    "cat": self.names[i].split()[0],
                    "ph": "X",
                    "pid": rank,
                    "tid": thread,
                    "ts": (start - origin) * 1e6,
                    "dur": (end - start) * 1e6,
                    "args": args,
                }
            )
        heads: list[dict[str, Any]] = []
        for rank in sorted({rank for rank, _ in threads}):
            heads.append({"name": "process_name", "ph": "M", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}})
        for (rank, lane), thread in threads.items():
            heads.append({"name": "thread_name", "ph": "M", "pid": rank, "tid": thread, "args": {"name": lane}})
        document = {
            "traceEvents": heads + events,
            "displayTimeUnit": "ms",
            "metadata": {
                "spipe_trace": SCHEMA_VERSION,
                "source": self.source,
                "names": list(self.names),
                "ranks": list(self.ranks),
                "lanes": list(self.lanes),
                "more": self.metadata,
            },
        }
        Path(path).write_text(json.dumps(document, separators=(",", ":"), allow_nan=False))

    @classmethod
    def load(cls, path: str | Path) -> "Trace":
        """Read back what ``save`` wrote. Raises SpipeError for anything else."""
        path = Path(path)
        try:
            document = json.loads(path.read_text())
        except (OSError, ValueError, RecursionError) as error:
            raise SpipeError(
                f"{path}: not a readable trace ({error}); expected a trace.json written by spipe"
            ) from None
        metadata = document.get("metadata") if isinstance(document, dict) else None
        if not isinstance(metadata, dict) or metadata.get("spipe_trace") != SCHEMA_VERSION:
            found = metadata.get("spipe_trace") if isinstance(metadata, dict) else None
            raise SpipeError(
                f"{path}: not a spipe trace of version {SCHEMA_VERSION} (found {found!r}); it has to come from "
                "`spipe simulate --trace` or `spipe run`"
            )
        try:
            trace = _head(metadata)
            events = document.get("traceEvents")
            if not isinstance(events, list):
                raise _DamagedError(f"traceEvents is {_shown(events)}, not a list of events")
            seen: set[tuple[int, int]] = set()
            for number, event in enumerate(events):
                if not isinstance(event, dict):
                    raise _DamagedError(f"traceEvents[{number}] is {_shown(event)}, not an event")
                if event.get("ph") == "X":
                    _read_event(trace, event.get("args"), f"traceEvents[{number}].args", seen)
        except _DamagedError as error:
            raise SpipeError(f"{path}: damaged trace: {error}; run or simulate again to make a new one") from None
        return trace


class _DamagedError(Exception):
    """What is wrong with which field of a trace file."""


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def _head(metadata: dict[str, Any]) -> Trace:
    """The trace without rows that the metadata of a file describe."""
    for name, wanted in (("source", str), ("names", list), ("ranks", list), ("lanes", list), ("more", dict)):
        if not isinstance(metadata.get(name), wanted):
            what = {str: "a text", list: "a list", dict: "a table"}[wanted]
            raise _DamagedError(f"metadata.{name} is {_shown(metadata.get(name))}, not {what}")
    names, ranks, lanes = metadata["names"], metadata["ranks"], metadata["lanes"]
    if not len(names) == len(ranks) == len(lanes):
        raise _DamagedError(
            f"metadata.names, ranks and lanes have {len(names)}, {len(ranks)} and {len(lanes)} entries, not one per op"
        )
    for name, entries in (("names", names), ("lanes", lanes)):
        for i, entry in enumerate(entries):
            if not isinstance(entry, str) or not entry:
                raise _DamagedError(f"metadata.{name}[{i}] is {_shown(entry)}, not a name")
    for i, rank in enumerate(ranks):
        if type(rank) is not int or rank < 0:
            raise _DamagedError(f"metadata.ranks[{i}] is {_shown(rank)}, not the number of a rank")
    return Trace(metadata["source"], names, ranks, lanes, metadata=metadata["more"])


def _read_event(trace: Trace, args: object, where: str, seen: set[tuple[int, int]]) -> None:
    """Add the row of one event, whose exact values are in its ``args``."""
    if not isinstance(args, dict):
        raise _DamagedError(f"{where} is {_shown(args)}, not a table")
    for name, limit in (("op", len(trace.names)), ("step", None)):
        value = args.get(name)
        if type(value) is not int or value < 0 or (limit is not None and value >= limit):
            allowed = "a whole number of at least 0" if limit is None else f"the number of an op, 0..{limit - 1}"
            raise _DamagedError(f"{where}.{name} is {_shown(value)}, not {allowed}")
    step, op = args["step"], args["op"]
    if (step, op) in seen:
        raise _DamagedError(f"{where} is a second time of op {op} ({trace.names[op]}) in step {step}")
    seen.add((step, op))
    times: list[Any] = [args.get(name, math.nan if name == "cpu_s" else None) for name in _TIMES]
    for name, value in zip(_TIMES, times, strict=True):
        if type(value) not in (int, float) or (name in args and not _is_finite(value)):
            raise _DamagedError(f"{where}.{name} is {_shown(value)}, not a finite number of seconds")
    ready_s, start_s, end_s, cpu_s = map(float, times)
    if end_s < start_s - ROUNDING_S:
        raise _DamagedError(f"{where}: {trace.names[op]} of step {step} starts at {start_s} s and ends at {end_s} s")
    if cpu_s < -ROUNDING_S:
        raise _DamagedError(f"{where}.cpu_s is {cpu_s}, not a finite number of seconds of at least 0")
    trace.add(step, op, ready_s, start_s, end_s, cpu_s)
    if "note" in args:
        if not isinstance(args["note"], str):
            raise _DamagedError(f"{where}.note is {_shown(args['note'])}, not a text")
        trace.notes[step, op] = args["note"]


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond all floats
        return False
