"""Layer times from a trace of PyTorch's profiler: a training step of somebody else's program.

A layer is a range that the trace names: ``record_function("block 3")``, or in traces made with ``with_stack=True`` a
module (``nn.Module: LlamaDecoderLayer_3``). Its forward is what runs inside the range: the kernels launched there where
there is a GPU, else the range itself. Its backward is found by PyTorch's sequence numbers: every function of autograd
carries the number of the forward op that made it; gradients that are accumulated in between belong to the function
before them. A range inside such a function is a recompute.
"""

import gzip
import json
import zlib
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from spipe.errors import SpipeError
from spipe.hardware import Dtype, HardwareSpec, MeasuredLayer
from spipe.model import LayerKind, ModelSpec, PassName
from spipe.sim.fitting import Samples

PATTERNS: dict[LayerKind, tuple[str, ...]] = {
    "embedding": ("embedding*", "nn.Module: Embedding_*", "nn.Module: *Embedding_*"),
    "block": ("block*", "layer*", "nn.Module: *DecoderLayer_*", "nn.Module: *Block_*", "nn.Module: *EncoderLayer_*"),
    "head": ("head*", "lm_head*", "nn.Module: *LMHead_*"),
}
_BACKWARD = "autograd::engine::evaluate_function: "
_ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
_LAUNCHES = {"cuda_runtime", "cuda_driver"}


@dataclass(frozen=True)
class Event:
    """Something with a duration, in seconds."""

    name: str
    thread: tuple[Any, Any]
    begin: float
    end: float
    sequence: int | None = None

    def holds(self, other: "Event") -> bool:
        return self.thread == other.thread and self.begin <= other.begin and other.end <= self.end


@dataclass
class Events:
    """What a trace holds, sorted by time."""

    ranges: list[Event] = field(default_factory=list)
    ops: list[Event] = field(default_factory=list)
    backward: list[Event] = field(default_factory=list)
    launches: dict[Any, list[tuple[float, int]]] = field(default_factory=lambda: defaultdict(list))
    device: dict[int, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))


def read(path: str | Path) -> Events:
    """Read ``export_chrome_trace``'s file, plain or gzipped. Raises SpipeError for anything else."""
    path = Path(path)
    try:
        raw = path.read_bytes()
        document = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
    except (OSError, ValueError, EOFError, zlib.error, RecursionError) as error:
        raise SpipeError(
            f"{path}: not a readable trace ({error}); it may be cut off: export it again with export_chrome_trace"
        ) from None
    rows = document.get("traceEvents") if isinstance(document, dict) else document
    if isinstance(document, dict) and "spipe_trace" in (document.get("metadata") or {}):
        raise SpipeError(f"{path} is a trace of spipe; use `spipe calibrate` with the folder of its run")
    if not isinstance(rows, list):
        raise SpipeError(f"{path}: no traceEvents; expected what torch.profiler's export_chrome_trace writes")
    events = Events()
    for number, row in enumerate(rows):
        try:
            if isinstance(row, dict) and row.get("ph") == "X":
                _take(events, row)
        except (KeyError, TypeError, ValueError) as error:
            raise SpipeError(f"{path}: traceEvents[{number}] is damaged ({error!r}); export the trace again") from None
    for listed in (events.ranges, events.ops, events.backward):
        listed.sort(key=lambda event: (event.begin, -event.end))
    for launches in events.launches.values():
        launches.sort()
    if not events.ranges and not events.ops:
        raise SpipeError(f"{path}: no ops of PyTorch; expected what torch.profiler's export_chrome_trace writes")
    return events


def _take(events: Events, row: Mapping[str, Any]) -> None:
    category, name = row.get("cat", ""), str(row["name"])
    begin = 1e-6 * float(row["ts"])
    end = begin + 1e-6 * float(row.get("dur", 0))
    if not begin <= end < float("inf"):
        raise ValueError(f"dur = {row.get('dur')!r}")
    arguments = row.get("args") or {}
    thread = (row.get("pid"), row.get("tid"))
    sequence = arguments.get("Sequence number")
    sequence = None if sequence is None else int(sequence)
    if category == "user_annotation" or (category == "python_function" and name.startswith("nn.Module: ")):
        events.ranges.append(Event(name, thread, begin, end))
    elif category == "cpu_op" and name.startswith(_BACKWARD):
        events.backward.append(Event(name, thread, begin, end, sequence))
    elif category == "cpu_op" and sequence is not None:
        events.ops.append(Event(name, thread, begin, end, sequence))
    elif category in _LAUNCHES and "correlation" in arguments:
        events.launches[thread].append((begin, int(arguments["correlation"])))
    elif category in _ON_DEVICE and "correlation" in arguments:
        events.device[int(arguments["correlation"])].append((begin, end))


def layer_times(
    events: Events, patterns: Mapping[LayerKind, Sequence[str]] = PATTERNS
) -> dict[tuple[LayerKind, PassName], list[float]]:
    """Seconds of every layer kind and pass, one for each time that a range was run.

    Args:
        patterns: names of ranges by layer kind, with ``*`` and ``?``.

    Raises:
        SpipeError: if no range is a block, with names that there are.
    """
    return _Reading(events, patterns).times()


