"""ZeRO-3 with parameters and optimizer in CPU memory (DeepSpeed): data parallel, weights gathered for each use.

All ranks do the same, so the program is that of one: per microbatch all layers upwards, then downwards. It is priced
with what its collectives cost among all ranks. Every rank fetches its part of a layer from its host's memory, the parts
are gathered in a ring; gradients are scattered in a ring and a rank's part goes to its host.
"""

from dataclasses import dataclass

from spipe.hardware import HardwareSpec
from spipe.layout import Layout, Stage
from spipe.lower import lower
from spipe.model import ModelSpec
from spipe.ops import Kind
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
    """One step. ``host_bytes``: what each host holds."""

    program: Program
    timeline: Timeline
    host_bytes: float

    @property
    def makespan_s(self) -> float:
        return max(self.timeline.end_s) - min(self.timeline.start_s)


def zero3_program(model: ModelSpec, num_microbatches: int) -> Program:
    """The ops of one rank."""
    layers = model.num_total_layers
    stages = tuple(Stage(i, i + 1, 0) for i in range(layers))
    layout = Layout(layers, 1, stages, stages)
    options = Options(optimizer="sync", barrier=True, step_order="arrival", bucket_layers=0, recompute="late")
    return lower(layout, depth_first(layout, num_microbatches), num_microbatches, options, tied=model.tied_embeddings)


def zero3(
    model: ModelSpec, hardware: HardwareSpec, *, global_batch: int, microbatch_size: int, sequence: int, precision: str
) -> Zero3:
    """Simulate a step on all ranks of ``hardware``."""
    ranks = hardware.num_ranks
    program = zero3_program(model, max(1, global_batch // (microbatch_size * ranks)))
    costs = CostModel(
        model=model,
        hardware=hardware,
        precision=precision,
        sequence=sequence,
        microbatch_size=microbatch_size,
        ranks_per_host=hardware.ranks_per_host,
    )
    timeline = play(program, _Zero3Pricing(costs, program).costs(), 1)
    return Zero3(program, timeline, HOST_BYTES_PER_PARAMETER * model.num_parameters() / hardware.num_hosts)


class _Zero3Pricing(Pricing):
    def price(self, i: int) -> tuple[float, FlowSpec | None]:
        kind = Kind(self.program.kind[i])
        ranks = self.hardware.num_ranks
        if kind in (Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD):
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
