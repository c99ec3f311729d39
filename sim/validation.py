"""Validation: hold the simulator against a table of published runs."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

from spipe.errors import SpipeError
from spipe.hardware import HardwareSpec
from spipe.layout import Stage
from spipe.memory import layer_bytes, memory
from spipe.plan import ELEMENT_BYTES, Plan
from spipe.sim.published import NAMES, Run, Selection, cluster_hardware, read_runs, was_fitted_to
from spipe.sim.refit import Refit, refit
from spipe.sim.simulation import simulate
from spipe.sim.zero3 import zero3

_CLEAR_GAP = 0.05  # repeats of a run differ by several per cent: a smaller gap does not settle an order
_PRIVATE_COPY_BYTES = 4  # per parameter: systems that do not share the weights of a host hold a copy for each pass


@dataclass(frozen=True)
class Row:
    """A run and what is predicted for it (seconds)."""

    run: Run
    used_for: str
    predicted_s: float
    gpu_predicted_s: float | None
    problems: tuple[str, ...] = ()

    @property
    def error(self) -> float | None:
        return None if self.run.measured_s is None else self.predicted_s / self.run.measured_s - 1

    @property
    def gpu_error(self) -> float | None:
        if self.run.gpu_measured_s is None or self.gpu_predicted_s is None:
            return None
        return self.gpu_predicted_s / self.run.gpu_measured_s - 1

    def to_json(self) -> dict[str, Any]:
        def ms(seconds: float | None) -> float | None:
            return None if seconds is None else seconds * 1e3

        run = self.run
        return {
            "line": run.line,
            "figure": run.figure,
            "system": run.system,
            "cluster": run.cluster,
            "model_size": run.model_size,
            "microbatch_size": run.microbatch_size,
            "global_batch": run.global_batch,
            "num_hosts": run.num_hosts,
            "sequence": run.sequence,
            "used_for": self.used_for,
            "measured_ms": ms(run.measured_s),
            "predicted_ms": ms(self.predicted_s),
            "error": self.error,
            "gpu_measured_ms": ms(run.gpu_measured_s),
            "gpu_predicted_ms": ms(self.gpu_predicted_s),
            "gpu_error": self.gpu_error,
            "failure": run.failure or None,
            "does_not_fit": list(self.problems),
        }


@dataclass(frozen=True)
class Validation:
    """All rows with their predictions; summaries are over rows that judge, unless said otherwise."""

    rows: list[Row]
    skipped: list[dict[str, Any]] = field(default_factory=list)
    fitted: dict[str, Refit] = field(default_factory=dict)
    """By cluster, the constants that were fitted for this validation; else those of the hardware files count."""

    def clusters(self) -> list[str]:
        return list(dict.fromkeys(row.run.cluster for row in self.rows))

    def systems(self, cluster: str | None = None, used_for: str = "judge") -> dict[str, dict[str, dict[str, Any]]]:
        """Per system, errors of step and GPU time."""
        result = {}
        for name in NAMES:
            mine = [
                row
                for row in self.rows
                if row.run.system == name and row.used_for == used_for and cluster in (None, row.run.cluster)
            ]
            if mine:
                result[name] = {
                    "step_time": errors(row.error for row in mine),
                    "gpu_time": errors(row.gpu_error for row in mine),
                }
        return result

    @property
    def order_agreement(self) -> dict[str, Any]:
        """Of pairs of systems that ran the same job and differ by more than 5 %: how many are predicted in order."""
        groups: dict[tuple[object, ...], list[Row]] = {}
        for row in self.rows:
            if row.run.measured_s is not None:
                groups.setdefault(row.run.configuration, []).append(row)
        pairs, wrong = 0, []
        for group in groups.values():
            for a, b in combinations(group, 2):
                measured = _measured(a), _measured(b)
                if a.run.system == b.run.system or max(measured) < (1 + _CLEAR_GAP) * min(measured):
                    continue
                pairs += 1
                if (measured[0] < measured[1]) != (a.predicted_s < b.predicted_s):
                    wrong.append(f"lines {a.run.line} and {b.run.line}: {a.run.system}, {b.run.system}")
        return {"num_pairs": pairs, "num_agreeing": pairs - len(wrong), "wrong": wrong}

    @property
    def oom_agreement(self) -> dict[str, Any]:
        """How many runs that failed for want of memory, and how many that ran, are predicted to."""
        failed = [row for row in self.rows if row.run.measured_s is None]
        ran = [row for row in self.rows if row.run.measured_s is not None]
        return {
            "num_failed": len(failed),
            "num_failed_predicted": sum(bool(row.problems) for row in failed),
            "num_ran": len(ran),
            "num_ran_predicted": sum(not row.problems for row in ran),
        }

    def to_json(self) -> dict[str, Any]:
        return {
            "rows": [row.to_json() for row in self.rows],
            "systems": self.systems(),
            "clusters": {cluster: self.systems(cluster) for cluster in self.clusters()},
            "fit": {cluster: self.systems(cluster, "fit") for cluster in self.clusters()},
            "order_agreement": self.order_agreement,
            "oom_agreement": self.oom_agreement,
            "skipped": self.skipped,
            "fitted_constants": {cluster: found.to_json() for cluster, found in self.fitted.items()},
        }


def _measured(row: Row) -> float:
    assert row.run.measured_s is not None
    return row.run.measured_s


def errors(values: Iterable[float | None]) -> dict[str, Any]:
    """Mean and largest absolute error, and the mean with its sign (more than 0: predicted too slow)."""
    known = [value for value in values if value is not None]
    if not known:
        return {"mean_abs_error": None, "max_abs_error": None, "bias": None, "num_rows": 0}
    return {
        "mean_abs_error": fmean(map(abs, known)),
        "max_abs_error": max(map(abs, known)),
        "bias": fmean(known),
        "num_rows": len(known),
    }


def predict(run: Run, hardware: HardwareSpec, used_for: str = "judge") -> Row:
    """What the simulator says about a run."""
    if run.system == "DeepSpeed":
        cluster = run.hardware(hardware)
        step = zero3(
            run.model,
            cluster,
            global_batch=run.global_batch,
            microbatch_size=run.microbatch_size,
            sequence=run.sequence,
            precision="fp16",
        )
        return Row(run, used_for, step.makespan_s, None, step.problems)
    plan = run.plan(hardware)
    simulation = simulate(plan, num_steps=1)
    return Row(run, used_for, simulation.makespan_s, simulation.gpu_time_s, published_problems(plan, run.system))


def published_problems(plan: Plan, system: str) -> tuple[str, ...]:
    """What does not fit. The systems allocate as they go and keep no undo data; all but SPipe have private weights."""
    report, hardware = memory(plan), plan.hardware
    problems = []
    for rank in range(plan.layout.num_ranks):
        peak = _peak_bytes(plan, rank)
        if peak > report.rank_capacity_bytes:
            problems.append(
                f"rank {rank} needs {peak / 1e9:.1f} GB of {report.rank_capacity_bytes / 1e9:.1f} GB usable"
            )
    private = 0.0 if system == "SPipe" else _PRIVATE_COPY_BYTES * plan.model.num_parameters() / hardware.num_hosts
    for host, items in enumerate(report.hosts):
        total: float = sum(items.values()) - items["undo data"] + private
        if total > report.host_capacity_bytes:
            problems.append(
                f"host {host} needs {total / 1e9:.0f} GB of {report.host_capacity_bytes / 1e9:.0f} GB usable"
            )
    return tuple(problems)


def _peak_bytes(plan: Plan, rank: int) -> float:
    """Of an accelerator: weights of two stages, gradients of two, what a stage saves, and all stage inputs."""
    model, layout, element = plan.model, plan.layout.layout(), ELEMENT_BYTES[plan.precision]
    b, s = plan.microbatch_size, plan.sequence

    def weights(stages: Sequence[Stage], j: int) -> float:
        return sum(layer_bytes(model, i, element) for i in stages[j].layers) if 0 <= j < len(stages) else 0.0

    def saved(stage: Stage) -> float:
        return sum(model.layer_activation_bytes(model.layer_kind(i), b, s, element) for i in stage.layers)

    forward = [stage for stage in layout.forward if stage.rank == rank]
    backward = [stage for stage in reversed(layout.backward) if stage.rank == rank]
    peaks = [weights(forward, j) + weights(forward, j + 1) for j in range(len(forward))]
    peaks += [
        2 * weights(backward, j) + weights(backward, j - 1) + weights(backward, j + 1) + saved(stage)
        for j, stage in enumerate(backward)
    ]
    inputs = sum(stage.first > 0 for stage in backward) * plan.num_microbatches
    return max(peaks) + inputs * model.boundary_bytes(b, s, element)


def validate(
    table: str | Path | Sequence[Run],
    hardware: HardwareSpec | None = None,
    fit: str | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Validation:
    """Simulate every row of a table.

    Args:
        table: a file in the format of ``spipe.sim.published``, or its rows.
        hardware: only the rows of this cluster, on this hardware; None: all rows, on the built-in clusters.
        fit: rows such as ``figure=9,model=10|30``, to which each cluster's constants are fitted (``spipe.sim.refit``)
            before anything is judged; ``none``: the hardware as it is, and all rows judge, for hardware that owes
            nothing to the table. None: the hardware as it is, and the rows that a built-in cluster with the same
            accelerators was fitted to judge nothing.
        progress: told what takes long.

    Raises:
        SpipeError: if the table cannot be read, its clusters are not known, or the rows are too few to fit to.
    """
    runs = read_runs(table) if isinstance(table, str | Path) else list(table)
    clusters = {cluster: _hardware(cluster, hardware, runs) for cluster in dict.fromkeys(run.cluster for run in runs)}
    if not any(clusters.values()):
        raise SpipeError(
            f"no row of the table ran on {hardware.name if hardware else 'known hardware'}; its clusters are "
            f"{', '.join(clusters)}"
        )
    chosen = None if fit is None else Selection.parse(fit)
    fitted: dict[str, Refit] = {}
    if chosen is not None and chosen.wanted is not None:
        for cluster, given in clusters.items():
            mine = [run for run in runs if run.cluster == cluster and run in chosen]
            if given is not None and mine:
                progress(f"fitting {given.name} to {fit}")
                fitted[cluster] = refit(mine, given)
                clusters[cluster] = fitted[cluster].hardware
        if not fitted:
            raise SpipeError(f"--fit {fit!r} selects no row of these clusters; say figure=9, model=10 or the like")
    rows: list[Row] = []
    skipped: list[dict[str, Any]] = []
    for run in runs:
        spec = clusters[run.cluster]
        if spec is None:
            skipped.append({"line": run.line, "reason": f"ran on {run.cluster}"})
            continue
        fits = was_fitted_to(run, spec) if chosen is None else run in chosen
        try:
            rows.append(predict(run, spec, "fit" if fits else "judge"))
        except SpipeError as error:
            skipped.append({"line": run.line, "reason": str(error)})
    if not rows:
        reasons = dict.fromkeys(str(row["reason"]) for row in skipped)
        raise SpipeError(f"no row of the table can be simulated: {'; '.join(list(reasons)[:3])}")
    return Validation(rows, skipped, fitted)


def _hardware(cluster: str, given: HardwareSpec | None, runs: Sequence[Run]) -> HardwareSpec | None:
    if given is None:
        return cluster_hardware(cluster)
    if all(run.cluster == cluster for run in runs):
        return given
    builtin = cluster_hardware(cluster)
    alike = given.name == builtin.name or given.accelerator.name == builtin.accelerator.name
    return given if alike else None
