"""Program: every op of one training step, its lane, its dependencies, and one global order.

Op numbers are positions in the global order: a topological sort of dependencies, compute order and slot order in which
a matching SEND and RECV stand together, and so do the ops of a collective. Each rank's issue order and each lane's
order is the restriction of the global order, and any grouping into in-order lanes that respects it cannot deadlock.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from spipe.layout import Layout
from spipe.ops import COLLECTIVES, Kind, Op
from spipe.options import Options

Discipline = Literal["in order", "deadline"]

RANK_LANES = ("compute", "h2d", "d2h", "h2d_in", "d2h_in", "cpu", "device_step", "settle", "control")
PEER_LANES = ("p2p", "p2p_in")


@dataclass(frozen=True, slots=True)
class Lane:
    """A queue of ops.

    Attributes:
        name: one of RANK_LANES, or of PEER_LANES: activations and gradients, stage inputs.
        rank: the owner; for a peer lane the lower rank of the pair.
        peer: the higher rank of the pair, -1 for a rank's own lane. Both ranks' ends of a peer lane are one lane.
        discipline: ``in order``, or ``deadline``: among the ops whose dependencies are met, the lowest ``priority``.
    """

    name: str
    rank: int
    peer: int = -1
    discipline: Discipline = "in order"

    def __str__(self) -> str:
        return f"{self.name} {self.rank}" if self.peer < 0 else f"{self.name} {self.rank}-{self.peer}"


@dataclass(frozen=True)
class Program:
    """One step as parallel lists over ops; see the module text for the order.

    Attributes:
        kind, stage, index, visit: the op. ``stage`` numbers forward stages, then backward stages, then ranks
            (see ``stage_name``).
        rank, lane: who runs it, and in which of ``lanes``.
        dependencies: op numbers (all smaller) that have to be done before the op starts.
        carried: op numbers of the *previous* step that have to be done before the op starts (see ``lag``).
        partner: the other half of a message, -1 for other ops.
        priority: sort key of ops in lanes with discipline ``deadline``: when the weights are needed again.
        slot: which weight slot (FETCH, FREE), gradient slab (BACKWARD, OFFLOAD_GRAD), receive slot (RECV of activations
            and gradients), token slot or stage-input slot the op uses; -1 where there is none.
        weights: number of the FETCH residency (``visit``) that a compute op reads, -1 for other ops.
    """

    layout: Layout
    num_microbatches: int
    options: Options
    tied: bool
    frozen: frozenset[int]
    """Layers with nothing to train: they are fetched, and have no gradient, STEP or COMMIT."""
    lanes: tuple[Lane, ...]
    kind: list[int]
    stage: list[int]
    index: list[int]
    visit: list[int]
    rank: list[int]
    lane: list[int]
    dependencies: list[tuple[int, ...]]
    carried: list[tuple[int, ...]]
    partner: list[int]
    priority: list[float]
    slot: list[int]
    weights: list[int]
    buckets: tuple[tuple[range, ...], ...]
    """Layers of each bucket, by stage number (forward stages, then backward stages)."""

    def __len__(self) -> int:
        return len(self.kind)

    def stage_name(self, stage: int) -> str:
        """``F3``, ``B5`` or ``R2`` for a stage number."""
        return self._stage_names[stage]

    @cached_property
    def _stage_names(self) -> list[str]:
        counts = (("F", len(self.layout.forward)), ("B", len(self.layout.backward)), ("R", self.layout.num_ranks))
        return [f"{letter}{k}" for letter, count in counts for k in range(count)]

    def layers(self, stage: int) -> range:
        """Layers of a stage number; empty for a rank-wide pseudo-stage."""
        stages = (*self.layout.forward, *self.layout.backward)
        return stages[stage].layers if stage < len(stages) else range(0)

    def is_held(self, layer: int) -> bool:
        """Whether the layer's weights and optimizer state lie on the accelerator of the rank that runs its backward."""
        return self.options.holds(layer, self.layout.num_layers, self.tied)

    def trains(self, stage: int, bucket: int) -> bool:
        """Whether a bucket of a stage has anything to train."""
        return not self.frozen.issuperset(self.buckets[stage][bucket])

    def reads_held(self, i: int) -> bool:
        """Whether weight op ``i`` is about a layer that its own rank's accelerator holds."""
        layers = self.buckets[self.stage[i]][self.index[i]]
        return self.is_held(layers.start) and self.owner(layers.start) == self.rank[i]

    def owner(self, layer: int) -> int:
        """The rank that runs the layer's backward: its gradients and optimizer state are there, or on its host."""
        return next(stage.rank for stage in self.layout.backward if layer in stage.layers)

    def lag(self, i: int, d: int) -> int:
        """How many steps before op ``i`` its carried dependency ``d`` lies: 1, or 2 for the COMMIT of stale weights."""
        stale = self.options.optimizer == "stale" and self.kind[i] == Kind.FETCH and self.kind[d] == Kind.COMMIT
        return 2 if stale else 1

    def op(self, i: int) -> Op:
        """Op ``i`` as an object."""
        return Op(Kind(self.kind[i]), self.stage_name(self.stage[i]), self.index[i], self.visit[i])

    @property
    def ops(self) -> tuple[Op, ...]:
        """All ops as objects, in global order."""
        return tuple(map(self.op, range(len(self))))

    def of_rank(self, rank: int) -> list[int]:
        """The rank's issue order."""
        return [i for i, owner in enumerate(self.rank) if owner == rank]

    def of_lane(self, lane: int) -> list[int]:
        """The lane's order; both halves of a message stand together."""
        return [i for i, owner in enumerate(self.lane) if owner == lane]

    def collectives(self) -> Iterator[tuple[int, ...]]:
        """The ops of each collective, one per rank."""
        for kind in sorted(COLLECTIVES):
            members = tuple(i for i, k in enumerate(self.kind) if k == kind)
            if members:
                yield members

    def text(self, rank: int | None = None) -> str:
        """The ops in order, one a line, with the rank in front: what golden tests compare."""
        rows = (i for i in range(len(self)) if rank is None or self.rank[i] == rank)
        return "\n".join(f"{self.rank[i]} {self.lanes[self.lane[i]].name}: {self.op(i)}" for i in rows)