class _Reading:
    def __init__(self, events: Events, patterns: Mapping[LayerKind, Sequence[str]]) -> None:
        self.events = events
        self.op_begins: dict[Any, list[float]] = {}
        self.ops: dict[Any, list[Event]] = defaultdict(list)
        for op in events.ops:
            self.ops[op.thread].append(op)
        for thread, ops in self.ops.items():
            self.op_begins[thread] = [op.begin for op in ops]
        self.backward_begins: dict[Any, list[float]] = {}
        self.backward: dict[Any, list[Event]] = defaultdict(list)
        for function in events.backward:
            self.backward[function.thread].append(function)
        for thread, functions in self.backward.items():
            self.backward_begins[thread] = [function.begin for function in functions]
        self.found = list(self.outermost(patterns))
        if not any(kind == "block" for kind, _ in self.found):
            names = Counter(event.name.rstrip("0123456789") + "*" for event in events.ranges)
            known = ", ".join(f"{name!r} ({count})" for name, count in names.most_common(8)) or "none"
            raise SpipeError(
                f"no range of the trace is a block (looked for {', '.join(patterns['block'])}); ranges there are: "
                f"{known}. Name them with --block, or mark layers with torch.profiler.record_function"
            )

    def outermost(self, patterns: Mapping[LayerKind, Sequence[str]]) -> Iterator[tuple[LayerKind, Event]]:
        """Ranges that are layers, without those inside another layer."""
        last: dict[Any, Event] = {}
        for event in self.events.ranges:
            around = last.get(event.thread)
            if around is not None and around.holds(event):
                continue
            for kind, names in patterns.items():
                if any(fnmatchcase(event.name, name) for name in names):
                    last[event.thread] = event
                    yield kind, event
                    break

    def times(self) -> dict[tuple[LayerKind, PassName], list[float]]:
        times: dict[tuple[LayerKind, PassName], list[float]] = defaultdict(list)
        not_their_own: set[int] = set()  # functions with a recompute inside, whose time is then not their own
        owner: dict[int, int] = {}  # sequence number -> the range whose forward made it, the last one counts
        for number, (kind, event) in enumerate(self.found):
            around = self.around(event)
            not_their_own |= {id(function) for function in around}
            name: PassName = "recompute" if around else "forward"
            times[kind, name].append(self.seconds([event]))
            for op in self.inside(event):
                if op.sequence is not None:
                    owner[op.sequence] = number
        functions: dict[int, list[Event]] = defaultdict(list)
        for mine in self.backward.values():
            current: int | None = None
            for function in mine:
                if function.sequence is not None:
                    current = owner.get(function.sequence)
                if current is not None and id(function) not in not_their_own:
                    functions[current].append(function)
        for number, mine in functions.items():
            times[self.found[number][0], "backward"].append(self.seconds(mine))
        return dict(times)

    def around(self, event: Event) -> list[Event]:
        """Functions of autograd inside which a range runs: it is a recompute then."""
        functions = self.backward.get(event.thread, [])
        at = bisect_left(self.backward_begins.get(event.thread, []), event.begin)
        return [function for function in functions[max(0, at - 4) : at] if function.holds(event)]

    def inside(self, event: Event) -> Iterator[Event]:
        begins = self.op_begins.get(event.thread, [])
        yield from self.ops[event.thread][bisect_left(begins, event.begin) : bisect_left(begins, event.end)]

    def seconds(self, parts: Iterable[Event]) -> float:
        """Time of the kernels that were launched meanwhile; without a device that of the parts themselves."""
        if not self.events.device:
            return sum(part.end - part.begin for part in parts)
        spans = []
        for part in parts:
            launches = self.events.launches.get(part.thread, [])
            first, stop = (bisect_left(launches, (time, -1)) for time in (part.begin, part.end))
            for _, correlation in launches[first:stop]:
                spans += self.events.device.get(correlation, [])
        return _covered(spans)


def _covered(spans: list[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, reached = 0.0, -float("inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def with_layers(
    hardware: HardwareSpec,
    times: Mapping[tuple[LayerKind, PassName], Sequence[float]],
    model: ModelSpec,
    microbatch_size: int,
    sequence: int,
    dtype: Dtype,
) -> HardwareSpec:
    """The hardware with these layer times; a recompute that was not seen takes as long as a forward."""
    known = {key: list(values) for key, values in times.items() if values and Samples.of(values).median > 0}
    for kind in PATTERNS:
        if (kind, "forward") in known and (kind, "recompute") not in known:
            known[kind, "recompute"] = known[kind, "forward"]
    made = {}
    for (kind, name), values in known.items():
        samples = Samples.of(values)
        shape: dict[str, Any] = MeasuredLayer.shape_of(model, kind)
        entry = MeasuredLayer(
            layer_kind=kind, pass_name=name, microbatch_size=microbatch_size, sequence=sequence, dtype=dtype,
            seconds=samples.median, spread_s=samples.spread, num_samples=samples.count, **shape,
        )  # fmt: skip
        made[entry.key] = entry
    kept = tuple(entry for entry in hardware.measured if entry.key not in made)
    return hardware.replace(
        measured=(*kept, *made.values()), provenance={**hardware.provenance, "measured": "measured"}
    )
