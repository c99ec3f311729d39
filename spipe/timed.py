"""A step to look at: a program with its timed ops, from a simulation or from a run."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from spipe.errors import SpipeError
from spipe.metrics import StepMetrics, analyse, step_times, typical_step
from spipe.ops import Kind
from spipe.program import Program
from spipe.trace import Trace

if TYPE_CHECKING:
    from spipe.plan import Plan

# What is drawn in one colour -> its kinds, in the order of legends.
GROUPS: dict[str, frozenset[Kind]] = {
    "forward": frozenset({Kind.FORWARD}),
    "recompute": frozenset({Kind.RECOMPUTE}),
    "backward": frozenset({Kind.BACKWARD}),
    "weight gradient": frozenset({Kind.WEIGHT_GRADIENT}),
    "weights": frozenset({Kind.FETCH, Kind.STORE_WEIGHTS}),
    "gradients": frozenset({Kind.OFFLOAD_GRAD}),
    "activations": frozenset({Kind.SEND_ACTIVATION, Kind.RECV_ACTIVATION}),
    "activation gradients": frozenset({Kind.SEND_GRADIENT, Kind.RECV_GRADIENT}),
    "stage inputs": frozenset(
        {Kind.SEND_STAGE_INPUT, Kind.RECV_STAGE_INPUT, Kind.STORE_STAGE_INPUT, Kind.LOAD_STAGE_INPUT}
    ),
    "optimizer": frozenset({Kind.STEP, Kind.COMMIT}),
    "other": frozenset({Kind.FREE, Kind.LOAD_TOKENS, Kind.VALIDATE, Kind.BARRIER}),
}
GROUP_OF = {kind: name for name, kinds in GROUPS.items() for kind in kinds}
LANE_TITLES = {
    "compute": "compute",
    "h2d": "host to device",
    "d2h": "device to host",
    "h2d_in": "tokens, stage inputs in",
    "d2h_in": "stage inputs out",
    "cpu": "CPU optimizer",
    "device_step": "device optimizer",
    "settle": "commit",
    "control": "control",
    "p2p": "messages",
    "p2p_in": "stage inputs",
}
"""Lanes in words, in the order in which they are shown."""


def name_of(path: Path) -> str:
    """What figures call a folder or a file of results; bytes that are no text become ``?``."""
    name = path.resolve().name if path.is_dir() else path.stem
    return name.encode("utf-8", "replace").decode("utf-8")


@dataclass(frozen=True)
class TimedStep:
    """One step of a trace.

    Attributes:
        name: what figures call it.
        program, trace: what was timed.
        step: which step is meant.
        plan: where it came from; None if only a program is known.
    """

    name: str
    program: Program
    trace: Trace
    step: int
    plan: "Plan | None" = None

    @classmethod
    def of(
        cls, name: str, plan: "Plan", trace: Trace, step: int | None = None, where: str | None = None
    ) -> "TimedStep":
        """A step of a plan's trace; None: a typical one. ``where``: what messages call it, if not by its name.

        Raises:
            SpipeError: if the step is not there or takes no time, or the trace is empty, incomplete or of another plan.
        """
        program, where = plan.program(), where or name
        trace.check_matches(program, where)
        if not len(trace):
            raise SpipeError(f"{where}: the trace is empty: it has no timed op; run or simulate the plan again")
        trace.check_complete(where)
        if step is None:
            step = typical_step(program, trace)
        elif step not in trace.steps():
            steps = trace.steps()
            raise SpipeError(f"{where}: the trace has no step {step}; it has {steps[0]} to {steps[-1]}")
        rows = trace.rows(step).values()
        lasted = max(trace.end_s[row] for row in rows) - min(trace.start_s[row] for row in rows)
        if not min(step_times(program, trace).get(step, lasted), lasted) > 0:
            raise SpipeError(f"{where}: step {step} of the trace takes no time; run or simulate the plan again")
        return cls(name, program, trace, step, plan)

    @classmethod
    def of_run(cls, folder: Path, step: int | None = None) -> "TimedStep":
        """A step of a run's folder. Raises SpipeError as ``of``, or if its trace is not a measured one."""
        from spipe.plan import Plan

        plan, trace = Plan.load(folder / "plan.json"), Trace.load(folder / "trace.json")
        if trace.source != "measured":
            raise SpipeError(
                f"{folder / 'trace.json'}: a {trace.source} trace, not what a run measured; give the trace itself or "
                "the plan instead of the folder"
            )
        return cls.of(name_of(folder), plan, trace, step, str(folder))

    def metrics(self) -> StepMetrics:
        """Times and attributed idleness of the step."""
        return analyse(self.program, self.trace, self.step)

    def lane(self, i: int, merge_peers: bool = False) -> str:
        """The lane of op ``i`` in words, as its rank sees it; ``merge_peers``: one for all its peers."""
        lane = self.program.lanes[self.program.lane[i]]
        name = lane.name.rstrip("0123456789") if lane.name.startswith("cpu") else lane.name
        title = LANE_TITLES[name] + (f" {lane.name[3:]}" if name != lane.name else "")
        if lane.peer < 0 or merge_peers:
            return title
        return f"{title}, rank {lane.peer if lane.rank == self.program.rank[i] else lane.rank}"

    def lanes(self, merge_peers: bool = False) -> list[tuple[int, str]]:
        """(rank, lane in words) of all lanes that have ops, in the order in which they are shown."""
        order = list(LANE_TITLES)
        found: dict[tuple[int, str], tuple[int, int, int]] = {}
        for i, number in enumerate(self.program.lane):
            lane, rank = self.program.lanes[number], self.program.rank[i]
            place = order.index("cpu" if lane.name.startswith("cpu") else lane.name)
            key = rank, self.lane(i, merge_peers)
            found[key] = min(found.get(key, (rank, place, number)), (rank, place, number))
        return sorted(found, key=lambda row: found[row])
