"""ZeRO-3 with parameters and optimizer in CPU memory (DeepSpeed): data parallel, weights gathered for each use.

All ranks do the same, so the program is that of one: per microbatch all layers upwards, then downwards. It is priced
with what its collectives cost among all ranks. Every rank fetches its part of a layer from its host's memory, the parts
are gathered in a ring; gradients are scattered in a ring and a rank's part goes to its host.
"""

import math
from dataclasses import dataclass
from typing import Any

from spipe.errors import SpipeError
from spipe.hardware import HardwareSpec
from spipe.layout import Layout, Stage
from spipe.lower import lower, require_size
from spipe.metrics import analyse
from spipe.model import ModelSpec
from spipe.ops import COMPUTE, Kind
from spipe.options import Options
from spipe.program import Program
from spipe.schedules import depth_first
from spipe.sim.cost import CostModel
from spipe.sim.engine import Timeline, play
from spipe.sim.pricing import Pricing
from spipe.sim.resources import FlowSpec

_RING_RATE = 0.5  # part of a link's bandwidth that collectives reach, with several channels at once
HOST_BYTES_PER_PARAMETER = 25
"""Weight, fp32 gradient, optimizer state and page-locked buffers: inferred from which published runs fitted."""


@dataclass(frozen=True)
class Zero3:
    """One step of one rank; all ranks do the same.

    Attributes:
        num_ranks: how many.
        collective_s: time of the step in which a rank's compute lane waits for collectives.
        host_bytes: what each host holds.
        tokens: of a step, all ranks together.
        notes: what the costs rest on, other than measurements.
    """

    program: Program
    timeline: Timeline
    hardware: HardwareSpec
    num_ranks: int
    collective_s: float
    host_bytes: float
    tokens: int
    notes: tuple[str, ...]

    @property
    def makespan_s(self) -> float:
        return max(self.timeline.end_s) - min(self.timeline.start_s)

    def to_json(self) -> dict[str, Any]:
        """As of a simulated plan: times, idle time by cause (of all ranks), memory. Collectives are ``transfer``."""
        alone = analyse(self.program, self.timeline.trace(), 0)
        bubbles = alone.total()
        bubbles["transfer"] += self.collective_s
        ranks = self.num_ranks
        return {
            "hardware": self.hardware.name,
            "predicted": {
                "step_s": self.makespan_s,
                "makespan_s": self.makespan_s,
                "gpu_time_s": alone.gpu_time_s,
                "tokens_per_s": self.tokens / self.makespan_s,
            },
            "bubbles": {cause: ranks * seconds for cause, seconds in bubbles.items()},
            "bubbles_by_rank": [bubbles] * ranks,
            "idle_s": ranks * (alone.idle_s + self.collective_s),
            "busy_s": [alone.busy_s[0] - self.collective_s] * ranks,
            "memory": {
                "ranks": [],
                "hosts": [{"weights, gradients and optimizer": self.host_bytes}] * self.hardware.num_hosts,
                "problems": list(self.problems),
            },
            "notes": list(self.notes),
        }

    @property
    def problems(self) -> tuple[str, ...]:
        """What does not fit."""
        usable = self.hardware.cpu.usable_memory_bytes
        if self.host_bytes <= usable:
            return ()
        return (f"a host needs {self.host_bytes / 1e9:.0f} GB of {usable / 1e9:.0f} GB usable",)


def zero3_program(model: ModelSpec, num_microbatches: int) -> Program:
    """The ops of one rank."""
    layers = model.num_total_layers
    stages = tuple(Stage(i, i + 1, 0) for i in range(layers))
    layout = Layout(layers, 1, stages, stages)
    require_size(layout, num_microbatches)
    options = Options(optimizer="sync", barrier=True, step_order="arrival", bucket_layers=0, recompute="late")
    return lower(layout, depth_first(layout, num_microbatches), num_microbatches, options, tied=model.tied_embeddings)


