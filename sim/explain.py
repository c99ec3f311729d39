"""Explain: what limits a plan, the critical path in words, and what one better part would buy."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from spipe.hardware import HardwareSpec
from spipe.ops import COMPUTE, RECVS, SENDS, Kind
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
    resource: what most of the critical path is.
    shares: resource -> seconds of the critical path; they sum to a step that stands alone.
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
        yield f"limited by {self.resource}"
        parts = sorted(self.shares.items(), key=lambda item: -item[1])
        yield "the critical path of a step is " + ", ".join(
            f"{100 * seconds / total:.0f} % {_RESOURCES[name]}" for name, seconds in parts if seconds > 0.005 * total
        )
        longest = sorted(self.path, key=lambda segment: -segment.seconds)[:8]
        for segment in (segment for segment in self.path if segment in longest):
            ranks = f"rank{'s' if len(segment.ranks) > 1 else ''} {', '.join(map(str, segment.ranks))}"
            ops = f"{segment.num_ops} op{'s' if segment.num_ops > 1 else ''}"
            yield f"  {segment.what} on {ranks}: {ops}, {segment.seconds:.4g} s"
        for change in self.changes:
            verb = f"{100 * change['gain']:.1f} % less" if change["gain"] >= 0.001 else "no gain"
            yield f"{change['change']}: {change['step_s']:.4g} s a step, {verb}"


def explain(simulation: Simulation) -> Explanation:
    """What limits a simulated plan. Simulates it again on hardware that is better in one part at a time."""
    path = tuple(_segments(simulation))
    shares = dict.fromkeys(_RESOURCES, 0.0)
    for segment in path:
        shares[segment.resource] += segment.seconds
    changes = []
    plan, options = simulation.plan, simulation.plan.options
    variants = [(what, plan.replace(hardware=hardware)) for what, hardware in better(simulation.hardware)]
    if options.weight_slots is not None:
        roomier = options.replace(weight_slots=options.weight_slots + 1)
        what = "accelerator memory for the weights of one more stage"
        variants.append((what, plan.replace(hardware=simulation.hardware, options=roomier)))
    for what, variant in variants:
        step_s = simulate(variant, contention=simulation.contention).step_s
        changes.append({"change": what, "step_s": step_s, "gain": 1 - step_s / simulation.step_s})
    changes.sort(key=lambda change: -float(str(change["gain"])))
    return Explanation(_RESOURCES[max(shares, key=lambda name: shares[name])], shares, path, tuple(changes))


def better(hardware: HardwareSpec) -> Iterator[tuple[str, HardwareSpec]]:
    """(what, hardware) with one part twice as good."""
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
        hardware.replace(
            accelerator=accelerator.replace(
                peak_flops={dtype: 2 * flops for dtype, flops in accelerator.peak_flops.items()},
                memory_bandwidth_bytes_per_s=2 * accelerator.memory_bandwidth_bytes_per_s,
            ),
            measured=tuple(entry.replace(seconds=entry.seconds / 2) for entry in hardware.measured),
        ),
    )
    yield "one PCIe generation more (links within hosts twice as fast)", links(True, False)
    if hardware.num_hosts > 1:
        yield "a network twice as fast", links(True, True)
    yield (
        "twice the cores and host memory bandwidth",
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
    for what, group in groupby(steps, key=lambda step: _what(program.kind[step[0]])):
        members = list(group)
        ranks = tuple(dict.fromkeys(program.rank[i] for i, _ in members))
        resource = _resource(program.kind[members[0][0]])
        yield Segment(what, ranks, resource, len(members), math.fsum(seconds for _, seconds in members))


def _critical_ops(simulation: Simulation) -> list[tuple[int, float]]:
    """(op, seconds that it adds) from the first op of a step that stands alone to its last; they sum to its length.

    From the op that ends last, always on to what it waited for longest: a dependency, or the op before it in its lane.
    """
    program, alone = simulation.program, simulation._isolated
    before = [-1] * len(program)
    last: dict[int, int] = {}
    for i, lane in enumerate(program.lane):
        before[i] = last.get(lane, -1)
        last[lane] = i
    origin = min(alone.start_s)
    i = max(range(len(program)), key=lambda j: (alone.end_s[j], j))
    path: list[tuple[int, float]] = []
    seen: set[int] = set()
    end = alone.end_s[i]
    while True:
        seen.add(i)
        together = [i, program.partner[i]] if program.partner[i] >= 0 else [i]
        if program.kind[i] in (Kind.VALIDATE, Kind.BARRIER):
            together = next(list(group) for group in program.collectives() if i in group)
        causes = {d for j in together for d in (*program.dependencies[j], before[j]) if d >= 0} - seen - set(together)
        cause = max(causes, key=lambda j: (alone.end_s[j], j), default=-1)
        begin = min(alone.end_s[cause], end) if cause >= 0 else origin
        path.append((i, end - begin))
        if cause < 0:
            return path[::-1]
        i, end = cause, begin


def _what(kind: int) -> str:
    if kind in SENDS or kind in RECVS:
        return "message"
    return _WORDS.get(Kind(kind), Kind(kind).name.lower().replace("_", " "))


def _resource(kind: int) -> str:
    if kind in COMPUTE:
        return "compute"
    if kind in SENDS or kind in RECVS or kind in (Kind.STORE_STAGE_INPUT, Kind.LOAD_STAGE_INPUT):
        return "messages"
    named = {Kind.FETCH: "weights", Kind.OFFLOAD_GRAD: "gradients", Kind.STEP: "optimizer"}
    return named.get(Kind(kind), "other")
