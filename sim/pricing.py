"""Pricing: seconds and shared resources of every op of a program.

Everything that moves bytes follows the hardware's routes; on device ``cpu`` everything keeps cores busy.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from spipe.model import PassName
from spipe.ops import COMPUTE, PARTNER, RECVS, Kind
from spipe.program import Program
from spipe.sim.cost import CostModel
from spipe.sim.resources import FlowSpec
from spipe.topology import Place, Route

_PASS: dict[int, PassName] = {Kind.FORWARD: "forward", Kind.RECOMPUTE: "recompute", Kind.BACKWARD: "backward"}
_BOUNDARY = {*PARTNER, *RECVS, Kind.STORE_STAGE_INPUT, Kind.LOAD_STAGE_INPUT}
_HELD = (Kind.FETCH, Kind.OFFLOAD_GRAD)  # copies inside the accelerator where it holds the layer
_MESSAGES = {Kind.SEND_ACTIVATION, Kind.RECV_ACTIVATION, Kind.SEND_GRADIENT, Kind.RECV_GRADIENT}
_TOKEN_BYTES = 8
# A scheduler lets a thread that was asleep go first, so that a copy takes its core from compute instead of sharing it.
_BRIEF_SHARE = 100.0
# Part of a rank's cores that one STEP alone keeps busy, where several may run at a time: together they are 1.2 times as
# fast. One value for all hardware, chosen like the one below.
_STEP_CORES = 5 / 6
# Part of an accelerator's link that kernels reach which move a message over PCIe (copy engines reach all of it). One
# value for all hardware, chosen on the rows of both published clusters that constants are fitted to.
_KERNEL_RATE = 0.25

Part = tuple[Route, float]
"""A route and the bytes that travel on it."""


@dataclass(frozen=True)
class OpCosts:
    """Costs of the ops of a program, as parallel lists over ops.

    Attributes:
        seconds: time of the op if nothing else runs. Both halves of a message have the message's.
        flows: what the op takes of the shared resources; None: nothing.
        issue_s: time between the starts of two compute ops of a rank that the host needs at least.
        capacities: of the shared resources: bytes per second of every edge and of every NUMA domain's memory, then
            cores of every domain.
    """

    seconds: list[float]
    flows: list[FlowSpec | None]
    issue_s: float
    capacities: list[float]


def op_costs(model: CostModel, program: Program) -> OpCosts:
    """Costs of all ops of a program."""
    return Pricing(model, program).costs()


class Pricing:
    """Prices the ops of one program; equal ops share one entry."""

    def __init__(self, model: CostModel, program: Program) -> None:
        self.model, self.program = model, program
        self.hardware = model.hardware
        self.on_cpu = self.hardware.device == "cpu"
        self.edges = self.hardware.edges()
        self.num_edges = len(self.edges)
        self.split = Kind.WEIGHT_GRADIENT in program.kind
        direct = program.options.message_route == "p2p"
        by_host = self.hardware.model_copy(update={"peer_to_peer": False, "gpu_direct_rdma": False})
        self.message_topology = (self.hardware if direct else by_host).topology
        self.topology = self.hardware.topology
        per_host = self.topology.num_domains
        self.num_domains = self.hardware.num_hosts * per_host
        self.domain_cores = self.hardware.cpu.cores / per_host
        self.capacities = [edge.bandwidth_bytes_per_s for edge in self.edges]
        self.capacities += [self.hardware.cpu.memory_bandwidth_bytes_per_s / per_host] * self.num_domains
        self.capacities += [self.domain_cores] * self.num_domains
        self.owner = [-1] * program.layout.num_layers
        for stage in program.layout.backward:
            for layer in stage.layers:
                self.owner[layer] = stage.rank

    def costs(self) -> OpCosts:
        program = self.program
        known: dict[tuple[int, int, int, int], tuple[float, FlowSpec | None]] = {}
        seconds: list[float] = []
        flows: list[FlowSpec | None] = []
        weight_ops = (int(Kind.FETCH), int(Kind.OFFLOAD_GRAD), int(Kind.STEP), int(Kind.STORE_WEIGHTS))
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
            seconds = self.compute_s(kind, program.stage[i], overhead)
            seconds += 0.0 if self.on_cpu else self.message_s(kind, program.stage[i])
            return seconds, self.on_cores(seconds, [(rank, float(model.compute_threads))]) if self.on_cpu else None
        if kind is Kind.STEP:
            return self.step(i, overhead)
        if kind is Kind.VALIDATE or kind is Kind.BARRIER:
            return self.collective_s(kind), None
        if kind in _HELD and self.is_local(i):
            return self.local_copy_s(self.bucket(i)) + overhead, None
        parts = self.parts(i)
        if not parts:
            return overhead, None
        if program.partner[i] >= 0 and self.moved_by_its_op(i, parts[0][0]):
            return parts[0][0].latency_s + overhead, None
        return self.transfer(parts, overhead, self.threads(i))

    def compute_s(self, kind: Kind, stage: int, overhead: float) -> float:
        """Seconds of a compute op without messages; nothing where a stage finds what its forward saved."""
        model, layers = self.model, self.program.layers(stage)
        if kind is Kind.RECOMPUTE and self.keeps(stage):
            return 0.0
        if kind is Kind.WEIGHT_GRADIENT:
            return model.weight_gradient_s(layers) + overhead
        if model.records(layers):
            overhead += model.replay_s(kind)
        split = kind is Kind.BACKWARD and self.split
        return model.stage_s(layers, _PASS[kind]) - (model.weight_gradient_s(layers) if split else 0.0) + overhead

    def keeps(self, stage: int) -> bool:
        """Whether a backward stage finds what its forward saved."""
        first = len(self.program.layout.forward)
        return self.program.options.recompute == "never" and stage - first < first

    def message_s(self, kind: Kind, stage: int) -> float:
        """Compute time that messages take from an op of a stage: what is received for it and what is sent after it.

        A receiver has a kernel of its own where the message lies in host memory, or where it computes on only with what
        it receives (``stage_inputs`` ``sync``).
        """
        program, layout = self.program, self.program.layout
        first = len(layout.forward)
        came_from: list[int] = []
        goes_to: list[int] = []
        on_host = program.options.message_route == "host"
        if kind is Kind.FORWARD:
            here = layout.forward[stage].rank
            if not on_host:
                came_from += [s.rank for s in layout.forward[max(stage - 1, 0) : stage]]
                goes_to += [s.rank for s in layout.forward[stage + 1 : stage + 2]]
            if program.options.stage_input_route == "p2p":
                inputs = [(layout.stage_input(k).forward, s.rank) for k, s in enumerate(layout.backward) if s.first > 0]
                goes_to += [reader for source, reader in inputs if source == stage]
        else:
            k = stage - first
            here = layout.backward[k].rank
            if kind is Kind.BACKWARD and not on_host:
                came_from += [s.rank for s in layout.backward[k + 1 : k + 2]]
                goes_to += [s.rank for s in layout.backward[max(k - 1, 0) : k]]
            elif kind is Kind.RECOMPUTE and program.options.stage_input_route == "p2p" and layout.backward[k].first > 0:
                came_from.append(layout.stage_input(k).rank)
        receives = kind is Kind.RECOMPUTE and program.options.stage_inputs == "sync"
        routes = [self.hardware.route(("gpu", here), ("gpu", other)) for other in goes_to if other != here]
        incoming = [self.hardware.route(("gpu", other), ("gpu", here)) for other in came_from if other != here]
        routes += [route for route in incoming if receives or route.memory_accesses]
        num_bytes = self.model.boundary_bytes()
        return math.fsum(num_bytes / self.kernel_bandwidth(route) for route in routes if self.by_kernel(route))

    def by_kernel(self, route: Route) -> bool:
        """Whether messages on a route are moved over PCIe by kernels, which hold up the kernels that compute.

        The sender's kernel writes to the other accelerator, or to host memory, from where the receiver's kernel reads.
        Not so over NVLink, where it is too short to matter, and with GPUDirect RDMA, where the network card moves them.
        """
        if route.is_remote and self.hardware.gpu_direct_rdma:
            return False
        return not all("nvswitch" in self.edges[edge].name for edge in route.edges)

    def moved_by_its_op(self, i: int, route: Route) -> bool:
        """Whether a message inside a host takes no time of its own: kernels move it in the time of its compute ops.

        Between hosts the network still takes its time.
        """
        on_host = Kind(self.program.kind[i]) in _MESSAGES and self.program.options.message_route == "host"
        return not (on_host or self.on_cpu or route.is_remote) and self.by_kernel(route)

    def kernel_bandwidth(self, route: Route) -> float:
        """Bytes per second at which kernels move a message."""
        links = [edge.bandwidth_bytes_per_s for edge in map(self.edges.__getitem__, route.edges) if edge.of_accelerator]
        return min([self.bandwidth(route), *(_KERNEL_RATE * bandwidth for bandwidth in links)])

    def threads(self, i: int) -> list[tuple[int, float]]:
        """(rank, cores) of a copy on device ``cpu``; a message keeps first one side busy and then the other."""
        if not self.on_cpu:
            return []
        rank, partner = self.program.rank[i], self.program.partner[i]
        return [(rank, 1.0)] if partner < 0 else [(rank, 0.5), (self.program.rank[partner], 0.5)]

    def ends(self, i: int) -> tuple[Place, Place]:
        """Where the bytes of an op come from and go to; for other ops the rank's accelerator and memory."""
        program, hardware = self.program, self.hardware
        kind, rank, partner = Kind(program.kind[i]), program.rank[i], program.partner[i]
        gpu: Place = ("gpu", rank)
        memory: Place = ("memory", hardware.host_of(rank))
        if partner >= 0:
            other: Place = ("gpu", program.rank[partner])
            return (gpu, other) if kind in PARTNER else (other, gpu)
        if kind is Kind.STORE_STAGE_INPUT:  # to the host that holds what belongs to the backward stage
            reader = program.layout.backward[program.stage[i] - len(program.layout.forward)].rank
            return gpu, ("memory", hardware.host_of(reader))
        return (gpu, memory) if kind in (Kind.OFFLOAD_GRAD, Kind.STORE_WEIGHTS) else (memory, gpu)

    def parts(self, i: int) -> list[Part]:
        """The bytes an op moves, by route."""
        program, model = self.program, self.model
        kind = Kind(program.kind[i])
        source, target = self.ends(i)
        if kind in _HELD and self.is_local(i):
            return []
        if kind is Kind.FETCH:
            by_domain: dict[int, float] = {}
            for layer in self.bucket(i):
                size = model.num_parameters(range(layer, layer + 1)) * model.element_bytes
                for domain, part in self.domains(self.owner[layer], model.adam_threads):
                    by_domain[domain] = by_domain.get(domain, 0.0) + part * size
            return [(self.copy_route(("domain", domain), target), size) for domain, size in by_domain.items()]
        if kind is Kind.OFFLOAD_GRAD:
            num_bytes = model.num_trained_parameters(self.bucket(i)) * model.gradient_element_bytes
        elif kind is Kind.STORE_WEIGHTS:
            num_bytes = model.num_parameters(self.bucket(i)) * model.element_bytes
        elif kind is Kind.LOAD_TOKENS:
            num_bytes = _TOKEN_BYTES * model.tokens
        elif kind in (Kind.STORE_STAGE_INPUT, Kind.LOAD_STAGE_INPUT) and self.keeps(program.stage[i]):
            num_bytes = model.saved_bytes(program.layers(program.stage[i]))
        elif kind in _BOUNDARY:
            num_bytes = model.boundary_bytes()
        else:
            return []
        if kind in _MESSAGES:
            return [(self.message_topology.route(source, target), num_bytes)]
        return [(self.copy_route(source, target), num_bytes)]

    def copy_route(self, source: Place, target: Place) -> Route:
        """The way of a copy; from or to pageable memory a core copies every byte once more, in the rank's host."""
        route, cpu = self.hardware.route(source, target), self.hardware.cpu
        ends = [place for place in (source, target) if place[0] == "gpu"]
        if cpu.page_locked or cpu.pageable_bytes_per_s is None or len(ends) == 2:
            return route
        bounce = self.topology.domain_of(ends[0][1])
        accesses = dict(route.memory_accesses)
        accesses[bounce] = accesses.get(bounce, 0) + 2
        return replace(
            route,
            bandwidth_bytes_per_s=min(route.bandwidth_bytes_per_s, cpu.pageable_bytes_per_s),
            memory_accesses=tuple(sorted(accesses.items())),
        )

    def domains(self, rank: int, threads: float) -> list[tuple[int, float]]:
        """(NUMA domain, part) of so many threads of a rank: the domain nearest to its accelerator, and more if need be.

        What threads write first, such as weights and optimizer state, lies in the memory of their domain.
        """
        per_host, nearest = self.topology.num_domains, self.topology.domain_of(rank)
        count = min(per_host, math.ceil(threads / self.domain_cores))
        first = nearest - nearest % per_host
        return [(first + (nearest + k) % per_host, 1 / count) for k in range(count)]

    def bucket(self, i: int) -> range:
        """Layers of a weight op."""
        return self.program.buckets[self.program.stage[i]][self.program.index[i]]

    def transfer(
        self, parts: list[Part], overhead: float, threads: list[tuple[int, float]]
    ) -> tuple[float, FlowSpec | None]:
        """A copy over one route or, one after the other, over several.

        It holds its routes for its latency, too; a copy that is mostly latency is not worth sharing a link for.
        """
        num_bytes = math.fsum(size for _, size in parts)
        bandwidth_s = math.fsum(size / self.bandwidth(route) for route, size in parts)
        seconds = bandwidth_s + math.fsum(route.latency_s + route.staging_s(size) for route, size in parts) + overhead
        if threads:
            return seconds, self.on_cores(seconds, threads, parts, _BRIEF_SHARE)
        if bandwidth_s < 0.5 * seconds or bandwidth_s == 0:
            return seconds, None
        return seconds, self.flow(seconds, seconds / num_bytes, self.uses(parts, seconds))

    def is_local(self, i: int) -> bool:
        """Whether weight op ``i`` stays inside an accelerator, which holds the layer."""
        return not self.on_cpu and self.program.reads_held(i)

    def local_copy_s(self, layers: range) -> float:
        """Seconds to copy the weights of layers inside an accelerator: read once, written once."""
        num_bytes = 2 * self.model.num_parameters(layers) * self.model.element_bytes
        return num_bytes / self.hardware.accelerator.memory_bandwidth_bytes_per_s

    def bandwidth(self, route: Route) -> float:
        """Bytes per second of a transfer that is alone; the memory of a host on the way may be what limits it."""
        limits = [self.capacities[self.num_edges + domain] / accesses for domain, accesses in route.memory_accesses]
        return min([route.bandwidth_bytes_per_s, *limits])

    def uses(self, parts: list[Part], seconds: float) -> dict[int, float]:
        """Resource -> bytes per second that the parts take of it on average over ``seconds``."""
        uses: dict[int, float] = {}
        for route, size in parts:
            for edge in route.edges:
                uses[edge] = uses.get(edge, 0.0) + size / seconds
            for domain, accesses in route.memory_accesses:
                memory = self.num_edges + domain
                uses[memory] = uses.get(memory, 0.0) + accesses * size / seconds
        return uses

    def on_cores(
        self, seconds: float, threads: list[tuple[int, float]], parts: list[Part] | None = None, share: float = 1.0
    ) -> FlowSpec | None:
        """Device ``cpu``: an op that keeps cores busy. With too few of them, ops of one share slow down alike."""
        if seconds == 0:
            return None
        uses = self.uses(parts, seconds) if parts else {}
        for rank, count in threads:
            for domain, part in self.domains(rank, count):
                cores = self.num_edges + self.num_domains + domain
                uses[cores] = uses.get(cores, 0.0) + part * count
        return self.flow(seconds, share, uses)

    def flow(self, seconds: float, share: float, uses: dict[int, float]) -> FlowSpec | None:
        limited = tuple((resource, amount) for resource, amount in uses.items() if self.capacities[resource] < math.inf)
        return FlowSpec(seconds, 1.0, share, limited) if limited else None

    def step(self, i: int, overhead: float) -> tuple[float, FlowSpec | None]:
        """Adam on a bucket: shares cores and memory bandwidth with the copies of its NUMA domain.

        Copies share byte for byte. The optimizer's threads ask for more and get more: where memory is short, copies and
        optimizer become slower in proportion (on one H200 host: to 0.63 and 0.70 of their speeds alone).
        """
        program, model = self.program, self.model
        parameters = model.num_stepped_parameters(self.bucket(i))
        if self.is_local(i):
            bandwidth = self.hardware.accelerator.memory_bandwidth_bytes_per_s
            return parameters * model.adam_bytes / bandwidth + overhead, None
        seconds = parameters / model.adam_rate + overhead
        if seconds == 0:
            return seconds, None
        rate = parameters * model.adam_bytes / seconds
        cores = model.adam_share * self.hardware.cpu.cores  # as its rate: also of cores that do not divide
        cores *= _STEP_CORES if program.options.optimizer_workers > 1 else 1.0
        uses: dict[int, float] = {}
        for domain, part in self.domains(program.rank[i], model.adam_threads):
            uses[self.num_edges + domain] = part * rate
            uses[self.num_edges + self.num_domains + domain] = part * cores
        rank = program.rank[i]
        copies = self.bandwidth(self.copy_route(("memory", self.hardware.host_of(rank)), ("gpu", rank)))
        share = 1.0 if self.on_cpu else 1 / min(rate, copies)
        return seconds, self.flow(seconds, share, uses)

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
