"""Calibrate: a better hardware spec from measured traces.

Fitted are, by robust least squares on medians over microbatches and steps: seconds of every layer kind and pass
(the time of a stage is the sum of its layers and a fixed cost of the op), bandwidth and fixed cost of copies and
messages, the optimizer's rate, and the latency of a collective. On device ``cpu`` an op counts with the processor time
it used, because its wall time holds the contention for cores that the simulator adds itself; what the steps of the runs
take beyond that is then added to the layers, all by one factor.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from spipe.errors import SpipeError
from spipe.hardware import HardwareSpec, MeasuredLayer
from spipe.model import LAYER_KINDS, LayerKind, PassName
from spipe.ops import PARTNER, Kind
from spipe.plan import Plan
from spipe.sim.cost import CostModel
from spipe.sim.fitting import Prior, nonnegative_fit
from spipe.sim.measurements import Measurement, measured_step_s, measurements
from spipe.sim.simulation import simulate
from spipe.topology import Link, Place
from spipe.trace import WARM_UP_STEPS, Trace

_PASSES: tuple[tuple[Kind, PassName], ...] = (
    (Kind.FORWARD, "forward"),
    (Kind.RECOMPUTE, "recompute"),
    (Kind.BACKWARD, "backward"),
)
_MOST_UNSEEN = 1.3  # more than this is another program, not ours
_FIXED = (Kind.LOAD_TOKENS, Kind.STORE_STAGE_INPUT, Kind.LOAD_STAGE_INPUT, Kind.COMMIT, Kind.VALIDATE, Kind.BARRIER)


@dataclass(frozen=True)
class Calibration:
    """What was learnt.

    Attributes:
        hardware: the fitted spec.
        report: a row for every fitted value: ``what``, ``value``, ``unit``, ``spread`` (relative), ``samples``.
        runs: for every run its median step time, measured and as the fitted spec predicts it (seconds).
    """

    hardware: HardwareSpec
    report: list[dict[str, Any]]
    runs: list[dict[str, Any]] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """For files and other tools."""
        return {"hardware": self.hardware.name, "fits": self.report, "runs": self.runs}


def calibrate(
    runs: Sequence[tuple[Plan, Trace]],
    hardware: HardwareSpec | None = None,
    *,
    warmup: int = WARM_UP_STEPS,
    names: Sequence[str] = (),
) -> Calibration:
    """Fit a hardware spec to measured runs.

    Args:
        runs: plans with the traces of running them; several different ones tell more.
        hardware: what to start from; None: the hardware of the first plan.
        warmup: steps of the job that do not count (by step number; a trace may start later).
        names: what messages call the runs; default: by number, from 0.

    Raises:
        SpipeError: if a trace is of another plan or device, is not complete, has too few steps, or holds durations
            that cannot be.
    """
    if not runs:
        raise SpipeError("calibration needs at least one run: a plan and its trace")
    hardware = _with_cores(hardware or runs[0][0].hardware, [trace for _, trace in runs])
    names = names or [f"run {number}" for number in range(len(runs))]
    fit = _Fit(
        hardware,
        [
            measurements(plan, trace, hardware, warmup, f"calibrate: {name}")
            for name, (plan, trace) in zip(names, runs, strict=True)
        ],
    )
    fit.layers()
    fit.copies()
    fit.messages()
    fit.optimizer()
    fit.fixed_costs()
    measured = [
        measured_step_s(plan.program(), trace, warmup, f"calibrate: {name}")
        for name, (plan, trace) in zip(names, runs, strict=True)
    ]
    fit.unseen_time([plan for plan, _ in runs], measured)
    fitted = fit.hardware
    rows = []
    for number, (plan, _) in enumerate(runs):
        predicted = simulate(plan, hardware=fitted).step_s
        rows.append(
            {"run": number, "plan": plan.digest(), "measured_s": measured[number], "predicted_s": predicted,
             "error": predicted / measured[number] - 1}
        )  # fmt: skip
    return Calibration(fitted, fit.report, rows)


def _with_cores(hardware: HardwareSpec, traces: Sequence[Trace]) -> HardwareSpec:
    """Device ``cpu``: the spec with the cores that the runs had, where all traces say the same."""
    cores = {trace.metadata.get("usable_cores") for trace in traces}
    if hardware.device != "cpu" or len(cores) != 1 or not isinstance(number := cores.pop(), int) or number < 1:
        return hardware
    cpu = hardware.cpu.replace(cores=number, num_domains=min(hardware.cpu.num_domains, number))
    threads = min(hardware.accelerator.compute_threads, number)
    return hardware.replace(
        cpu=cpu,
        accelerator=hardware.accelerator.replace(compute_threads=threads),
        provenance={**hardware.provenance, "cpu.cores": "measured"},
    )


Shape = tuple[object, ...]
"""All that the time of a layer depends on, apart from its kind and pass."""


def _shape(costs: CostModel) -> Shape:
    sizes = [MeasuredLayer.shape_of(costs.model, kind) for kind in LAYER_KINDS]
    return (
        costs.microbatch_size,
        costs.sequence,
        costs.precision,
        *(value for size in sizes for value in size.values()),
    )


class _Fit:
    """Fits one thing after another; each starts from the spec with what was fitted before."""

    def __init__(self, hardware: HardwareSpec, runs: Sequence[list[Measurement]]) -> None:
        self.hardware = hardware
        self.ops = [op for run in runs for op in run]
        self.shapes = {_shape(op.costs): op.costs for op in self.ops}
        self.fitted_layers: set[tuple[object, ...]] = set()
        self.report: list[dict[str, Any]] = []

    def of_kind(self, *kinds: Kind) -> list[Measurement]:
        return [op for op in self.ops if op.kind in kinds]

    def update(self, provenance: Mapping[str, str], **changes: Any) -> None:
        self.hardware = self.hardware.replace(provenance={**self.hardware.provenance, **provenance}, **changes)

    def set_overhead(self, kind: Kind, seconds: float, ops: Sequence[Measurement]) -> None:
        overheads = {**self.hardware.measured_op_overhead_s, kind.name: max(float(seconds), 0.0)}
        self.update({"measured_op_overhead_s": "fitted"}, measured_op_overhead_s=overheads)
        self.note(f"fixed cost of {kind.name}", overheads[kind.name], "s", ops)

    def note(self, what: str, value: float, unit: str, ops: Sequence[Measurement]) -> None:
        samples = sum(op.seconds.count for op in ops)
        self.report.append({"what": what, "value": value, "unit": unit, "spread": _spread(ops), "samples": samples})

    # ------------------------------------------------------------------ compute

    def layers(self) -> None:
        """Seconds of every layer kind and pass, for every shape, and the fixed costs of compute ops."""
        self.set_threads()
        seconds: dict[tuple[Shape, LayerKind, PassName], tuple[float, list[Measurement]]] = {}
        for kind, name in _PASSES:
            if ops := self.of_kind(kind):
                for (shape, layer), value in self.one_pass(kind, name, ops).items():
                    mine = [op for op in ops if _shape(op.costs) == shape and op.layer_counts[layer]]
                    seconds[shape, layer, name] = value, mine
        self.fill_unseen(seconds)
        entries = {entry_key(entry): entry for entry in self.hardware.measured}
        for (shape, layer, name), (value, ops) in seconds.items():
            costs = self.shapes[shape]
            entry = MeasuredLayer.model_validate(
                {
                    "layer_kind": layer,
                    "pass_name": name,
                    "microbatch_size": costs.microbatch_size,
                    "sequence": costs.sequence,
                    "dtype": costs.precision,
                    "seconds": value,
                    "spread_s": _spread(ops) * value,
                    "num_samples": max(1, sum(op.seconds.count for op in ops)),
                    **MeasuredLayer.shape_of(costs.model, layer),
                }
            )
            entries[entry_key(entry)] = entry
            self.fitted_layers.add(entry_key(entry))
            self.note(f"{layer} {name}, {costs.microbatch_size} x {costs.sequence} {costs.precision}", value, "s", ops)
        self.update({"measured": "measured"}, measured=tuple(entries.values()))

    def set_threads(self) -> None:
        if self.hardware.device != "cpu":
            return
        threads = {op.costs.compute_threads for op in self.ops}
        if len(threads) > 1:
            raise SpipeError(
                f"calibrate: the runs compute with {' and '.join(map(str, sorted(threads)))} threads a rank; use runs "
                "with one number of compute_threads"
            )
        self.hardware = self.hardware.replace(
            accelerator=self.hardware.accelerator.replace(compute_threads=threads.pop())
        )

    def one_pass(self, kind: Kind, name: PassName, ops: list[Measurement]) -> dict[tuple[Shape, LayerKind], float]:
        """Seconds of every layer kind seen in this pass; the fixed cost of the op goes into the spec.

        Where the stages do not tell layers apart (an embedding that always comes with one block), their ratio is that
        of peak rates, and the fixed cost is the spec's.
        """
        seen = [
            (shape, layer)
            for shape in self.shapes
            for layer in LAYER_KINDS
            if any(_shape(op.costs) == shape and op.layer_counts[layer] for op in ops)
        ]
        rows = [[*(op.layer_counts[layer] * (_shape(op.costs) == shape) for shape, layer in seen), 1.0] for op in ops]
        launch = self.hardware.accelerator.launch_overhead_s
        fixed = launch if self.hardware.device == "cpu" else 0.0
        priors = [Prior([0.0] * len(seen) + [1.0], fixed, max(launch, 1e-6))]
        for shape, layer in seen:
            if layer != "block" and (shape, "block") in seen:
                mine = [op for op in ops if _shape(op.costs) == shape]
                block = median(op.seconds.median / max(op.layer_counts["block"], 1) for op in mine)
                ratio = self.shapes[shape].roofline_ratio(layer, name)
                row = [0.0] * (len(seen) + 1)
                row[seen.index((shape, layer))] = 1.0
                row[seen.index((shape, "block"))] = -ratio
                priors.append(Prior(row, 0.0, max(0.5 * ratio, 0.01) * block))
        *found, overhead = nonnegative_fit(rows, [op.seconds.median for op in ops], priors, _spread(ops))
        self.set_overhead(kind, overhead + median(op.gap_s for op in ops), ops)
        return {key: float(value) for key, value in zip(seen, found, strict=True)}

    def fill_unseen(self, seconds: dict[tuple[Shape, LayerKind, PassName], tuple[float, list[Measurement]]]) -> None:
        """Forward of a layer that only recompute saw (the top of the model), and the other way round."""
        passes: tuple[tuple[PassName, PassName], ...] = (("forward", "recompute"), ("recompute", "forward"))
        for shape in self.shapes:
            for name, other in passes:
                blocks = [seconds.get((shape, "block", x), (0.0, []))[0] for x in (name, other)]
                ratio = blocks[0] / blocks[1] if all(blocks) else 1.0
                for layer in LAYER_KINDS:
                    known = seconds.get((shape, layer, other))
                    if known and (shape, layer, name) not in seconds:
                        seconds[shape, layer, name] = known[0] * ratio, []

    # ------------------------------------------------------------------ bytes

    def copies(self) -> None:
        """Bandwidth of the links between accelerators and host memory; fixed costs of copies."""
        fetches = [op for op in self.of_kind(Kind.FETCH) if op.num_bytes > 0 and not op.is_remote]
        offloads = [op for op in self.of_kind(Kind.OFFLOAD_GRAD) if op.num_bytes > 0]
        if fetches:
            bandwidth, fixed = self.line(fetches)
            if bandwidth < float("inf"):
                ends = [(op.source, op.target) for op in fetches]
                self.set_bandwidth(ends, bandwidth, "copies between accelerator and host", fetches)
            latency = median(self.route_latency(op) for op in fetches)
            self.set_overhead(Kind.FETCH, fixed - latency + median(op.gap_s for op in fetches), fetches)
        if offloads:
            self.set_overhead(Kind.OFFLOAD_GRAD, self.excess(offloads), offloads)

    def messages(self) -> None:
        """Messages: bandwidth, where they have links of their own; else what they take beyond a copy."""
        sends = [op for op in self.of_kind(*PARTNER) if op.num_bytes > 0]
        if not sends:
            return
        sizes = {op.num_bytes for op in sends}
        own = self.own_edges(sends)
        if own and max(sizes) >= 1.5 * min(sizes):
            bandwidth, _ = self.line(sends)
            if bandwidth < float("inf"):
                self.set_bandwidth([(op.source, op.target) for op in sends], bandwidth, "messages", sends, own)
        elif own:
            lasting = [op.num_bytes / (op.seconds.median - self.route_latency(op)) for op in sends
                       if op.seconds.median > 1.5 * self.route_latency(op)]  # fmt: skip
            if lasting:
                ends = [(op.source, op.target) for op in sends]
                self.set_bandwidth(ends, median(lasting), "messages", sends, own)
        for kind in PARTNER:
            mine = [op for op in sends if op.kind == kind]
            if mine:
                self.set_overhead(kind, self.excess(mine), mine)

    def line(self, ops: Sequence[Measurement]) -> tuple[float, float]:
        """(bytes per second, fixed seconds) of copies of several sizes; of one size: the route's own latency."""
        latency = median(self.route_latency(op) for op in ops)
        slope, fixed = nonnegative_fit(
            [[op.num_bytes, 1.0] for op in ops],
            [op.seconds.median for op in ops],
            [Prior([0.0, 1.0], latency, max(latency, 1e-6))],
            _spread(ops),
        )
        return (1 / slope if slope > 0 else float("inf")), float(fixed)

    def route_latency(self, op: Measurement) -> float:
        return self.hardware.route(op.source, op.target).latency_s

    def excess(self, ops: Sequence[Measurement]) -> float:
        """What ops take beyond the transfer of their bytes."""
        route = self.hardware.route
        return median(
            op.seconds.median + op.gap_s - (route(op.source, op.target).seconds(op.num_bytes) if op.num_bytes else 0.0)
            for op in ops
        )

    def own_edges(self, sends: Sequence[Measurement]) -> set[int]:
        """Edges that messages use and copies between accelerator and host do not."""
        route = self.hardware.route
        places: list[tuple[Place, Place]] = [(op.source, op.target) for op in sends]
        used = {edge for source, target in places for edge in route(source, target).edges}
        for gpu in {place for ends in places for place in ends}:
            memory: Place = ("memory", self.hardware.host_of(gpu[1]))
            used -= {*route(gpu, memory).edges, *route(memory, gpu).edges}
        return used

    def set_bandwidth(
        self,
        ends: Sequence[tuple[Place, Place]],
        bandwidth: float,
        what: str,
        ops: Sequence[Measurement],
        edges: set[int] | None = None,
    ) -> None:
        """Give the links at accelerators on these routes (of ``edges``, if given) a bandwidth."""
        topology = self.hardware.topology
        names = {topology.edges[e].name for source, target in set(ends) for e in topology.route(source, target).edges
                 if edges is None or e in edges}  # fmt: skip
        links, provenance = [], {}
        for number, link in enumerate(self.hardware.links):
            kinds = [link.a.rstrip("*0123456789"), link.b.rstrip("*0123456789")]
            if "gpu" in kinds and any(_joins(link, name) for name in names):
                links.append(_with_bandwidth(link, bandwidth))
                provenance[f"links[{number}].bandwidth_bytes_per_s"] = "fitted"
            else:
                links.append(link)
        self.update(provenance, links=tuple(links))
        self.note(f"bandwidth of {what}", bandwidth, "bytes/s", ops)

    # ------------------------------------------------------------------ optimizer and the rest

    def optimizer(self) -> None:
        ops = [op for op in self.of_kind(Kind.STEP) if op.num_parameters > 0]
        if not ops:
            return
        cores = self.hardware.cpu.cores
        part = [min(1.0, op.costs.adam_threads / cores) for op in ops]
        slope, fixed = nonnegative_fit(
            [[op.num_parameters / share, 1.0] for op, share in zip(ops, part, strict=True)],
            [op.seconds.median for op in ops],
            [Prior([0.0, 1.0], self.hardware.cpu.adam_s_per_op, max(self.hardware.cpu.adam_s_per_op, 1e-6))],
            _spread(ops),
        )
        if slope > 0:
            cpu = self.hardware.cpu.replace(adam_parameters_per_s=1 / slope)
            self.update({"cpu.adam_parameters_per_s": "fitted"}, cpu=cpu)
            self.note("optimizer, all cores", 1 / slope, "parameters/s", ops)
        self.set_overhead(Kind.STEP, float(fixed) + median(op.gap_s for op in ops), ops)

    def unseen_time(self, plans: Sequence[Plan], measured_s: Sequence[float]) -> None:
        """Device ``cpu``: what steps take beyond the processor time of their ops, as a share of all compute.

        Threads that wake late and cores that others use for a moment do not show in processor time.
        """
        if self.hardware.device != "cpu":
            return
        ratio = median(
            measured / simulate(plan, hardware=self.hardware).step_s
            for plan, measured in zip(plans, measured_s, strict=True)
        )
        ratio = min(max(ratio, 1.0), _MOST_UNSEEN)
        entries = [
            entry.replace(seconds=entry.seconds * ratio) if entry_key(entry) in self.fitted_layers else entry
            for entry in self.hardware.measured
        ]
        self.update({}, measured=tuple(entries))
        self.report.append(
            {
                "what": "time beyond processor time",
                "value": ratio - 1,
                "unit": "share",
                "spread": 0.0,
                "samples": len(plans),
            }
        )

    def fixed_costs(self) -> None:
        """Ops that are mostly latency, beyond what their route takes."""
        for kind in _FIXED:
            ops = self.of_kind(kind)
            if ops:
                self.set_overhead(kind, self.excess(ops), ops)


