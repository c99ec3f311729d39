"""Refit: the constants of a cluster that published runs decide.

Five at most: compute efficiency, the tokens at which half of it is reached, the accelerators' links, the network, and
the optimizer's rate. A step's time is nearly linear in their inverses (its critical path is a sum of work / rate), so a
few rounds of robust least squares on a linearisation settle them. Weights are the same above and below: an error beyond
1.5 typical ones counts less, whatever its sign.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from spipe.errors import SpipeError
from spipe.hardware import HardwareSpec
from spipe.sim.fitting import Prior, nonnegative_fit
from spipe.sim.published import SYSTEMS, Run
from spipe.sim.simulation import simulate
from spipe.topology import Link

_NUDGE = 0.05  # relative change of an unknown for its slope
_ROUNDS = 20
_SETTLED = 0.003  # largest relative change of a round that ends the fit
_NOISE = 0.02  # relative, of published times
_DAMPING = 0.5  # an unknown changes by no more than so much of itself, give or take, unless the rows insist


@dataclass(frozen=True)
class Constant:
    """An unknown, as the inverse of a rate: ``get`` reads it from a spec, ``put`` writes it into one."""

    name: str
    unit: str
    get: Callable[[HardwareSpec], float]
    put: Callable[[HardwareSpec, float], HardwareSpec]
    human: Callable[[HardwareSpec], float]
    """The constant as a hardware file has it, in ``unit``."""


@dataclass(frozen=True)
class Refit:
    """``hardware``: with the fitted constants. ``values``: by name, in the units of ``units``."""

    hardware: HardwareSpec
    values: dict[str, float]
    units: dict[str, str]
    num_rows: int

    def to_json(self) -> dict[str, object]:
        constants = {name: {"value": value, "unit": self.units[name]} for name, value in self.values.items()}
        return {"hardware": self.hardware.name, "num_rows": self.num_rows, "constants": constants}


def refit(runs: Sequence[Run], hardware: HardwareSpec) -> Refit:
    """Fit the constants to pipeline runs that succeeded (rows of other systems are left out).

    Args:
        hardware: where the fit starts. What the rows do not decide stays as it is here: the network if all ran on one
            host, and the tokens of half efficiency where the spec's ``provenance`` does not say that they are fitted.

    Raises:
        SpipeError: if there are fewer measured times than constants.
    """
    rows = [run for run in runs if run.system in SYSTEMS and run.measured_s is not None]
    chosen = constants(hardware, network=any(run.num_hosts > 1 for run in rows))
    measured = [time for run in rows for time in (run.measured_s, run.gpu_measured_s) if time is not None]
    if len(measured) < len(chosen):
        raise SpipeError(
            f"{len(measured)} measured times of pipelines cannot decide {len(chosen)} constants "
            f"({', '.join(constant.name for constant in chosen)}); choose more rows with --fit, or --fit none"
        )
    for _ in range(_ROUNDS):
        before = [constant.get(hardware) for constant in chosen]
        base = _predicted(rows, hardware)
        slopes = []
        for constant, value in zip(chosen, before, strict=True):
            nudged = _predicted(rows, constant.put(hardware, value * (1 + _NUDGE)))
            slopes.append([(b - a) / (_NUDGE * value) for a, b in zip(base, nudged, strict=True)])
        matrix = []
        for i, time in enumerate(base):  # the last unknown is 1: what does not depend on the others
            mine = [slope[i] for slope in slopes]
            matrix.append([*mine, time - sum(s * value for s, value in zip(mine, before, strict=True))])
        priors = [
            Prior([float(j == k) for k in range(len(before) + 1)], value, _DAMPING * value)
            for j, value in enumerate(before)
        ]
        priors.append(Prior([0.0] * len(before) + [1.0], 1.0, 1e-6))
        after = nonnegative_fit(matrix, measured, priors, noise=_NOISE)
        for constant, old, new in zip(chosen, before, after, strict=False):
            hardware = constant.put(hardware, min(max(float(new), old / 2), old * 2))
        if all(abs(c.get(hardware) / old - 1) < _SETTLED for c, old in zip(chosen, before, strict=True)):
            break
    values = {constant.name: constant.human(hardware) for constant in chosen}
    return Refit(hardware, values, {constant.name: constant.unit for constant in chosen}, len(rows))


def _predicted(rows: Sequence[Run], hardware: HardwareSpec) -> list[float]:
    """Step and GPU time of every row, in the order of the measured ones."""
    times = []
    for run in rows:
        simulation = simulate(run.plan(hardware), num_steps=1)
        times += [simulation.makespan_s] if run.measured_s is not None else []
        times += [simulation.gpu_time_s] if run.gpu_measured_s is not None else []
    return times


def constants(hardware: HardwareSpec, *, network: bool) -> list[Constant]:
    """The unknowns. Efficiency and its tokens are fitted as 1 / efficiency and tokens / efficiency."""

    def with_efficiency(hardware: HardwareSpec, inverse: float) -> HardwareSpec:
        old = hardware.accelerator
        efficiency = min(1 / inverse, 1.0)
        half = old.half_efficiency_tokens * efficiency / old.max_efficiency  # keeps the other unknown
        return hardware.replace(accelerator=old.replace(max_efficiency=efficiency, half_efficiency_tokens=half))

    def with_half(hardware: HardwareSpec, value: float) -> HardwareSpec:
        old = hardware.accelerator
        return hardware.replace(accelerator=old.replace(half_efficiency_tokens=value * old.max_efficiency))

    found = [
        Constant(
            "max_efficiency",
            "of the peak",
            lambda hardware: 1 / hardware.accelerator.max_efficiency,
            with_efficiency,
            lambda hardware: hardware.accelerator.max_efficiency,
        )
    ]
    if hardware.provenance.get("accelerator.half_efficiency_tokens") == "fitted":
        found.append(
            Constant(
                "half_efficiency_tokens",
                "tokens",
                lambda hardware: hardware.accelerator.half_efficiency_tokens / hardware.accelerator.max_efficiency,
                with_half,
                lambda hardware: hardware.accelerator.half_efficiency_tokens,
            )
        )
    found.append(_link("PCIe", lambda link: link.a.startswith("gpu") or link.b.startswith("gpu")))
    if network:
        found.append(_link("network", lambda link: "network" in (link.a, link.b)))
    found.append(
        Constant(
            "adam",
            "ns per parameter and rank",
            lambda hardware: 1 / hardware.cpu.adam_parameters_per_s,
            lambda hardware, value: hardware.replace(cpu=hardware.cpu.replace(adam_parameters_per_s=1 / value)),
            lambda hardware: 1e9 * hardware.ranks_per_host / hardware.cpu.adam_parameters_per_s,
        )
    )
    return found


def _link(name: str, chosen: Callable[[Link], bool]) -> Constant:
    """The bandwidth of all chosen links."""

    def bandwidth(hardware: HardwareSpec) -> float:
        return min(link.bandwidth_bytes_per_s for link in hardware.links if chosen(link))

    def put(hardware: HardwareSpec, inverse: float) -> HardwareSpec:
        factor = 1 / (inverse * bandwidth(hardware))

        def scaled(link: Link) -> Link:
            both = link.both_directions_bytes_per_s
            return link.replace(
                bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * factor,
                both_directions_bytes_per_s=both and both * factor,
            )

        return hardware.replace(links=tuple(scaled(link) if chosen(link) else link for link in hardware.links))

    return Constant(
        name, "GB/s", lambda hardware: 1 / bandwidth(hardware), put, lambda hardware: bandwidth(hardware) / 1e9
    )
