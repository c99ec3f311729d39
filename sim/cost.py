"""Cost model: seconds, bytes and shared resources of every op of a plan on a hardware.

Compute is the sum over the layers of a stage: the measured time where the hardware spec has one for that (layer, pass,
shape, dtype), scaled by tokens if only another microbatch was measured, else a roofline; what is not measured is said
in ``notes``. Everything that moves bytes follows the hardware's routes.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from spipe.hardware import HardwareSpec, MeasuredLayer, Place, Route
from spipe.model import PASS_FACTOR, LayerKind, ModelSpec, PassName
from spipe.ops import COMPUTE, PARTNER, Kind
from spipe.plan import ELEMENT_BYTES, Plan
from spipe.program import Program
from spipe.sim.resources import FlowSpec

_PASS: dict[int, PassName] = {Kind.FORWARD: "forward", Kind.RECOMPUTE: "recompute", Kind.BACKWARD: "backward"}
_OPTIMIZER_STATE_BYTES = 24  # read and written per parameter and step: fp32 master weight and two moments
_TOKEN_BYTES = 8

Part = tuple[Route, float]
"""A route and the bytes that travel on it."""


@dataclass(frozen=True)
class OpCosts:
    """Costs of the ops of a program, as parallel lists over ops.

    Attributes:
        seconds: time of the op if nothing else runs. Both halves of a message have the message's.
        flows: what the op takes of the shared resources; None: nothing.
        issue_s: time between the starts of two compute ops of a rank that the host needs at least.
        capacities: of the shared resources: bytes per second of every edge, then of every host's memory; then cores.
    """

    seconds: list[float]
    flows: list[FlowSpec | None]
    issue_s: float
    capacities: list[float]


@dataclass(frozen=True)
class CostModel:
    """What ops cost. Build it with ``of`` from a plan, or from its parts before there is one.

    Attributes:
        compute_threads: device ``cpu``: cores of a rank's compute lane.
        optimizer_threads: cores of a rank's optimizer; 0: the host's cores shared out over ``ranks_per_host``.
        ranks_per_host: ranks in use on a host.
    """

    model: ModelSpec
    hardware: HardwareSpec
    precision: str
    sequence: int
    microbatch_size: int
    gradient_precision: str | None = None
    compute_threads: int = 1
    optimizer_threads: int = 0
    ranks_per_host: int = 1
    _notes: dict[str, None] = field(default_factory=dict, repr=False, compare=False)
    _uncalibrated: dict[str, None] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, plan: Plan, hardware: HardwareSpec | None = None) -> "CostModel":
        """The cost model of a plan, on its own hardware or another one."""
        hardware = hardware or plan.hardware
        return cls(
            model=plan.model,
            hardware=hardware,
            precision=plan.precision,
            sequence=plan.sequence,
            microbatch_size=plan.microbatch_size,
            gradient_precision=plan.gradient_dtype,
            compute_threads=plan.compute_threads,
            optimizer_threads=plan.optimizer_threads,
            ranks_per_host=min(plan.layout.num_ranks, hardware.ranks_per_host),
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """What the costs asked for so far rest on, other than measurements."""
        if not self._uncalibrated:
            return tuple(self._notes)
        what = "any layer" if len(self._uncalibrated) == 9 else ", ".join(self._uncalibrated)
        return (
            f"not calibrated for {what} ({self.precision}, {self.microbatch_size} x {self.sequence} tokens) on "
            f"{self.hardware.name}: estimated from peak rates",
            *self._notes,
        )

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch."""
        return self.microbatch_size * self.sequence

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.precision]

    @property
    def gradient_element_bytes(self) -> int:
        return ELEMENT_BYTES[self.gradient_precision or self.precision]

    # ------------------------------------------------------------------ layers and stages

    def layer_s(self, kind: LayerKind, pass_name: PassName) -> float:
        """Seconds of one pass of one layer for one microbatch, without the overhead of the op."""
        return self._layer_seconds[kind, pass_name]

    @cached_property
    def _layer_seconds(self) -> dict[tuple[LayerKind, PassName], float]:
        kinds: tuple[LayerKind, ...] = ("embedding", "block", "head")
        return {(kind, name): self._layer_s(kind, name) for kind in kinds for name in PASS_FACTOR}

    def _layer_s(self, kind: LayerKind, pass_name: PassName) -> float:
        hardware = self.hardware
        if hardware.unit_cost is not None:
            return hardware.unit_cost.layer_s(kind, pass_name)
        threads = hardware.accelerator.compute_threads / self.compute_threads if hardware.device == "cpu" else 1.0
        exact = hardware.find_measured(self.model, kind, pass_name, self.microbatch_size, self.sequence, self.precision)
        if exact is not None:
            if threads != 1.0:
                self._note(
                    f"{kind} {pass_name}: measured with {hardware.accelerator.compute_threads} threads, scaled to "
                    f"{self.compute_threads}"
                )
            return exact.seconds * threads
        near = self._nearest_measured(kind, pass_name)
        if near is not None:
            self._note(
                f"{kind} {pass_name}: measured for microbatches of {near.microbatch_size} x {near.sequence} tokens, "
                f"scaled to {self.microbatch_size} x {self.sequence}"
            )
            return near.seconds * self._roofline_s(kind, pass_name) / self._roofline_s(kind, pass_name, near) * threads
        self._uncalibrated[f"{kind} {pass_name}"] = None
        return self._roofline_s(kind, pass_name) * threads

    def _nearest_measured(self, kind: LayerKind, pass_name: PassName) -> MeasuredLayer | None:
        shape = MeasuredLayer.shape_of(self.model, kind)
        fits = [
            entry
            for entry in self.hardware.measured
            if (entry.layer_kind, entry.pass_name, entry.dtype) == (kind, pass_name, self.precision)
            and all(getattr(entry, name) == value for name, value in shape.items())
        ]
        return min(
            fits,
            key=lambda entry: abs(math.log(entry.microbatch_size * entry.sequence / self.tokens)),
            default=None,
        )

    def _roofline_s(self, kind: LayerKind, pass_name: PassName, shape: MeasuredLayer | None = None) -> float:
        """The larger of operations / reachable rate and bytes / memory bandwidth.

        Bytes: weights and activations once for a forward pass, twice (and gradients read and written) for a backward.
        """
        size, sequence = (shape.microbatch_size, shape.sequence) if shape else (self.microbatch_size, self.sequence)
        accelerator = self.hardware.accelerator
        flops = self.model.layer_flops(kind, pass_name, size, sequence, causal=True)
        rate = accelerator.peak(self.precision) * accelerator.efficiency(size * sequence)
        parameters = self.model.layer_num_parameters(kind)
        if kind == "embedding":
            boundary = self.model.boundary_bytes(size, sequence, self.element_bytes)
            num_bytes = (2 if pass_name != "backward" else 4) * boundary
        else:
            moved = parameters * self.element_bytes + self.model.layer_activation_bytes(
                kind, size, sequence, self.element_bytes
            )
            num_bytes = moved if pass_name != "backward" else 2 * (moved + parameters * self.gradient_element_bytes)
        return max(flops / rate, num_bytes / accelerator.memory_bandwidth_bytes_per_s)

    def stage_s(self, layers: range, pass_name: PassName) -> float:
        """Seconds of one pass of a stage for one microbatch, without the overhead of the op."""
        model = self.model
        return math.fsum(self.layer_s(model.layer_kind(layer), pass_name) for layer in layers)

    def layer_costs(self) -> list[float]:
        """Forward seconds of every layer, head and embedding included: what balances the cuts of a layout."""
        model = self.model
        return [self.layer_s(model.layer_kind(i), "forward") for i in range(model.num_total_layers)]

    # ------------------------------------------------------------------ bytes and parameters

    def num_parameters(self, layers: range) -> int:
        """Parameters that the layers read; a tied one counts wherever it is read."""
        return sum(self.model.layer_num_parameters(self.model.layer_kind(layer)) for layer in layers)

    def num_stepped_parameters(self, layers: range) -> int:
        """Parameters that are stepped with these layers: a tied one in the embedding's bucket only."""
        tied = self.model.tied_parameters()
        if tied and tied[1][0] in layers:
            return self.num_parameters(layers) - self.model.vocab_size * self.model.hidden_size
        return self.num_parameters(layers)

    def boundary_bytes(self) -> int:
        """Bytes of an activation, gradient or stage input of one microbatch."""
        return self.model.boundary_bytes(self.microbatch_size, self.sequence, self.element_bytes)

    # ------------------------------------------------------------------ optimizer

    @property
    def adam_threads(self) -> int:
        """Cores of a rank's optimizer."""
        return self.optimizer_threads or max(1, self.hardware.cpu.cores // self.ranks_per_host)

    @property
    def adam_bytes(self) -> int:
        """Bytes of host memory moved per parameter and step."""
        return _OPTIMIZER_STATE_BYTES + self.element_bytes + self.gradient_element_bytes

    @property
    def adam_rate(self) -> float:
        """Parameters per second of one rank's optimizer while nothing else runs."""
        cpu = self.hardware.cpu
        return cpu.adam_parameters_per_s * min(1.0, self.adam_threads / cpu.cores)

    # ------------------------------------------------------------------ ops

    def op_costs(self, program: Program) -> OpCosts:
        """Costs of all ops of a program."""
        return _Pricing(self, program).costs()

    def overhead_s(self, kind: int) -> float:
        """Fixed part of an op, beside layers and bytes."""
        hardware = self.hardware
        name = Kind(kind).name
        if name in hardware.measured_op_overhead_s:
            return hardware.measured_op_overhead_s[name]
        if kind in COMPUTE and hardware.device == "cpu":
            return hardware.accelerator.launch_overhead_s
        return hardware.cpu.adam_s_per_op if kind == Kind.STEP else 0.0

    def _note(self, text: str) -> None:
        self._notes[text] = None


class _Pricing:
    """Costs of one program; equal ops share one entry."""

    def __init__(self, model: CostModel, program: Program) -> None:
        self.model, self.program = model, program
        self.hardware = model.hardware
        self.on_cpu = self.hardware.device == "cpu"
        self.num_edges = len(self.hardware.edges())
        self.capacities = [edge.bandwidth_bytes_per_s for edge in self.hardware.edges()]
        self.capacities += [self.hardware.cpu.memory_bandwidth_bytes_per_s] * self.hardware.num_hosts
        self.capacities += [float(self.hardware.cpu.cores)] * self.hardware.num_hosts
        self.owner = [-1] * program.layout.num_layers
        for stage in program.layout.backward:
            for layer in stage.layers:
                self.owner[layer] = stage.rank

    def costs(self) -> OpCosts:
        program = self.program
        known: dict[tuple[int, int, int, int], tuple[float, FlowSpec | None]] = {}
        seconds: list[float] = []
        flows: list[FlowSpec | None] = []
        weight_ops = (int(Kind.FETCH), int(Kind.OFFLOAD_GRAD), int(Kind.STEP))
        for i, (kind, stage, index) in enumerate(zip(program.kind, program.stage, program.index, strict=True)):
            partner = program.partner[i]
            bucket = index if kind in weight_ops else 0
            key = (kind, stage, bucket, program.rank[partner] if partner >= 0 else -1)
            cost = known.get(key)
            if cost is None:
                cost = known[key] = self.price(i)
            seconds.append(cost[0])
            flows.append(cost[1])
        issue = 0.0 if self.on_cpu else self.hardware.accelerator.launch_overhead_s
        return OpCosts(seconds, without_ample_resources(flows, program.lane, self.capacities), issue, self.capacities)

    def price(self, i: int) -> tuple[float, FlowSpec | None]:
        program, model = self.program, self.model
        kind, rank = Kind(program.kind[i]), program.rank[i]
        overhead = model.overhead_s(kind)
        if kind in COMPUTE:
            seconds = model.stage_s(program.layers(program.stage[i]), _PASS[kind]) + overhead
            return seconds, self.on_cores(seconds, [(rank, model.compute_threads)]) if self.on_cpu else None
        if kind is Kind.STEP:
            return self.step(i, overhead)
        if kind is Kind.VALIDATE or kind is Kind.BARRIER:
            return self.collective_s(kind), None
        parts = self.parts(i)
        if not parts:
            return overhead, None
        return self.transfer(parts, overhead, self.threads(i))

    def threads(self, i: int) -> list[tuple[int, int]]:
        """(rank, cores) of a copy on device ``cpu``: a thread on each side that takes part."""
        partner = self.program.partner[i]
        ranks = [self.program.rank[i]] + ([self.program.rank[partner]] if partner >= 0 else [])
        return [(rank, 1) for rank in ranks] if self.on_cpu else []

    def parts(self, i: int) -> list[Part]:
        """The bytes an op moves, by route."""
        program, model, hardware = self.program, self.model, self.hardware
        kind, rank, partner = Kind(program.kind[i]), program.rank[i], program.partner[i]
        gpu: Place = ("gpu", rank)
        local: Place = ("memory", hardware.host_of(rank))
        if partner >= 0:
            source, target = (rank, program.rank[partner]) if kind in PARTNER else (program.rank[partner], rank)
            return [(hardware.route(("gpu", source), ("gpu", target)), model.boundary_bytes())]
        if kind is Kind.FETCH:
            by_host: dict[int, float] = {}
            for layer in program.buckets[program.stage[i]][program.index[i]]:
                host = hardware.host_of(self.owner[layer])
                size = model.num_parameters(range(layer, layer + 1)) * model.element_bytes
                by_host[host] = by_host.get(host, 0.0) + size
            return [(hardware.route(("memory", host), gpu), size) for host, size in by_host.items()]
        if kind is Kind.OFFLOAD_GRAD:
            layers = program.buckets[program.stage[i]][program.index[i]]
            return [(hardware.route(gpu, local), model.num_parameters(layers) * model.gradient_element_bytes)]
        if kind is Kind.LOAD_TOKENS:
            return [(hardware.route(local, gpu), _TOKEN_BYTES * model.tokens)]
        if kind is Kind.STORE_STAGE_INPUT:  # to the host that holds what belongs to the backward stage
            reader = program.layout.backward[program.stage[i] - len(program.layout.forward)].rank
            return [(hardware.route(gpu, ("memory", hardware.host_of(reader))), model.boundary_bytes())]
        if kind is Kind.LOAD_STAGE_INPUT:
            return [(hardware.route(local, gpu), model.boundary_bytes())]
        return []

    def transfer(
        self, parts: list[Part], overhead: float, threads: list[tuple[int, int]]
    ) -> tuple[float, FlowSpec | None]:
        """A copy over one route or, one after the other, over several.

        It holds its routes for its latency, too; a copy that is mostly latency is not worth sharing a link for.
        """
        num_bytes = math.fsum(size for _, size in parts)
        bandwidth_s = math.fsum(size / self.bandwidth(route) for route, size in parts)
        seconds = bandwidth_s + math.fsum(route.latency_s for route, _ in parts) + overhead
        if threads:
            return seconds, self.on_cores(seconds, threads, parts)
        if bandwidth_s < 0.5 * seconds or bandwidth_s == 0:
            return seconds, None
        return seconds, self.flow(seconds, num_bytes / seconds, self.uses(parts, seconds))

    def bandwidth(self, route: Route) -> float:
        """Bytes per second of a transfer that is alone; the memory of a host on the way may be what limits it."""
        limits = [self.capacities[self.num_edges + host] / accesses for host, accesses in route.memory_accesses]
        return min([route.bandwidth_bytes_per_s, *limits])

    def uses(self, parts: list[Part], seconds: float) -> dict[int, float]:
        """Resource -> bytes per second that the parts take of it on average over ``seconds``."""
        uses: dict[int, float] = {}
        for route, size in parts:
            for edge in route.edges:
                uses[edge] = uses.get(edge, 0.0) + size / seconds
            for host, accesses in route.memory_accesses:
                memory = self.num_edges + host
                uses[memory] = uses.get(memory, 0.0) + accesses * size / seconds
        return uses

    def on_cores(
        self, seconds: float, threads: list[tuple[int, int]], parts: list[Part] | None = None
    ) -> FlowSpec | None:
        """Device ``cpu``: an op that keeps cores busy; with too few of them everybody slows down by the same factor."""
        if seconds == 0:
            return None
        uses = self.uses(parts, seconds) if parts else {}
        for rank, count in threads:
            cores = self.num_edges + self.hardware.num_hosts + self.hardware.host_of(rank)
            uses[cores] = uses.get(cores, 0.0) + count
        return self.flow(seconds, 1.0, uses)

    def flow(self, seconds: float, share: float, uses: dict[int, float]) -> FlowSpec | None:
        limited = tuple((resource, amount) for resource, amount in uses.items() if self.capacities[resource] < math.inf)
        return FlowSpec(seconds, 1.0, share, limited) if limited else None

    def step(self, i: int, overhead: float) -> tuple[float, FlowSpec | None]:
        """Adam on a bucket: shares cores and, byte for byte, memory bandwidth with the copies of its host."""
        program, model = self.program, self.model
        parameters = model.num_stepped_parameters(program.buckets[program.stage[i]][program.index[i]])
        seconds = parameters / model.adam_rate + overhead
        if seconds == 0:
            return seconds, None
        host = self.hardware.host_of(program.rank[i])
        rate = parameters * model.adam_bytes / seconds
        uses = {self.num_edges + host: rate, self.num_edges + self.hardware.num_hosts + host: float(model.adam_threads)}
        return seconds, self.flow(seconds, 1.0 if self.on_cpu else rate, uses)

    def collective_s(self, kind: Kind) -> float:
        """A small collective: up and down a tree of the ranks, one message latency a level."""
        hardware, ranks = self.hardware, self.program.layout.num_ranks
        if ranks == 1:
            return self.model.overhead_s(kind)
        if kind.name in hardware.measured_op_overhead_s:
            return hardware.measured_op_overhead_s[kind.name]
        farthest = hardware.route(("gpu", 0), ("gpu", ranks - 1)).latency_s
        return 2 * math.ceil(math.log2(ranks)) * farthest


def without_ample_resources(
    flows: Sequence[FlowSpec | None], lanes: Sequence[int], capacities: Sequence[float]
) -> list[FlowSpec | None]:
    """The same flows without uses that can never limit them, which changes no rate and saves most of the arithmetic.

    A lane runs one flow at a time, so a resource is ample if the largest takers of all lanes fit into it together; and
    it never limits first if all its takers load another one at least as much.
    """
    specs = dict.fromkeys(zip(flows, lanes, strict=True))
    by_lane: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    loads: dict[int, dict[FlowSpec, float]] = defaultdict(dict)  # resource -> flow -> part of it taken at full rate
    for spec, lane in specs:
        if spec is not None:
            for resource, amount in spec.uses:
                loads[resource][spec] = load = amount * spec.cap / capacities[resource]
                by_lane[resource][lane] = max(by_lane[resource][lane], load)
    limiting = [resource for resource in sorted(loads) if sum(by_lane[resource].values()) > 1]
    for resource in list(limiting):
        takers = loads[resource]
        for other in limiting:
            if other != resource and all(loads[other].get(spec, -1.0) >= load for spec, load in takers.items()):
                limiting.remove(resource)
                break
    kept = set(limiting)
    lean: dict[FlowSpec | None, FlowSpec | None] = {None: None}
    for spec in dict.fromkeys(flows):
        if spec is not None:
            uses = tuple((resource, amount) for resource, amount in spec.uses if resource in kept)
            lean[spec] = FlowSpec(spec.work, spec.cap, spec.share, uses) if uses else None
    return [lean[spec] for spec in flows]
