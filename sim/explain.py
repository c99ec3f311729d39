"""Explain: what limits a plan, the critical path in words, and what one better part would buy."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

from spipe.hardware import HardwareSpec
from spipe.ops import COLLECTIVES, COMPUTE, RECVS, SENDS, Kind
from spipe.sim.simulation import Simulation, simulate

_WORDS = {
    Kind.FORWARD: "forward",
    Kind.RECOMPUTE: "recompute and backward",
    Kind.BACKWARD: "recompute and backward",
    Kind.WEIGHT_GRADIENT: "weight gradients",
    Kind.FETCH: "weights to the accelerator",
    Kind.OFFLOAD_GRAD: "gradients to the host",
    Kind.STEP: "optimizer",
}
_SHOWN = 8  # places of the critical path
_GAIN = 0.001  # part of the step; less is none
_RESOURCES = {
    "compute": "the accelerators' compute",
    "messages": "messages between accelerators",
    "weights": "copies of weights from host memory",
    "gradients": "copies of gradients to host memory",
    "optimizer": "the optimizer on the host's CPU",
    "other": "latency and the order of ops",
}


@dataclass(frozen=True)
class Segment:
    """A part of the critical path: consecutive ops of one kind. ``seconds``: what it adds to the step."""

    what: str
    ranks: tuple[int, ...]
    resource: str
    num_ops: int
    seconds: float


@dataclass(frozen=True)
class Explanation:
    """Attributes:
    resource: what the best change is about or, if none gains, most of the critical path.
    shares: resource -> seconds of the critical path; they sum to a step.
    path: the critical path, first to last.
    changes: for every single change, ``change``, ``step_s`` and ``gain`` (part of the step saved), best first.
    """

    resource: str
    shares: dict[str, float]
    path: tuple[Segment, ...]
    changes: tuple[dict[str, Any], ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "limiting_resource": self.resource,
            "critical_path_s": self.shares,
            "critical_path": [vars(segment) for segment in self.path],
            "changes": list(self.changes),
        }

    def words(self) -> Iterator[str]:
        """Sentences."""
        total = math.fsum(self.shares.values())
        largest = _RESOURCES[max(self.shares, key=lambda name: self.shares[name])]
        yield f"limited by {self.resource}" + (", where a better part gains most" if self.resource != largest else "")
        parts = sorted(self.shares.items(), key=lambda item: -item[1])
        yield "the critical path of a step is " + ", ".join(
            f"{100 * seconds / total:.0f} % {_RESOURCES[name]}" for name, seconds in parts if seconds > 0.005 * total
        )
        seconds_of: dict[tuple[str, tuple[int, ...]], list[float]] = {}
        num_ops: Counter[tuple[str, tuple[int, ...]]] = Counter()
        for segment in self.path:
            seconds_of.setdefault((segment.what, segment.ranks), []).append(segment.seconds)
            num_ops[segment.what, segment.ranks] += segment.num_ops
        longest = sorted(seconds_of, key=lambda where: -math.fsum(seconds_of[where]))[:_SHOWN]
        for where in (where for where in seconds_of if where in longest):  # in the order of their first
            what, numbers = where
            ranks = f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
            ops = f"{num_ops[where]} op{'s' if num_ops[where] > 1 else ''}"
            times = f" in {len(seconds_of[where])} parts" if len(seconds_of[where]) > 1 else ""
            yield f"  {what} on {ranks}: {ops}{times}, {math.fsum(seconds_of[where]):.4g} s"
        rest = [where for where in seconds_of if where not in longest]
        if rest:
            rest_s = math.fsum(seconds for where in rest for seconds in seconds_of[where])
            yield f"  and {sum(num_ops[where] for where in rest)} other ops, {rest_s:.4g} s"
        for change in self.changes:
            verb = f"{100 * change['gain']:.1f} % less" if change["gain"] >= _GAIN else "no gain"
            yield f"{change['change']}: {change['step_s']:.4g} s a step, {verb}"


def explain(simulation: Simulation) -> Explanation:
    """What limits a simulated plan. Simulates it again on hardware that is better in one part at a time.

    The longest part of the critical path need not be what limits: next to it may lie a path of other resources that is
    nearly as long.
    """
    path = tuple(_segments(simulation))
    shares = dict.fromkeys(_RESOURCES, 0.0)
    for segment in path:
        shares[segment.resource] += segment.seconds
    changes, helped = [], []
    plan, options = simulation.plan, simulation.plan.options
    variants = [(what, names, plan.replace(hardware=hardware)) for what, names, hardware in better(simulation.hardware)]
    if options.weight_slots is not None:
        roomier = options.replace(weight_slots=options.weight_slots + 1)
        what = "accelerator memory for the weights of one more stage"
        variants.append((what, ("weights",), plan.replace(hardware=simulation.hardware, options=roomier)))
    for what, names, variant in variants:
        step_s = simulate(variant, contention=simulation.contention).step_s
        gain = 1 - step_s / simulation.step_s
        changes.append({"change": what, "step_s": step_s, "gain": gain})
        helped.append((gain, names))
    changes.sort(key=lambda change: -float(str(change["gain"])))
    most, names = max(helped, key=lambda item: item[0])
    limiting = max(names if most >= _GAIN else tuple(shares), key=lambda name: shares[name])
    return Explanation(_RESOURCES[limiting], shares, path, tuple(changes))


def better(hardware: HardwareSpec) -> Iterator[tuple[str, tuple[str, ...], HardwareSpec]]:
    """(what, resources that it is about, hardware) with one part twice as good."""
    accelerator, cpu = hardware.accelerator, hardware.cpu

    def links(chosen: bool, network: bool) -> HardwareSpec:
        return hardware.replace(
            links=tuple(
                link.replace(
                    bandwidth_bytes_per_s=2 * link.bandwidth_bytes_per_s,
                    both_directions_bytes_per_s=link.both_directions_bytes_per_s
                    and 2 * link.both_directions_bytes_per_s,
                )
                if chosen and (("network" in (link.a, link.b)) == network)
                else link
                for link in hardware.links
            )
        )

    yield (
        "accelerators twice as fast",
        ("compute",),
        hardware.replace(
            accelerator=accelerator.replace(
                peak_flops={dtype: 2 * flops for dtype, flops in accelerator.peak_flops.items()},
                memory_bandwidth_bytes_per_s=2 * accelerator.memory_bandwidth_bytes_per_s,
            ),
            measured=tuple(entry.replace(seconds=entry.seconds / 2) for entry in hardware.measured),
        ),
    )
    copied = ("messages", "weights", "gradients")
    yield "one PCIe generation more (links within hosts twice as fast)", copied, links(True, False)
    if hardware.num_hosts > 1:
        yield "a network twice as fast", copied, links(True, True)
    yield (
        "twice the cores and host memory bandwidth",
        ("optimizer",),
        hardware.replace(
            cpu=cpu.replace(
                cores=2 * cpu.cores,
                adam_parameters_per_s=2 * cpu.adam_parameters_per_s,
                memory_bandwidth_bytes_per_s=2 * cpu.memory_bandwidth_bytes_per_s,
            )
        ),
    )


def _segments(simulation: Simulation) -> Iterator[Segment]:
    program = simulation.program
    steps = [(i, seconds) for i, seconds in _critical_ops(simulation) if seconds > 0]
    recomputes = program.options.recompute != "never"
    for what, group in groupby(steps, key=lambda step: _what(program.kind[step[0]], recomputes)):
        members = list(group)
        ranks = tuple(dict.fromkeys(program.rank[i] for i, _ in members))
        resource = _resource(program.kind[members[0][0]])
        yield Segment(what, ranks, resource, len(members), math.fsum(seconds for _, seconds in members))


def _critical_ops(simulation: Simulation) -> list[tuple[int, float]]:
    """(op, seconds that it adds) between the VALIDATEs of the last two steps; they sum to the step's length.

    From the VALIDATE that ends the step, always on to what an op waited for longest: a dependency, in the step before,
    too, or the op before it in its lane. Of a step that stands alone: from its last op to its first.
    """
    program, count, last = simulation.program, len(simulation.program), simulation.last_step
    start, end = simulation.timeline.start_s, simulation.timeline.end_s
    before = _before_in_lane(simulation)
    collectives = list(program.collectives())

    def latest(nodes: Iterable[int]) -> int:
        return max(nodes, key=lambda k: (end[k], k), default=-1)

    def causes(k: int) -> set[int]:
        i = k % count
        together = [i, program.partner[i]] if program.partner[i] >= 0 else [i]
        if program.kind[i] in COLLECTIVES:
            together = next(list(group) for group in collectives if i in group)
        found = {before.get(k - i + j, -1) for j in together}
        found |= {k - i + d for j in together for d in program.dependencies[j]}
        found |= {k - i + d - count * program.lag(j, d) for j in together for d in program.carried[j]}
        return {d for d in found if d >= 0}.difference(seen, (k - i + j for j in together))

    validated = [i for i, kind in enumerate(program.kind) if kind == Kind.VALIDATE]
    k = latest(last * count + i for i in validated) if last else latest(range(count))
    origin = max(end[(last - 1) * count + i] for i in validated) if last else min(start)
    path: list[tuple[int, float]] = []
    seen: set[int] = set()
    done = end[k]
    while done > origin:
        seen.add(k)
        cause = latest(causes(k))
        begin = max(min(end[cause], done), origin) if cause >= 0 else origin
        path.append((k % count, done - begin))
        k, done = cause, begin
    return path[::-1]


def _before_in_lane(simulation: Simulation) -> dict[int, int]:
    """The op before an op in its lane, by step and op: in the lane's order or, by deadline, as they came."""
    program, count = simulation.program, len(simulation.program)
    start, end = simulation.timeline.start_s, simulation.timeline.end_s
    queues: list[list[int]] = [[] for _ in program.lanes]
    for k in range(len(start)):
        queues[program.lane[k % count]].append(k)
    for lane, queue in zip(program.lanes, queues, strict=True):
        if lane.discipline == "deadline":
            queue.sort(key=lambda k: (start[k], end[k], k))
    return {k: before for queue in queues for before, k in pairwise(queue)}


def _what(kind: int, recomputes: bool) -> str:
    if kind in SENDS or kind in RECVS:
        return "message"
    if not recomputes and kind in (Kind.RECOMPUTE, Kind.BACKWARD):  # the first is the top stage's only forward
        return "forward" if kind == Kind.RECOMPUTE else "backward"
    return _WORDS.get(Kind(kind), Kind(kind).name.lower().replace("_", " "))


def _resource(kind: int) -> str:
    if kind in COMPUTE:
        return "compute"
    if kind in SENDS or kind in RECVS or kind in (Kind.STORE_STAGE_INPUT, Kind.LOAD_STAGE_INPUT):
        return "messages"
    named = {Kind.FETCH: "weights", Kind.OFFLOAD_GRAD: "gradients", Kind.STEP: "optimizer"}
    return named.get(Kind(kind), "other")