def _spread(ops: Sequence[Measurement]) -> float:
    """Relative spread of repeated measurements."""
    return median(op.seconds.spread / op.seconds.median for op in ops) if ops else 0.0


def _joins(link: Link, edge_name: str) -> bool:
    """Whether an edge, named ``host0/gpu1 -> host0/memory0``, belongs to a link."""
    ends = edge_name.replace("<->", "->").split(" -> ")

    def fits(node: str, place: str) -> bool:
        name = place.rpartition("/")[2]
        if node.endswith("*"):
            return name.rstrip("0123456789") == node[:-1]
        return name in (node, f"{node}0")

    a, b = ends
    return (fits(link.a, a) and fits(link.b, b)) or (fits(link.a, b) and fits(link.b, a))


def _with_bandwidth(link: Link, bandwidth: float) -> Link:
    both = link.both_directions_bytes_per_s
    scaled = None if both is None else both * bandwidth / link.bandwidth_bytes_per_s
    return link.replace(bandwidth_bytes_per_s=bandwidth, both_directions_bytes_per_s=scaled)


def entry_key(entry: MeasuredLayer) -> tuple[object, ...]:
    """What a measured entry is about, without its value."""
    return tuple(value for name, value in entry if name not in ("seconds", "spread_s", "num_samples", "source"))
