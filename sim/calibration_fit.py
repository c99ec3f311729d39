"""The fit of a calibration: one thing after another, each from the spec with what was fitted before."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from statistics import median
from typing import Any

from spipe.errors import SpipeError
from spipe.hardware import HardwareSpec, MeasuredLayer, standard_error
from spipe.model import BLOCK_PARTS, LAYER_KINDS, LayerKind, ModelSpec, PassName
from spipe.ops import PARTNER, Kind
from spipe.plan import Plan
from spipe.sim.cost import CostModel
from spipe.sim.fitting import Prior, nonnegative_fit
from spipe.sim.host_issue import bound_by_host, issue_seconds
from spipe.sim.measurements import Measurement, measurements
from spipe.sim.simulation import simulate
from spipe.topology import Link, Place

_PASSES: tuple[tuple[Kind, PassName], ...] = (
    (Kind.FORWARD, "forward"),
    (Kind.RECOMPUTE, "recompute"),
    (Kind.BACKWARD, "backward"),
)
_BODY: tuple[LayerKind, ...] = ("block", *BLOCK_PARTS)
_UNEXPLAINED = 1.05  # what is beyond this is worth a warning
_ROUNDS, _SETTLED, _MOST_SETTLED, _SETTLING_RUNS = 3, 0.01, 2.0, 4
_FIXED = (Kind.LOAD_TOKENS, Kind.STORE_STAGE_INPUT, Kind.LOAD_STAGE_INPUT, Kind.COMMIT, Kind.VALIDATE, Kind.BARRIER)

Shape = tuple[object, ...]
"""All that the time of a layer depends on, apart from its kind and pass."""


def _decoder(costs: CostModel) -> ModelSpec:
    assert isinstance(costs.model, ModelSpec)
    return costs.model


def _shape(costs: CostModel) -> Shape:
    sizes = [MeasuredLayer.shape_of(_decoder(costs), kind) for kind in LAYER_KINDS]
    return (
        costs.microbatch_size,
        costs.sequence,
        costs.precision,
        *(value for size in sizes for value in size.values()),
    )


class Fit:
    """Fits one thing after another; each starts from the spec with what was fitted before."""

    def __init__(self, hardware: HardwareSpec, runs: Sequence[list[Measurement]]) -> None:
        self.start = self.hardware = hardware
        self.runs = runs
        self.ops = [op for run in runs for op in run]
        self.bound_by_host = {id(op) for run in runs for op in bound_by_host(run)}
        self.shapes = {_shape(op.costs): op.costs for op in self.ops}
        self.fitted_layers: dict[tuple[object, ...], str] = {}
        self.fitted_passes: set[tuple[Shape, PassName]] = set()
        """Of blocks, or of their parts; not those that only the host bounds."""
        self.report: list[dict[str, Any]] = []

    def of_kind(self, *kinds: Kind) -> list[Measurement]:
        return [op for op in self.ops if op.kind in kinds]

    def update(self, provenance: Mapping[str, str], **changes: Any) -> None:
        self.hardware = self.hardware.replace(provenance={**self.hardware.provenance, **provenance}, **changes)

    def set_overhead(self, kind: Kind, seconds: float, ops: Sequence[Measurement]) -> None:
        overheads = {**self.hardware.measured_op_overhead_s, kind.name: max(float(seconds), 0.0)}
        self.update({"measured_op_overhead_s": "fitted"}, measured_op_overhead_s=overheads)
        self.note(f"fixed cost of {kind.name}", overheads[kind.name], "s", ops)

    def surely(self, field: str, ops: Sequence[Measurement]) -> None:
        """Note how surely a field is known now."""
        error = standard_error(_spread(ops), max(1, sum(op.seconds.count for op in ops)))
        self.hardware = self.hardware.replace(uncertainty={**self.hardware.uncertainty, field: error})

    def note(self, what: str, value: float, unit: str, ops: Sequence[Measurement]) -> None:
        samples = sum(op.seconds.count for op in ops)
        row = {"what": what, "value": value, "unit": unit, "spread": _spread(ops), "samples": samples}
        self.report = [other for other in self.report if other["what"] != what] + [row]

    # ------------------------------------------------------------------ compute

    def layers(self) -> None:
        """Seconds of every layer kind and pass, for every shape, and the fixed costs of compute ops."""
        self.set_threads()
        seconds: dict[tuple[Shape, LayerKind, PassName], tuple[float, list[Measurement]]] = {}
        for kind, name in _PASSES:
            if ops := [op for op in self.of_kind(kind) if not self.hides_the_device(op, name)]:
                for (shape, layer), value in self.one_pass(kind, name, ops).items():
                    mine = [op for op in ops if _shape(op.costs) == shape and op.layer_counts[layer]]
                    seconds[shape, layer, name] = value, mine
        self.fill_unseen(seconds)
        self.fitted_passes = {(shape, name) for shape, layer, name in seconds if layer in _BODY}
        self.issue()
        entries = {entry.key: entry for entry in self.hardware.measured}
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
                    **MeasuredLayer.shape_of(_decoder(costs), layer),
                }
            )
            entries[entry.key] = entry
            self.fitted_layers[entry.key] = _layer_text(entry)
            self.note(_layer_text(entry), value, "s", ops)
        self.update({"measured": "measured"}, measured=tuple(entries.values()))

    def hides_the_device(self, op: Measurement, name: PassName) -> bool:
        """Whether the op says how long the host took, and a profile says how long the device takes for its layers."""
        return id(op) in self.bound_by_host and all(self.profiled(op.costs, layer, name) for layer in op.layer_counts)

    def profiled(self, costs: CostModel, layer: str, name: PassName) -> MeasuredLayer | None:
        """What a profile says of a pass of a layer, if it does."""
        entry = self.start.find_measured(
            costs.model, layer, name, costs.microbatch_size, costs.sequence, costs.precision
        )
        return entry if entry is not None and entry.source == "profile" else None

    def issue(self) -> None:
        """What the host needs to issue a pass of a layer, and an op: the least that they take, with less work, too."""
        accelerator = self.start.accelerator
        layers, ops = dict(accelerator.layer_issue_s), dict(accelerator.op_issue_s)
        for kind, name in _PASSES:
            issued = [
                op
                for op in self.of_kind(kind)
                if op.issue_s > 0 and not op.is_replayed and any(map(op.layer_counts.get, _BODY))
            ]
            if issued:
                layers[name], ops[name] = issue_seconds(issued, self.bound_by_host, layers.get(name), _spread(issued))
                self.note(f"issuing a layer's {name}", layers[name], "s", issued)
                self.note(f"issuing an op's {name}, beside its layers", ops[name], "s", issued)
        replayed = [op for op in self.ops if op.issue_s > 0 and op.is_replayed]
        if replayed:
            issue_s = median(op.issue_s for op in replayed)
            accelerator = self.hardware.accelerator.replace(launch_overhead_s=issue_s)
            self.update({"accelerator.launch_overhead_s": "fitted"}, accelerator=accelerator)
            self.note("issuing an op that is replayed", issue_s, "s", replayed)
        if layers:
            accelerator = self.hardware.accelerator.replace(layer_issue_s=layers, op_issue_s=ops)
            provenance = {"accelerator.layer_issue_s": "fitted", "accelerator.op_issue_s": "fitted"}
            self.update(provenance, accelerator=accelerator)

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
        rows = [
            [*(op.computed.get(layer, 0.0) * (_shape(op.costs) == shape) for shape, layer in seen), 1.0] for op in ops
        ]
        launch = self.hardware.accelerator.launch_overhead_s
        fixed = launch if self.hardware.device == "cpu" else 0.0
        priors = [Prior([0.0] * len(seen) + [1.0], fixed, max(launch, 1e-6))]
        for shape, layer in seen:
            unit = next((kind for kind in _BODY if (shape, kind) in seen), layer)
            if layer != unit:
                mine = [op for op in ops if _shape(op.costs) == shape]
                unit_s = median(_of_layers_s(op) / (op.computed.get(unit) or 1.0) for op in mine)
                ratio = self.shapes[shape].ratio(layer, unit, name)
                row = [0.0] * (len(seen) + 1)
                row[seen.index((shape, layer))] = 1.0
                row[seen.index((shape, unit))] = -ratio
                priors.append(Prior(row, 0.0, max(0.5 * ratio, 0.01) * unit_s))
        *found, overhead = nonnegative_fit(rows, [_of_layers_s(op) for op in ops], priors, _spread(ops))
        self.set_overhead(kind, overhead + median(op.gap_s for op in ops), ops)
        return {key: float(value) for key, value in zip(seen, found, strict=True)}

    def fill_unseen(self, seconds: dict[tuple[Shape, LayerKind, PassName], tuple[float, list[Measurement]]]) -> None:
        """Forward of a layer that only recompute saw (the top of the model), and the other way round."""
        passes: tuple[tuple[PassName, PassName], ...] = (("forward", "recompute"), ("recompute", "forward"))
        for shape in self.shapes:
            for name, other in passes:
                pairs = [[seconds.get((shape, kind, x), (0.0, []))[0] for x in (name, other)] for kind in _BODY]
                ratio = next((ours / theirs for ours, theirs in pairs if ours and theirs), 1.0)
                for layer in LAYER_KINDS:
                    known = seconds.get((shape, layer, other))
                    if (
                        known
                        and (shape, layer, name) not in seconds
                        and not self.profiled(self.shapes[shape], layer, name)
                    ):
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
        for field in provenance:
            self.surely(field, ops)
        self.note(f"bandwidth of {what}", bandwidth, "bytes/s", ops)

    # ------------------------------------------------------------------ optimizer and the rest

    def optimizer(self) -> None:
        ops = [op for op in self.of_kind(Kind.STEP) if op.num_parameters > 0]
        if not ops:
            return
        cores = self.hardware.cpu.cores
        part = [min(1.0, op.costs.adam_threads / cores) for op in ops]
        slope, fixed = nonnegative_fit(
            [[op.num_parameters / op.costs.undo_factor / share, 1.0] for op, share in zip(ops, part, strict=True)],
            [op.seconds.median for op in ops],
            [Prior([0.0, 1.0], self.hardware.cpu.adam_s_per_op, max(self.hardware.cpu.adam_s_per_op, 1e-6))],
            _spread(ops),
        )
        if slope > 0:
            cpu = self.hardware.cpu.replace(adam_parameters_per_s=1 / slope)
            self.update({"cpu.adam_parameters_per_s": "fitted"}, cpu=cpu)
            self.surely("cpu.adam_parameters_per_s", ops)
            self.note("optimizer, all cores", 1 / slope, "parameters/s", ops)
        self.set_overhead(Kind.STEP, float(fixed) + median(op.gap_s for op in ops), ops)

    def unseen_time(self, plans: Sequence[Plan], measured_s: Sequence[float], stretch: Sequence[float]) -> str | None:
        """What steps take beyond the time of their ops, as a share of all compute.

        On device ``cpu``, threads that wake late and cores that others use for a moment do not show in processor time;
        they show in how long compute ops last against the processor time they use. On ``cuda``, a host that issues late
        shows as idle time between ops for which nothing else is to blame. That (``stretch``, by run, 1 for nothing) is
        the most that may be laid to them; what the steps take beyond it is returned as a warning.
        """
        ratio = median(
            measured / simulate(plan, hardware=self.hardware).step_s
            for plan, measured in zip(plans, measured_s, strict=True)
        )
        most = max(median(stretch), 1.0)
        factor = min(max(ratio, 1.0), most)
        self.scale_layers(factor, self.fitted_layers)
        self.report.append(
            {
                "what": "time beyond processor time" if self.hardware.device == "cpu" else "time between ops",
                "value": factor - 1,
                "unit": "share",
                "spread": 0.0,
                "samples": len(plans),
            }
        )
        if ratio <= most * _UNEXPLAINED:
            return None
        return (
            f"steps take {ratio / most - 1:.0%} longer than their ops explain, be each {most:.2f} times as long: the "
            "ranks wait for something that no op shows; the fit leaves it out"
        )

    def scale_layers(self, factor: float, keys: Mapping[tuple[object, ...], str]) -> None:
        """Make measured layers slower, and the rows that report them."""
        entries = [_slower(entry, factor) if entry.key in keys else entry for entry in self.hardware.measured]
        self.hardware = self.hardware.replace(measured=tuple(entries))
        texts = set(keys.values())
        self.report = [{**row, "value": row["value"] * factor} if row["what"] in texts else row for row in self.report]

    def carry_over(self) -> None:
        """Layers that no run has: what the fit found for those of the runs, against what was known of them, holds for
        layers that were measured on their own, too, and (as an efficiency) for those that were never measured.
        """
        found: dict[PassName, float] = {}
        of_peak: list[float] = []
        for _, name in _PASSES:
            ratios = []
            for costs in self.shapes.values():
                if (_shape(costs), name) not in self.fitted_passes:
                    continue
                now_s = CostModel(**{**_parts(costs), "hardware": _at_once(self.hardware)}).block_s(name)
                before = CostModel(**{**_parts(costs), "hardware": _at_once(self.start)})
                if now_s > 0 and self.profiled(costs, "block", name):
                    ratios.append(now_s / before.block_s(name))
                unmeasured = CostModel(**{**_parts(costs), "hardware": _at_once(self.start).replace(measured=())})
                if now_s > 0 and (guess_s := unmeasured.block_s(name)) > 0:
                    of_peak.append(now_s / guess_s)
            if ratios:
                found[name] = median(ratios)
        entries = [
            entry.replace(
                seconds=entry.seconds * found[entry.pass_name], spread_s=entry.spread_s * found[entry.pass_name]
            )
            if entry.source == "profile" and entry.pass_name in found and entry.key not in self.fitted_layers
            else entry
            for entry in self.hardware.measured
        ]
        accelerator = self.hardware.accelerator
        efficiency = min(1.0, accelerator.max_efficiency / median(of_peak)) if of_peak else accelerator.max_efficiency
        self.update(
            {"accelerator.max_efficiency": "fitted"} if of_peak else {},
            measured=tuple(entries),
            accelerator=accelerator.replace(max_efficiency=efficiency),
        )

    def settle_contention(self, plans: Sequence[Plan]) -> None:
        """Device ``cuda``: ops that share links and memory last longer than alone, and the simulator adds that itself.

        So the rates are changed until simulated ops last as long as measured ones.
        """
        if self.hardware.device != "cuda":
            return
        for _ in range(_ROUNDS):
            pairs: list[tuple[Measurement, float]] = []
            for plan, mine in list(zip(plans, self.runs, strict=True))[:_SETTLING_RUNS]:
                again = measurements(plan, simulate(plan, hardware=self.hardware).trace, self.hardware, 1)
                lasts = {op.group: op.seconds.median for op in again}
                pairs += [(op, lasts[op.group]) for op in mine if op.group in lasts]
            steps = [lasts_s / op.seconds.median for op, lasts_s in pairs if op.num_parameters > 0]
            changed = 1.0
            if steps:
                changed = min(max(median(steps), 1 / _MOST_SETTLED), _MOST_SETTLED)
                rate = self.hardware.cpu.adam_parameters_per_s * changed
                self.hardware = self.hardware.replace(cpu=self.hardware.cpu.replace(adam_parameters_per_s=rate))
                self.note("optimizer, all cores", rate, "parameters/s", [op for op, _ in pairs if op.num_parameters])
            for kind in (Kind.FETCH, Kind.OFFLOAD_GRAD):
                late = [
                    (op, op.seconds.median - lasts_s) for op, lasts_s in pairs if op.kind is kind and op.num_bytes > 0
                ]
                if late:
                    old = self.hardware.measured_op_overhead_s.get(kind.name, 0.0)
                    self.set_overhead(kind, old + median(s for _, s in late), [op for op, _ in late])
            if abs(changed - 1) < _SETTLED:
                return

    def fixed_costs(self) -> None:
        """Ops that are mostly latency, beyond what their route takes."""
        for kind in _FIXED:
            ops = self.of_kind(kind)
            if ops:
                self.set_overhead(kind, self.excess(ops), ops)


def _spread(ops: Sequence[Measurement]) -> float:
    """Relative spread of repeated measurements."""
    return median(op.seconds.spread / op.seconds.median for op in ops) if ops else 0.0


def _of_layers_s(op: Measurement) -> float:
    """Seconds of a compute op but for what its replay takes."""
    return op.seconds.median - (op.costs.replay_s(op.kind) if op.is_replayed else 0.0)


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


def _slower(entry: MeasuredLayer, factor: float) -> MeasuredLayer:
    return entry.replace(seconds=entry.seconds * factor, spread_s=entry.spread_s * factor)


def _layer_text(entry: MeasuredLayer) -> str:
    shape = f"{entry.microbatch_size} x {entry.sequence} {entry.dtype}, hidden {entry.hidden_size}"
    return f"{entry.layer_kind} {entry.pass_name}, {shape}"


def _at_once(hardware: HardwareSpec) -> HardwareSpec:
    """With a host that issues everything at once."""
    return hardware.replace(accelerator=hardware.accelerator.replace(layer_issue_s={}, op_issue_s={}))


def _parts(costs: CostModel) -> dict[str, Any]:
    """What a cost model was made of."""
    return {field.name: getattr(costs, field.name) for field in fields(costs) if not field.name.startswith("_")}
