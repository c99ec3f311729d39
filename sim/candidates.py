"""Candidates: plans that could be made, and others like them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from spipe.hardware import HardwareSpec
from spipe.layout import Layout
from spipe.schedules import get_schedule
from spipe.sim.bounds import lower_bound_s
from spipe.sim.cost import CostModel
from spipe.sim.cuts import Cuts, Freedom


@dataclass(frozen=True)
class Candidate:
    """A plan that could be made.

    Attributes:
        forward_stages, backward_stages: per rank, rounded up.
        bound_s: no step of it can be faster.
        cuts: how its layout is cut: ``balanced``, ``wide`` (a stage per layer, but the top one), ``improved``, ``all``
            (one of all that there are), or as a built-in system does, ``preset``.
        compute_threads: device ``cpu``: cores of a rank's compute lane.
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
    compute_threads: int = 1

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
            self.compute_threads,
            [(stage.stop, stage.rank) for stage in (*self.layout.forward, *self.layout.backward)],
        )

    @property
    def shape(self) -> tuple[object, ...]:
        """Everything but the microbatch size: a larger microbatch never needs less memory."""
        options = tuple(sorted(self.options.items()))
        stages = len(self.layout.forward), len(self.layout.backward)
        return self.schedule, self.num_ranks, *stages, options, self.compute_threads

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
            "compute_threads": self.compute_threads,
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


def every_cut(candidate: Candidate, costs: CostModel) -> Iterator[Candidate]:
    """All ways to cut the stages of a candidate, lazily."""
    for cuts in candidate.freedom.every(Cuts.of(candidate.layout)):
        yield candidate.with_cuts(cuts, "all", costs)


def ranks_mapped(candidate: Candidate, hardware: HardwareSpec, costs: CostModel) -> Iterator[Candidate]:
    """The same stages with the ranks in other places on several hosts (schedules that allow any place).

    Cross mapping: ranks c and N-1-c, which run the two passes of the same layers where F = B, share a host. Spread:
    neighbours in the pipeline are on different hosts.
    """
    num_ranks = candidate.num_ranks
    used = -(-num_ranks // hardware.ranks_per_host)
    if used < 2 or num_ranks % used or not any_number_of_stages(candidate.schedule):
        return
    folded = [place for c in range((num_ranks + 1) // 2) for place in dict.fromkeys((c, num_ranks - 1 - c))]
    spread = [host + c * used for host in range(used) for c in range(num_ranks // used)]
    for order in (folded, spread):  # the rank in the pipeline of every place
        mapped = candidate.layout.mapped(sorted(range(num_ranks), key=order.__getitem__))
        yield replace(candidate, layout=mapped).bounded(costs)


def any_number_of_stages(schedule: str) -> bool:
    """Whether a schedule takes any number of stages on any ranks, not only multiples of the ranks in turn."""
    return get_schedule(schedule).make_layout is get_schedule("spipe").make_layout
