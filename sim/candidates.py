"""Search space: which plans a search looks at, and a lower bound on the step time of each that needs no program."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from spipe.errors import SpipeError
from spipe.hardware import HardwareSpec
from spipe.layout import Layout
from spipe.model import ModelSpec, PassName
from spipe.ops import Kind
from spipe.schedules import get_schedule
from spipe.sim.cost import CostModel

STAGES_PER_RANK = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
BACKWARD_PER_FORWARD = (1, 2, 3, 4)


@dataclass(frozen=True)
class Candidate:
    """A plan that could be made. ``bound_s``: no step of it can be faster."""

    schedule: str
    num_ranks: int
    forward_stages: int
    backward_stages: int
    microbatch_size: int
    num_microbatches: int
    layout: Layout = field(repr=False)
    bound_s: float
    options: dict[str, Any] = field(default_factory=dict)

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
            sorted(self.options.items()),
        )

    @property
    def shape(self) -> tuple[object, ...]:
        """Everything but the microbatch size: a larger microbatch never needs less memory."""
        options = tuple(sorted(self.options.items()))
        return self.schedule, self.num_ranks, self.forward_stages, self.backward_stages, options

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
            "bound_s": self.bound_s,
        }

    def with_options(self, **options: Any) -> "Candidate":
        return replace(self, options={**self.options, **options})


@dataclass(frozen=True)
class Space:
    """The choices to enumerate, each sorted; see ``spipe.sim.search.search``."""

    model: ModelSpec
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

    def candidates(self, refused: dict[str, int]) -> list[Candidate]:
        """All candidates, best bound first. What cannot be laid out is counted by reason in ``refused``."""
        found: dict[tuple[object, ...], Candidate] = {}
        for num_ranks in self.num_ranks:
            for size in self.microbatch_sizes:
                costs = self.cost_model(size, num_ranks)
                relative = _relative(costs.layer_costs())
                for schedule in self.schedules:
                    for forward, backward in self._stages(schedule, num_ranks):
                        try:
                            layout = _layout(schedule, num_ranks, relative, forward, backward, self.full_forward)
                        except SpipeError as error:
                            refused[str(error)] = refused.get(str(error), 0) + 1
                            continue
                        count = self.global_batch // size
                        same = (get_schedule(schedule).compute_order, layout, size)
                        if same not in found:
                            bound = lower_bound_s(costs, layout, count)
                            found[same] = Candidate(schedule, num_ranks, forward, backward, size, count, layout, bound)
        return sorted(found.values(), key=lambda candidate: candidate.key)

    def _stages(self, schedule: str, num_ranks: int) -> Iterator[tuple[int, int]]:
        """(F, B): stages per rank of forward and backward."""
        limit = max(1, self.model.num_total_layers // num_ranks)
        decoupled = get_schedule(schedule).decoupled
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


@lru_cache(maxsize=4096)
def _layout(
    schedule: str, num_ranks: int, costs: tuple[float, ...], forward: int, backward: int, full_forward: bool
) -> Layout:
    if num_ranks > len(costs):
        raise SpipeError(f"{num_ranks} ranks are more than the {len(costs)} layers of the model")
    return get_schedule(schedule).make_layout(num_ranks, costs, forward, backward, full_forward)


def lower_bound_s(costs: CostModel, layout: Layout, num_microbatches: int) -> float:
    """A step takes at least this long, whatever overlaps.

    The compute of two steps never overlaps. So a step lasts as long as a rank computes, and the time the forward stages
    below its first one take to send it the first microbatch, and the time the backward stages below its last one take
    for the last. Gradient copies, the optimizer and, on device ``cpu``, the cores of a host are bounds, too.
    """
    hardware = costs.hardware

    def seconds(layers: range, kind: Kind, name: PassName) -> float:
        return costs.stage_s(layers, name) + costs.overhead_s(kind)

    busy, num_ops, offloaded, stepped, lead, tail = ([0.0] * layout.num_ranks for _ in range(6))
    below = 0.0
    for stage in layout.forward:
        if not busy[stage.rank]:
            lead[stage.rank] = below
        forward = seconds(stage.layers, Kind.FORWARD, "forward")
        busy[stage.rank] += num_microbatches * forward
        num_ops[stage.rank] += num_microbatches
        below += forward
    below = 0.0
    for stage in layout.backward:
        if not offloaded[stage.rank]:
            tail[stage.rank] = below
        backward = seconds(stage.layers, Kind.BACKWARD, "backward")
        recompute = seconds(stage.layers, Kind.RECOMPUTE, "recompute")
        busy[stage.rank] += num_microbatches * (recompute + backward)
        num_ops[stage.rank] += 2 * num_microbatches
        below += backward
        offloaded[stage.rank] += costs.num_parameters(stage.layers) * costs.gradient_element_bytes
        stepped[stage.rank] += costs.num_stepped_parameters(stage.layers) / costs.adam_rate
    if hardware.device != "cpu":
        issue = hardware.accelerator.launch_overhead_s
        busy = [max(total, (count - 1) * issue) for total, count in zip(busy, num_ops, strict=True)]
    bounds = [sum(parts) for parts in zip(busy, lead, tail, strict=True)] + stepped
    hosts: dict[int, float] = {}
    for rank in range(layout.num_ranks):
        host = hardware.host_of(rank)
        bounds.append(offloaded[rank] / hardware.route(("gpu", rank), ("memory", host)).bandwidth_bytes_per_s)
        work = busy[rank] * costs.compute_threads + stepped[rank] * costs.adam_threads
        hosts[host] = hosts.get(host, 0.0) + work / hardware.cpu.cores
    return max(bounds + (list(hosts.values()) if hardware.device == "cpu" else []))
