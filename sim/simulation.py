"""Simulate a plan: step time, throughput, utilisation, attributed bubbles, memory."""

import math
from array import array
from dataclasses import dataclass
from functools import cached_property

from spipe.errors import SpipeError
from spipe.hardware import HardwareSpec
from spipe.memory import MemoryReport, memory
from spipe.metrics import StepMetrics, analyse
from spipe.ops import Kind
from spipe.plan import Plan
from spipe.program import Program
from spipe.sim.cost import CostModel
from spipe.sim.engine import Timeline, play
from spipe.sim.pricing import OpCosts, op_costs
from spipe.trace import Trace

SETTLING_STEPS = 10  # with stale weights: STEPs fall behind little by little before anything waits for them


@dataclass(frozen=True)
class Simulation:
    """The simulated steps of a plan, and what follows from them (computed when asked for). Times in seconds.

    Attributes:
        plan: what was simulated.
        hardware: what it was simulated on.
        timeline: times of all ops of all steps.
        costs: seconds of the ops and the resources they share.
        contention: whether ops shared links, memory bandwidth and cores.
        notes: what the costs rest on, other than measurements.
        limits: bytes that the plan may use of an accelerator and of a host, if less than there is.
    """

    plan: Plan
    hardware: HardwareSpec
    program: Program
    timeline: Timeline
    costs: OpCosts
    contention: bool
    notes: tuple[str, ...]
    limits: tuple[float, float] = (math.inf, math.inf)

    @cached_property
    def step_s(self) -> float:
        """A step in steady state: distance of its VALIDATE from that of the step before.

        With stale weights every other step waits for the same STEPs, so that steps may take turns in being long and
        short: the mean of two.
        """
        ends, last = self._ends(self.timeline, Kind.VALIDATE), self.last_step
        if self.program.options.optimizer == "stale" and last > 1:
            return (ends[last] - ends[last - 2]) / 2
        return ends[last] - ends[last - 1] if last else self.makespan_s

    @property
    def last_step(self) -> int:
        """The step that counts: the last one, or with stale weights the one before, which the last one overlaps."""
        return self.timeline.num_steps - (2 if self.program.options.optimizer == "stale" else 1)

    @cached_property
    def makespan_s(self) -> float:
        """A step that stands alone: first op to last."""
        return max(self._isolated.end_s) - min(self._isolated.start_s)

    @cached_property
    def gpu_time_s(self) -> float:
        """A step that stands alone: first FETCH to last OFFLOAD_GRAD."""
        kinds, alone = self.program.kind, self._isolated
        fetches = [alone.start_s[i] for i, kind in enumerate(kinds) if kind == Kind.FETCH]
        return max(self._ends(alone, Kind.OFFLOAD_GRAD)) - min(fetches)

    @cached_property
    def tokens_per_s(self) -> float:
        return self.plan.tokens_per_step / self.step_s

    @cached_property
    def model_flops_utilisation(self) -> float:
        """Forward and backward operations (causal count, no recompute) over the peak of the ranks in use."""
        flops = self.plan.model.model_flops_per_token(self.plan.sequence, causal=True) * self.plan.tokens_per_step
        return flops / (self.step_s * self._peak)

    @cached_property
    def hardware_flops_utilisation(self) -> float:
        """All operations that the ranks do, any recompute and dead forward work included, over their peak."""
        plan, model = self.plan, self.plan.model
        layer = [
            model.layer_forward_flops(model.layer_kind(i), plan.microbatch_size, plan.sequence, causal=True)
            for i in range(model.num_total_layers)
        ]
        layout = self.program.layout
        kept = len(layout.forward) if plan.options.recompute == "never" else 0
        forward = sum(layer[i] for stage in layout.forward for i in stage.layers)
        unseen = CostModel.of(plan, self.hardware).unseen
        again = sum(
            sum(layer[i] for i in stage.layers) - unseen(stage.layers) * layer[stage.stop - 1]
            for stage in layout.backward[kept:]
        )
        return (forward + again + 2 * sum(layer)) * plan.num_microbatches / (self.step_s * self._peak)

    @property
    def _peak(self) -> float:
        return self.hardware.accelerator.peak(self.plan.precision) * len(self.program.layout.ranks_used)

    @cached_property
    def trace(self) -> Trace:
        """All ops of all steps, timed; on device ``cpu`` with the processor time they use."""
        trace = self.timeline.trace(plan=self.plan.digest(), hardware=self.hardware.name)
        if self.hardware.device == "cpu":
            kinds, partners = self.program.kind, self.program.partner
            threads = CostModel.of(self.plan, self.hardware).adam_threads
            used = [
                seconds * (threads if kind == Kind.STEP else 0.5 if partner >= 0 else 1.0)
                for kind, partner, seconds in zip(kinds, partners, self.costs.seconds, strict=True)
            ]
            trace.cpu_s = array("d", used * self.timeline.num_steps)
        return trace

    @cached_property
    def bubbles(self) -> StepMetrics:
        """Busy time and attributed idleness of the step that counts."""
        return analyse(self.program, self.trace, self.last_step)

    @cached_property
    def memory(self) -> MemoryReport:
        """Bytes per rank and host, on the hardware that was simulated."""
        plan = self.plan if self.hardware is self.plan.hardware else self.plan.replace(hardware=self.hardware)
        return memory(plan).limited(*self.limits)

    def predicted(self) -> dict[str, float]:
        """The metrics that a plan file keeps."""
        return {
            "step_s": self.step_s,
            "makespan_s": self.makespan_s,
            "gpu_time_s": self.gpu_time_s,
            "tokens_per_s": self.tokens_per_s,
            "model_flops_utilisation": self.model_flops_utilisation,
            "hardware_flops_utilisation": self.hardware_flops_utilisation,
        }

    @cached_property
    def _isolated(self) -> Timeline:
        if self.timeline.num_steps == 1:
            return self.timeline
        return play(self.program, self.costs, 1, contention=self.contention)

    def _ends(self, timeline: Timeline, wanted: Kind) -> list[float]:
        """Per step, the time the last op of a kind ends."""
        count = len(self.program)
        ops = [i for i, kind in enumerate(self.program.kind) if kind == wanted]
        return [max(timeline.end_s[step * count + i] for i in ops) for step in range(timeline.num_steps)]


def simulate(
    plan: Plan, *, hardware: HardwareSpec | None = None, num_steps: int = 3, contention: bool = True
) -> Simulation:
    """Play ``num_steps`` consecutive steps of a plan.

    Args:
        plan: what to simulate.
        hardware: instead of the plan's own.
        num_steps: steps in a row; steps overlap, so that the last one counts. With stale weights, where it takes some
            steps until all of them are alike, ``SETTLING_STEPS`` more are played.
        contention: whether ops share links, memory bandwidth and cores.

    Raises:
        SpipeError: if the hardware is too small for the layout, or ops can never start.
    """
    if num_steps < 1:
        raise SpipeError(f"num_steps = {num_steps} should be at least 1")
    hardware = hardware or plan.hardware
    if hardware.num_ranks < plan.layout.num_ranks:
        raise SpipeError(
            f"the plan uses {plan.layout.num_ranks} ranks, but {hardware.name} has {hardware.num_ranks}; make a plan "
            "for this hardware"
        )
    program = plan.program()
    model = CostModel.of(plan, hardware)
    costs = op_costs(model, program)
    num_steps += SETTLING_STEPS if plan.options.optimizer == "stale" else 0
    timeline = play(program, costs, num_steps, contention=contention)
    return Simulation(plan, hardware, program, timeline, costs, contention, model.notes)