def zero3(
    model: ModelSpec, hardware: HardwareSpec, *, global_batch: int, microbatch_size: int, sequence: int, precision: str
) -> Zero3:
    """Simulate a step on all ranks of ``hardware``.

    Raises:
        SpipeError: if the global batch does not divide into microbatches on all ranks, or into far too many.
    """
    ranks = hardware.num_ranks
    if global_batch % (microbatch_size * ranks):
        raise SpipeError(
            f"ZeRO-3 is data parallel: a global batch of {global_batch} sequences does not divide into microbatches of "
            f"{microbatch_size} on {ranks} ranks; use a multiple of {microbatch_size * ranks}"
        )
    program = zero3_program(model, global_batch // (microbatch_size * ranks))
    costs = CostModel(
        model=model,
        hardware=hardware,
        precision=precision,
        sequence=sequence,
        microbatch_size=microbatch_size,
        ranks_per_host=hardware.ranks_per_host,
    )
    pricing = _Zero3Pricing(costs, program)
    timeline = play(program, pricing.costs(), 1)
    rings = (pricing.ring_s(stage) for kind, stage in zip(program.kind, program.stage, strict=True) if kind in COMPUTE)
    return Zero3(
        program,
        timeline,
        hardware,
        num_ranks=ranks,
        collective_s=math.fsum(rings),
        host_bytes=HOST_BYTES_PER_PARAMETER * model.num_parameters() / hardware.num_hosts,
        tokens=global_batch * sequence,
        notes=costs.notes,
    )


def ranks_only(hardware: HardwareSpec, num_ranks: int) -> HardwareSpec:
    """Hardware of just so many ranks: some of one host, or whole hosts. Raises SpipeError for anything else."""
    if num_ranks <= hardware.ranks_per_host:
        return hardware.resized(num_hosts=1, ranks_per_host=num_ranks)
    if num_ranks % hardware.ranks_per_host:
        raise SpipeError(
            f"ZeRO-3 is simulated on some ranks of one host or on whole hosts of {hardware.ranks_per_host}, not on "
            f"{num_ranks} ranks"
        )
    return hardware.resized(num_hosts=num_ranks // hardware.ranks_per_host)


class _Zero3Pricing(Pricing):
    def price(self, i: int) -> tuple[float, FlowSpec | None]:
        kind = Kind(self.program.kind[i])
        ranks = self.hardware.num_ranks
        if kind in COMPUTE:
            seconds, flow = super().price(i)
            return seconds + self.ring_s(self.program.stage[i]), flow
        if kind in (Kind.FETCH, Kind.OFFLOAD_GRAD):  # its part only, of which gradients leave once a microbatch
            times = self.program.num_microbatches if kind is Kind.OFFLOAD_GRAD else 1
            parts = [(route, times * size / ranks) for route, size in self.parts(i)]
            return self.transfer(parts, self.model.overhead_s(kind), [])
        seconds, flow = super().price(i)
        return (seconds / ranks, None) if kind is Kind.STEP else (seconds, flow)

    def ring_s(self, stage: int) -> float:
        """Gathering a layer's weights, or scattering its gradients, among all ranks: it holds up compute."""
        ranks = self.hardware.num_ranks
        if ranks == 1:
            return 0.0
        neighbours = [(0, 1)] if self.hardware.ranks_per_host > 1 else []
        if self.hardware.num_hosts > 1:
            neighbours.append((self.hardware.ranks_per_host - 1, self.hardware.ranks_per_host))
        routes = [self.hardware.route(("gpu", a), ("gpu", b)) for a, b in neighbours]
        widths = [self.bandwidth(route) * (_RING_RATE if self.by_kernel(route) else 1.0) for route in routes]
        num_bytes = self.model.num_parameters(self.program.layers(stage)) * self.model.element_bytes
        return (ranks - 1) / ranks * num_bytes / min(widths)
