"""Search space: which plans a search looks at."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from spipe.errors import SpipeError
from spipe.hardware import HardwareSpec
from spipe.layer_list import Model
from spipe.layout import Layout, decoupled_layout
from spipe.schedules import get_schedule
from spipe.sim.bounds import lower_bound_s
from spipe.sim.cost import CostModel
from spipe.sim.cuts import Cuts, Freedom

STAGES_PER_RANK = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256)
BACKWARD_PER_FORWARD = (1, 2, 3, 4)


@dataclass(frozen=True)
class Candidate:
    """A plan that could be made.

    Attributes:
        forward_stages, backward_stages: per rank, rounded up.
        bound_s: no step of it can be faster.
        cuts: how its layout is cut: ``balanced``, ``improved`` or ``all`` (one of all that there are).
    """

    schedule: str
    num_ranks: int
    forward_stages: int
    backward_stages: int
    microbatch_size: int
    num_microbatches: int
    layout: Layout = field(repr=False)
    bound_s: float
    options: dict[str, Any] = field(default_factory=dict)
    cuts: str = "balanced"

    def __hash__(self) -> int:
        return hash((self.schedule, self.microbatch_size, self.layout, tuple(sorted(map(str, self.options.items())))))

    @property
    def num_ops(self) -> int:
        """About as many ops as its program will have."""
        return self.num_microbatches * (3 * len(self.layout.forward) + 6 * len(self.layout.backward))

    @property
    def key(self) -> tuple[object, ...]:
        """Sort key: cheaper bound, then fewer ranks, then fewer and larger pieces."""
        return (
            self.bound_s,
            self.num_ranks,
            self.num_microbatches,
            self.forward_stages,
            self.backward_stages,
            self.schedule,
            sorted(map(str, self.options.items())),
            [(stage.stop, stage.rank) for stage in (*self.layout.forward, *self.layout.backward)],
        )

    @property
    def shape(self) -> tuple[object, ...]:
        """Everything but the microbatch size: a larger microbatch never needs less memory."""
        options = tuple(sorted(self.options.items()))
        return self.schedule, self.num_ranks, len(self.layout.forward), len(self.layout.backward), options

    @property
    def freedom(self) -> Freedom:
        """What ties its cuts together."""
        return Freedom(not get_schedule(self.schedule).decoupled, self.layout.forward_stop == self.layout.num_layers)

    def row(self) -> dict[str, Any]:
        """For tables."""
        return {
            "schedule": self.schedule,
            "num_ranks": self.num_ranks,
            "forward_stages": self.forward_stages,
            "backward_stages": self.backward_stages,
            "microbatch_size": self.microbatch_size,
            "num_microbatches": self.num_microbatches,
            "options": dict(self.options),
            "cuts": self.cuts,
            "bound_s": self.bound_s,
        }

    def with_options(self, **options: Any) -> "Candidate":
        return replace(self, options={**self.options, **options})

    def with_cuts(self, cuts: Cuts, name: str, costs: CostModel) -> "Candidate":
        """The same stages, cut elsewhere."""
        return replace(self, layout=cuts.applied_to(self.layout), cuts=name).bounded(costs)

    def bounded(self, costs: CostModel, fixed: Mapping[str, Any] = MappingProxyType({})) -> "Candidate":
        """With the bound of its layout and options, of which some may be ``fixed`` by the caller of a search."""
        bound = lower_bound_s(costs, self.layout, self.num_microbatches, {**self.options, **fixed})
        return replace(self, bound_s=bound)


@dataclass(frozen=True)
class Space:
    """The choices to enumerate, each sorted; see ``spipe.sim.search.search``."""

    model: Model
    hardware: HardwareSpec
    sequence: int
    global_batch: int
    schedules: Sequence[str]
    num_ranks: Sequence[int]
    forward_stages: Sequence[int] | None
    backward_stages: Sequence[int] | None
    microbatch_sizes: Sequence[int]
    full_forward: bool
    cost_model: Callable[[int, int], CostModel]
    """(microbatch size, ranks) -> costs."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Fixed for all."""

    def candidates(self, refused: dict[str, int]) -> list[Candidate]:
        """All candidates, best bound first. What cannot be laid out is counted by reason in ``refused``."""
        found: dict[tuple[object, ...], Candidate] = {}
        for num_ranks in self.num_ranks:
            for size in self.microbatch_sizes:
                for schedule in self.schedules:
                    for forward, backward in self._stages(schedule, num_ranks):
                        try:
                            candidate = self._candidate(schedule, num_ranks, size, forward, backward, self.full_forward)
                        except SpipeError as error:
                            refused[str(error)] = refused.get(str(error), 0) + 1
                            continue
                        same = (get_schedule(schedule).compute_order, candidate.layout, size)
                        found.setdefault(same, candidate)
        return sorted(found.values(), key=lambda candidate: candidate.key)

    def candidate(
        self, schedule: str, num_ranks: int, size: int, forward: int, backward: int, *, full_forward: bool
    ) -> Candidate | None:
        """One candidate, or None if it cannot be laid out."""
        try:
            return self._candidate(schedule, num_ranks, size, forward, backward, full_forward)
        except SpipeError:
            return None

    def _candidate(
        self, schedule: str, num_ranks: int, size: int, forward: int, backward: int, full_forward: bool
    ) -> Candidate:
        costs = self.cost_model(size, num_ranks)
        layout = _layout(schedule, num_ranks, _relative(costs.layer_costs()), forward, backward, full_forward)
        count = self.global_batch // size
        system = get_schedule(schedule)
        options = dict(system.published) if system.simulated_only else {}
        unbounded = Candidate(schedule, num_ranks, forward, backward, size, count, layout, 0.0, options)
        return unbounded.bounded(costs, self.options)

    def _stages(self, schedule: str, num_ranks: int) -> Iterator[tuple[int, int]]:
        """(F, B): stages per rank of forward and backward."""
        decoupled = get_schedule(schedule).decoupled
        limit = max(1, self.model.num_total_layers // num_ranks)
        if _any_number(schedule):
            limit = -(-self.model.num_total_layers // num_ranks)  # the last round of stages need not reach every rank
        chosen_forward, chosen_backward = self.forward_stages, self.backward_stages
        finest = self.model.num_layers // num_ranks
        usual = sorted({n for n in (*STAGES_PER_RANK, limit, finest) if 1 <= n <= limit})
        for forward in chosen_forward or usual:
            if not decoupled:
                if chosen_backward is None or forward in chosen_backward:
                    yield forward, forward
                continue
            multiples = {forward * factor for factor in BACKWARD_PER_FORWARD}
            for backward in chosen_backward or sorted({min(n, limit) for n in multiples if n < 2 * limit} | {limit}):
                if chosen_backward or backward >= forward:
                    yield forward, backward


def _relative(seconds: Sequence[float]) -> tuple[float, ...]:
    """Layer costs in units of a block's, coarse enough that candidates share their cuts."""
    block = seconds[1] or 1.0
    return tuple(round(cost / block, 2) for cost in seconds)


def _any_number(schedule: str) -> bool:
    """Whether the schedule takes any number of stages, not only multiples of the ranks."""
    return get_schedule(schedule).make_layout is get_schedule("spipe").make_layout


@lru_cache(maxsize=4096)
def _layout(
    schedule: str, num_ranks: int, costs: tuple[float, ...], forward: int, backward: int, full_forward: bool
) -> Layout:
    layers = len(costs)
    if num_ranks > layers:
        raise SpipeError(f"{num_ranks} ranks are more than the {layers} layers of the model")
    if _any_number(schedule) and layers < num_ranks * backward < layers + num_ranks:
        return decoupled_layout(num_ranks, costs, num_ranks * forward, layers, full_forward=full_forward)
    return get_schedule(schedule).make_layout(num_ranks, costs, forward, backward, full_forward)


def every_cut(candidate: Candidate, costs: CostModel) -> Iterator[Candidate]:
    """All ways to cut the stages of a candidate, lazily."""
    for cuts in candidate.freedom.every(Cuts.of(candidate.layout)):
        yield candidate.with_cuts(cuts, "all", costs)


def ranks_mapped(candidate: Candidate, hardware: HardwareSpec, costs: CostModel) -> Iterator[Candidate]:
    """The same stages with the ranks in other places on several hosts (schedules that allow any place).

    Cross mapping: ranks c and N-1-c, which run the two passes of the same layers where F = B, share a host. Spread:
    neighbours in the pipeline are on different hosts.
    """
    layout, num_ranks = candidate.layout, candidate.num_ranks
    used = -(-num_ranks // hardware.ranks_per_host)
    if used < 2 or num_ranks % used or not _any_number(candidate.schedule):
        return
    folded = [place for c in range((num_ranks + 1) // 2) for place in dict.fromkeys((c, num_ranks - 1 - c))]
    spread = [host + c * used for host in range(used) for c in range(num_ranks // used)]
    for order in (folded, spread):
        at = {rank: place for place, rank in enumerate(order)}  # pipeline rank -> physical rank
        mapped = replace(
            layout,
            forward=tuple(replace(stage, rank=at[stage.rank]) for stage in layout.forward),
            backward=tuple(replace(stage, rank=at[stage.rank]) for stage in layout.backward),
        )
        yield replace(candidate, layout=mapped).bounded(costs)
