"""Topology: links between the nodes of all hosts, and the routes that data takes over them.

A host has ranks (one accelerator each) ``gpu0``, ``gpu1`` .., memory (``memory``, or ``memory0`` .. by NUMA domain),
and, as a file needs them, PCIe switches ``switch0`` .., root complexes ``root0`` .., NVLink switches ``nvswitch0`` ..
and network cards ``nic0`` ..; all hosts are alike and share one node ``network``.
"""

import math
import re
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from spipe.errors import SpipeError, unknown
from spipe.units import NonNegative, Spec, Unlimited

Text = Annotated[str, Field(min_length=1)]


class Link(Spec):
    """A connection of two nodes; ``gpu*`` stands for one link for each rank of a host."""

    a: Text
    b: Text
    bandwidth_bytes_per_s: Unlimited
    """In each direction."""
    latency_s: NonNegative = 0.0
    """Of one transfer, for this hop."""
    both_directions_bytes_per_s: Unlimited | None = None
    """What both directions reach together; left out: twice the bandwidth."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in (self.a, self.b):
            parse_node(name)
        both = self.both_directions_bytes_per_s
        if both is not None and not self.bandwidth_bytes_per_s <= both <= 2 * self.bandwidth_bytes_per_s:
            raise ValueError(
                f"both_directions_bytes_per_s = {both:.6g} should be between one and two times "
                f"bandwidth_bytes_per_s = {self.bandwidth_bytes_per_s:.6g}"
            )
        return self


Place = tuple[Literal["gpu", "memory", "domain"], int]
"""An end of a transfer: the accelerator of a rank, the memory of a host (its domain that is nearest to the other end),
or one NUMA domain, numbered host by host."""


class Node(NamedTuple):
    host: int
    kind: str
    number: int

    def __str__(self) -> str:
        return "network" if self.kind == "network" else f"host{self.host}/{self.kind}{self.number}"


NETWORK = Node(-1, "network", 0)
NODE_KINDS = ("gpu", "switch", "nvswitch", "root", "memory", "nic", "network")


def parse_node(name: str) -> tuple[str, int | None]:
    """``gpu3`` -> ("gpu", 3); ``memory`` -> ("memory", 0); ``gpu*`` -> ("gpu", None)."""
    match = re.fullmatch(r"([a-z]+)(\d*|\*)", name)
    kind, index = match.groups() if match else (name, "")
    if kind not in NODE_KINDS:
        raise ValueError(f"unknown node {name!r}; allowed: {', '.join(NODE_KINDS)}, with a number")
    if index == "*" and kind != "gpu":
        raise ValueError(f"node {name!r}: only gpu* stands for several nodes")
    if kind == "network" and index:
        raise ValueError(f"node {name!r}: there is one 'network', without a number")
    return kind, None if index == "*" else int(index or 0)


@dataclass(frozen=True)
class Edge:
    """A capacity that transfers share: one direction of a link, or both together where the link limits that."""

    index: int
    name: str
    bandwidth_bytes_per_s: float
    latency_s: float

    @property
    def of_accelerator(self) -> bool:
        """Whether an accelerator is at one of its ends."""
        return "/gpu" in self.name


@dataclass(frozen=True)
class Route:
    """The way of a transfer. Data staged in host memory moves in pieces: all edges are busy at the same time."""

    edges: tuple[int, ...]
    """Numbers of all edges in use, in travel order; both-directions capacities follow at the end."""
    bandwidth_bytes_per_s: float
    """Of a transfer that is alone."""
    latency_s: float
    memory_accesses: tuple[tuple[int, int], ...]
    """(NUMA domain, how often each byte is read from or written to its memory): staging counts 2."""
    is_remote: bool
    """Between two hosts."""
    hops_bytes_per_s: tuple[float, ...] = ()
    """Bandwidth of each part between stops in host memory; empty for a direct way."""
    piece_bytes: float = 0.0
    """Size of the pieces in which staged data moves."""

    def seconds(self, num_bytes: float) -> float:
        """Time of a transfer that is alone."""
        return self.latency_s + num_bytes / self.bandwidth_bytes_per_s + self.staging_s(num_bytes)

    def staging_s(self, num_bytes: float) -> float:
        """What staging adds: one piece passes every hop but the slowest before (or after) that one is busy.

        Data that fits into one piece is stored and forwarded: its hops do not overlap at all.
        """
        if not self.hops_bytes_per_s:
            return 0.0
        slowest = min(self.hops_bytes_per_s)
        piece = min(self.piece_bytes, num_bytes)
        return piece * (math.fsum(1 / width for width in self.hops_bytes_per_s) - 1 / slowest)


@dataclass(frozen=True)
class _Hop:
    source: Node
    target: Node
    edges: tuple[int, ...]
    bandwidth_bytes_per_s: float
    latency_s: float


class Topology:
    """All nodes and edges of the machine, and the routes between accelerators and memories."""

    def __init__(
        self,
        links: tuple[Link, ...],
        num_hosts: int,
        ranks_per_host: int,
        peer_to_peer: bool,
        gpu_direct_rdma: bool,
        piece_bytes: float = 0.0,
    ) -> None:
        self.num_hosts = num_hosts
        self.ranks_per_host = ranks_per_host
        self.peer_to_peer = peer_to_peer
        self.gpu_direct_rdma = gpu_direct_rdma
        self.piece_bytes = piece_bytes
        named = [parse_node(name) for link in links for name in (link.a, link.b)]
        self._domains = sorted({number or 0 for kind, number in named if kind == "memory"}) or [0]
        self.num_domains = len(self._domains)
        """NUMA domains of a host: as many as the links name memories; one pool where they name one."""
        self._hops: dict[Node, list[_Hop]] = {}
        self._routes: dict[tuple[Place, Place], Route] = {}
        edges: list[Edge] = []
        for host in range(num_hosts):
            for link in links:
                for a, b in self._ends(link, host):
                    self._connect(link, a, b, edges)
        self.edges = tuple(edges)

    def _ends(self, link: Link, host: int) -> Iterator[tuple[Node, Node]]:
        def nodes(name: str) -> list[Node]:
            kind, index = parse_node(name)
            if kind == "network":
                return [NETWORK]
            if kind == "gpu" and index is not None and index >= self.ranks_per_host:
                raise ValueError(f"links: node {name!r}: a host has {self.ranks_per_host} ranks (ranks_per_host)")
            return [Node(host, kind, i) for i in (range(self.ranks_per_host) if index is None else [index])]

        for a in nodes(link.a):
            for b in nodes(link.b):
                if not link.a == link.b == "gpu*" or a < b:
                    yield a, b

    def _connect(self, link: Link, a: Node, b: Node, edges: list[Edge]) -> None:
        if a == b:
            raise ValueError(f"links: {link.a!r} is linked to itself")
        shared: tuple[int, ...] = ()
        first = len(edges)
        for offset, (source, target) in enumerate(((a, b), (b, a))):
            name = f"{source} -> {target}"
            edges.append(Edge(first + offset, name, link.bandwidth_bytes_per_s, link.latency_s))
        if link.both_directions_bytes_per_s is not None:
            shared = (len(edges),)
            edges.append(Edge(len(edges), f"{a} <-> {b}", link.both_directions_bytes_per_s, 0.0))
        for offset, (source, target) in enumerate(((a, b), (b, a))):
            hop = _Hop(source, target, (first + offset, *shared), link.bandwidth_bytes_per_s, link.latency_s)
            self._hops.setdefault(source, []).append(hop)
            self._hops.setdefault(target, [])

    def domain_of(self, rank: int) -> int:
        """The NUMA domain nearest to a rank's accelerator: there its threads run and what they hold lies."""
        host = self._host(("gpu", rank))
        if self.num_domains == 1:
            return host
        (nearest, _), *_ = self.route(("memory", host), ("gpu", rank)).memory_accesses
        return nearest

    def route(self, source: Place, target: Place) -> Route:
        """The route between two places; `SpipeError` where there is none.

        Data between accelerators stays out of host memory with ``peer_to_peer`` (one host) or ``gpu_direct_rdma`` (two
        hosts), as far as the links allow it; otherwise it is staged in the memory of each host it touches.
        """
        found = self._routes.get((source, target))
        if found is None:
            found = self._routes[source, target] = self._find_route(source, target)
        return found

    def _find_route(self, source: Place, target: Place) -> Route:
        source_host, target_host = self._host(source), self._host(target)
        remote = source_host != target_host
        if self._nodes(source) & self._nodes(target):
            return Route((), math.inf, 0.0, (), False)
        direct = self.gpu_direct_rdma if remote else self.peer_to_peer or not source[0] == target[0] == "gpu"
        stops: list[set[Node]] = [self._nodes(source)]
        if not direct or (path := self._path(self._nodes(source), self._nodes(target))) is None:
            if source[0] == "gpu":
                stops.append(self._nodes(("memory", source_host)))
            if target[0] == "gpu" and (remote or source[0] == "gpu"):
                stops.append(self._nodes(("memory", target_host)))
            stops = [stop for i, stop in enumerate(stops) if i == 0 or stop != stops[i - 1]]
            path = None
        if path is None:
            if stops[-1] != self._nodes(target):
                stops.append(self._nodes(target))
            path = []
            for goal in stops[1:]:
                start = {path[-1].target} if path else stops[0]
                part = self._path(start, goal)
                if part is None:
                    raise SpipeError(f"links: no way from {_place_text(source)} to {_place_text(target)}")
                path += part
        return self._route(path, source, target, remote)

    def _route(self, path: list[_Hop], source: Place, target: Place, remote: bool) -> Route:
        accesses: dict[int, int] = {}
        if source[0] != "gpu":
            accesses[self._domain(path[0].source)] = 1
        for i, hop in enumerate(path):
            if hop.target.kind == "memory":
                domain = self._domain(hop.target)
                accesses[domain] = accesses.get(domain, 0) + (2 if i < len(path) - 1 else 1)
        edges = tuple(hop.edges[0] for hop in path)
        # Staged data may cross one link in both directions: its joint capacity then serves every byte twice.
        shared = Counter(edge for hop in path for edge in hop.edges[1:])
        widths = [hop.bandwidth_bytes_per_s for hop in path]
        widths += [self.edges[edge].bandwidth_bytes_per_s / times for edge, times in shared.items()]
        stops = [i + 1 for i, hop in enumerate(path[:-1]) if hop.target.kind == "memory"]
        bounds = [0, *stops, len(path)]
        parts = [min(hop.bandwidth_bytes_per_s for hop in path[a:b]) for a, b in pairwise(bounds)] if stops else []
        return Route(
            edges=edges + tuple(shared),
            bandwidth_bytes_per_s=min(widths),
            latency_s=math.fsum(hop.latency_s for hop in path),
            memory_accesses=tuple(sorted(accesses.items())),
            is_remote=remote,
            hops_bytes_per_s=tuple(parts),
            piece_bytes=self.piece_bytes,
        )

    def _host(self, place: Place) -> int:
        kind, index = place
        per_host = {"gpu": self.ranks_per_host, "memory": 1, "domain": self.num_domains}.get(kind)
        if per_host is None:
            raise unknown("kind of place", str(kind), ("gpu", "memory", "domain"))
        if not 0 <= index < self.num_hosts * per_host:
            raise SpipeError(f"{_place_text(place)}: should be 0 to {self.num_hosts * per_host - 1}")
        return index // per_host

    def _domain(self, memory: Node) -> int:
        return memory.host * self.num_domains + self._domains.index(memory.number)

    def _nodes(self, place: Place) -> set[Node]:
        kind, index = place
        if kind == "gpu":
            return {Node(index // self.ranks_per_host, "gpu", index % self.ranks_per_host)}
        if kind == "domain":
            return {Node(index // self.num_domains, "memory", self._domains[index % self.num_domains])}
        return {node for node in self._hops if node.kind == "memory" and node.host == index}

    def _path(self, sources: set[Node], targets: set[Node]) -> list[_Hop] | None:
        """The widest path, and among those one with the fewest hops; accelerators and memories only at its ends.

        Inside a host it stays there if it can, however wide the network is.
        """
        if len({node.host for node in sources | targets}) == 1:
            inside = self._widest_path(sources, targets, avoid=NETWORK)
            if inside is not None:
                return inside
        return self._widest_path(sources, targets)

    def _widest_path(self, sources: set[Node], targets: set[Node], avoid: Node | None = None) -> list[_Hop] | None:
        widths = sorted({hop.bandwidth_bytes_per_s for hops in self._hops.values() for hop in hops}, reverse=True)
        for width in widths:
            reached: dict[Node, tuple[Node, _Hop] | None] = dict.fromkeys(sorted(sources))
            queue = deque(reached)
            while queue:
                node = queue.popleft()
                if node in targets:
                    return _walk_back(reached, node)
                if node.kind in ("gpu", "memory") and node not in sources:
                    continue
                for hop in self._hops.get(node, []):
                    if hop.bandwidth_bytes_per_s >= width and hop.target not in reached and hop.target != avoid:
                        reached[hop.target] = (node, hop)
                        queue.append(hop.target)
        return None


def _walk_back(reached: Mapping[Node, tuple[Node, _Hop] | None], node: Node) -> list[_Hop]:
    path: list[_Hop] = []
    while (step := reached[node]) is not None:
        node = step[0]
        path.append(step[1])
    return path[::-1]


def _place_text(place: Place) -> str:
    return f"{ {'gpu': 'rank', 'memory': 'memory of host'}.get(place[0], 'NUMA domain') } {place[1]}"


@lru_cache(maxsize=64)
def topology(links: tuple[Link, ...], *options: Any) -> Topology:
    return Topology(links, *options)
