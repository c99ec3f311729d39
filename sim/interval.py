"""Intervals: how long a step may take, given how surely everything was measured.

A bootstrap. Every measured or fitted value is drawn anew around its median, as far as its standard error lets it, and
the step is replayed for all draws at once. What an op takes is linear in a small change of one value, so one pricing a
value gives the costs of all draws; the replay then finds the step time of each exactly. Contention, which a replay
does not know, is the engine's: its step time over the replay's is taken to be the same for all draws.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from spipe.errors import SpipeError
from spipe.hardware import HardwareSpec
from spipe.sim.cost import CostModel
from spipe.sim.pricing import op_costs
from spipe.sim.replay import Replay
from spipe.sim.simulation import Simulation
from spipe.units import Spec

LEVEL = 0.9
DRAWS = 200
_NUDGE = 0.01


@dataclass(frozen=True)
class Interval:
    """The middle ``level`` of the step times drawn (seconds), and what it rests on.

    Attributes:
        parts: the relative standard deviation of the step time that each value alone causes, largest first.
    """

    low_s: float
    high_s: float
    level: float
    parts: dict[str, float]

    @property
    def seconds(self) -> tuple[float, float]:
        return self.low_s, self.high_s


def interval(simulation: Simulation, *, level: float = LEVEL, draws: int = DRAWS, seed: int = 0) -> Interval | None:
    """The interval of a simulated step; None if its hardware says nothing of how surely it was measured.

    Args:
        level: share of the step times that lie inside.
        draws: how many are drawn.
        seed: the same seed gives the same interval.
    """
    if not 0 < level < 1:
        raise SpipeError(f"level = {level} should be between 0 and 1")
    hardware, plan, program = simulation.hardware, simulation.plan, simulation.program
    values = list(uncertain_values(hardware, CostModel.of(plan, hardware)))
    if not values and not hardware.prediction_error:
        return None
    replay = Replay(program, simulation.costs)
    base = np.array([simulation.costs.seconds[i] for i in replay.leaders])
    random = np.random.default_rng(seed)
    names, slopes = [], []
    for name, error, nudged in values:
        changed = op_costs(CostModel.of(plan, nudged), program).seconds
        slope = (np.array([changed[i] for i in replay.leaders]) - base) * (error / _NUDGE)
        if slope.any():
            names.append(name)
            slopes.append(slope)
    matrix = np.stack(slopes, axis=1) if slopes else np.zeros((len(base), 0))
    drawn = np.clip(random.standard_normal((matrix.shape[1], draws)), -3, 3)
    columns = np.concatenate([base[:, None], base[:, None] + matrix, base[:, None] + matrix @ drawn], axis=1)
    times: NDArray[np.float64] = replay.step_s(np.maximum(columns, 0.0))
    relative = times / times[0]
    model = np.exp(hardware.prediction_error * random.standard_normal(draws))
    step_s = simulation.step_s * relative[1 + len(names) :] * model
    low, high = np.quantile(step_s, [(1 - level) / 2, (1 + level) / 2])
    parts = {name: abs(float(ratio) - 1) for name, ratio in zip(names, relative[1:], strict=False)}
    if hardware.prediction_error:
        parts["runs against predictions"] = hardware.prediction_error
    return Interval(float(low), float(high), level, dict(sorted(parts.items(), key=lambda part: -part[1])))


def uncertain_values(hardware: HardwareSpec, costs: CostModel) -> Iterator[tuple[str, float, HardwareSpec]]:
    """(name, relative standard error, the hardware with the value changed by a hundredth) of all that is uncertain."""
    used = costs.measured_entries()
    for number, entry in enumerate(hardware.measured):
        if entry in used and entry.standard_error_s > 0 and entry.seconds > 0:
            changed = entry.model_copy(update={"seconds": entry.seconds * (1 + _NUDGE)})
            measured = (*hardware.measured[:number], changed, *hardware.measured[number + 1 :])
            name = f"{entry.layer_kind} {entry.pass_name}"
            yield name, entry.standard_error_s / entry.seconds, hardware.model_copy(update={"measured": measured})
    for path, error in hardware.uncertainty.items():
        if error > 0:
            yield path, error, cast(HardwareSpec, _changed(hardware, path.split("."), 1 + _NUDGE))


def _changed(owner: Any, path: list[str], factor: float) -> Any:
    """``owner`` with the number (or all numbers of the table) at ``path`` multiplied."""
    if not path:
        return {key: value * factor for key, value in owner.items()} if isinstance(owner, dict) else owner * factor
    match = re.fullmatch(r"(\w+)(?:\[(\d+)\])?", path[0])
    if match is None:
        raise SpipeError(f"uncertainty of {'.'.join(path)!r}: not the name of a field")
    name, index = match.groups()
    if isinstance(owner, dict):
        return {**owner, name: _changed(owner[name], path[1:], factor)} if name in owner else owner
    value = getattr(owner, name)
    if value is None:
        return owner
    if index is not None:
        items = list(value)
        if int(index) >= len(items):
            raise SpipeError(f"uncertainty of {path[0]}: there are {len(items)} of them")
        items[int(index)] = _changed(items[int(index)], path[1:], factor)
        return owner.model_copy(update={name: tuple(items)})
    changes = {name: _changed(value, path[1:], factor)}
    both = "both_directions_bytes_per_s"
    if name == "bandwidth_bytes_per_s" and getattr(owner, both, None) is not None:
        changes[both] = getattr(owner, both) * factor
    assert isinstance(owner, Spec)
    return owner.model_copy(update=changes)
