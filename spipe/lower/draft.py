"""Draft: the ops of a step while they are collected, in order of creation."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence

from spipe.layout import Layout
from spipe.ops import Kind
from spipe.options import Options


class Draft:
    """Columns of ops (see ``Program`` for their meaning; what few ops have is in dicts), and what they stand for.

    Attributes:
        partner: the RECV of a SEND.
        collectives: the ops of each collective.
        compute: each rank's compute lane.
        forward, recompute, backward, last_backward: the op of a stage and microbatch, by stage of its pass; the last
            one is what completes the gradients of the weights.
        buckets: layers of each bucket, by stage number.
    """

    def __init__(
        self, layout: Layout, num_microbatches: int, options: Options, tied: bool, frozen: frozenset[int]
    ) -> None:
        self.layout, self.microbatches, self.options, self.tied = layout, num_microbatches, options, tied
        self.frozen = frozen
        self.num_forward, self.num_backward = len(layout.forward), len(layout.backward)
        self.stages = (*layout.forward, *layout.backward)
        self.buckets = tuple(_buckets(stage.layers, options.bucket_layers) for stage in self.stages)
        self.kind: list[int] = []
        self.stage: list[int] = []
        self.index: list[int] = []
        self.rank: list[int] = []
        self.lane: list[int] = []
        self.deps: list[list[int]] = []
        self.carried: defaultdict[int, list[int]] = defaultdict(list)
        self.visit: dict[int, int] = {}
        self.slot: dict[int, int] = {}
        self.weights: dict[int, int] = {}
        self.partner: dict[int, int] = {}
        self.collectives: list[range] = []
        self.compute: list[list[int]] = [[] for _ in range(layout.num_ranks)]
        self.forward, self.recompute, self.backward, self.last_backward = (
            [[-1] * num_microbatches for _ in range(count)]
            for count in (self.num_forward, self.num_backward, self.num_backward, self.num_backward)
        )
        self.lanes: dict[tuple[str, int, int], int] = {}

    def lane_number(self, name: str, rank: int, peer: int = -1) -> int:
        """The number of a lane, in order of first use; both ends of a peer lane are one."""
        key = (name, rank, peer) if peer < 0 else (name, min(rank, peer), max(rank, peer))
        return self.lanes.setdefault(key, len(self.lanes))

    def add(self, kind: Kind, stage: int, index: int, rank: int, lane: int, deps: list[int]) -> int:
        """One op; returns its number."""
        self.kind.append(int(kind))
        self.stage.append(stage)
        self.index.append(index)
        self.rank.append(rank)
        self.lane.append(lane)
        self.deps.append(deps)
        return len(self.kind) - 1

    def add_all(self, kind: Kind, stage: int, rank: int, lane: str, deps: Sequence[list[int]], peer: int = -1) -> range:
        """An op of index 0, 1, ... for each list of dependencies; returns their numbers."""
        first, count = len(self.kind), len(deps)
        self.kind += [int(kind)] * count
        self.stage += [stage] * count
        self.index += range(count)
        self.rank += [rank] * count
        self.lane += [self.lane_number(lane, rank, peer)] * count
        self.deps += deps
        return range(first, first + count)

    def send_all(
        self, kind: Kind, stage: int, source: int, target: int, lane: str, produced: Sequence[int]
    ) -> tuple[range, range]:
        """A message for each op that produces one: the numbers of their SENDs and of their RECVs."""
        sends = self.add_all(kind, stage, source, lane, [[op] for op in produced], target)
        receives = self.add_all(Kind(kind + 1), stage, target, lane, [[] for _ in produced], source)
        self.partner.update(zip(sends, receives, strict=True))
        return sends, receives

    def wait(self, pairs: Iterable[tuple[int, int]]) -> None:
        """The first op of each pair waits for the second."""
        for op, needed in pairs:
            self.deps[op].append(needed)

    def ring(
        self, takers: Sequence[int], releasers: Sequence[int], num_slots: int, numbered: bool = True
    ) -> Iterable[tuple[int, int]]:
        """The j-th taker uses slot j mod num_slots, once the releaser of its previous user is done: who waits for whom.

        What the first users wait for lies in the step before and is noted here.
        """
        count = len(takers)
        if numbered:
            self.slot.update((taker, j % num_slots) for j, taker in enumerate(takers))
        for j, taker in enumerate(takers[:num_slots]):
            self.carried[taker].append(releasers[j + (count - 1 - j) // num_slots * num_slots])
        return zip(takers[num_slots:], releasers, strict=False)

    def trains(self, layers: range) -> bool:
        """Whether any of the layers has something to train."""
        return not self.frozen.issuperset(layers)

    def keeps(self, k: int) -> bool:
        """Whether backward stage ``k`` finds what its forward saved and recomputes nothing."""
        return self.options.recompute == "never" and k < self.num_forward


def most_at_a_time(begins: Iterable[float], ends: Iterable[float]) -> int:
    """How many intervals overlap at most; at equal times one begins before another ends."""
    ended = sorted(ends)
    return max(j + 1 - bisect_left(ended, begin) for j, begin in enumerate(sorted(begins)))


def _buckets(layers: range, bucket_layers: int) -> tuple[range, ...]:
    size = bucket_layers or len(layers)
    return tuple(range(first, min(first + size, layers.stop)) for first in range(layers.start, layers.stop, size))
