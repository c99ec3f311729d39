"""The command that holds the simulator against published runs."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spipe.cli.common import Force, JsonFile, Output, load_override, progress
from spipe.cli.names import hardware_names

if TYPE_CHECKING:
    from rich.console import Console

    from spipe.sim.validation import Validation


def validate(
    table: Annotated[Path, typer.Argument(metavar="TABLE", help="A .csv in the format of the SPipe artifact.")],
    hardware: Annotated[
        str | None,
        typer.Option(
            "--hardware",
            metavar="CLUSTER",
            autocompletion=hardware_names,
            help="Only this cluster's rows, on this hardware (name or file).",
        ),
    ] = None,
    fit: Annotated[
        str | None,
        typer.Option(
            "--fit",
            metavar="ROWS",
            help="Fit the cluster's constants to these rows first (about a minute): figure=9,model=10|30, or none.",
        ),
    ] = None,
    json_file: JsonFile = None,
    force: Force = False,
) -> None:
    """Hold the simulator against a table of published runs: errors per row and system, order, memory.

    Columns: jobid,name,cluster,model_size,mubs,mbs,nnode,seq,tflops,elapsed_time_ms,gpu_latency. Rows that the
    constants of a cluster were fitted to are reported apart: without --fit, those of the built-in hardware.

    \b
    Examples:
      spipe validate published_runs.csv --json v.json
      spipe validate published_runs.csv --hardware v100-cluster --fit 'figure=9,model=10|30'
      spipe validate published_runs.csv --hardware my-v100.toml --fit none
    """
    output = Output(json_file, force)
    spec = load_override(hardware)

    from spipe.sim.validation import validate as run

    result = run(table, spec, fit, progress)
    output.show(result.to_json(), lambda console: show_validation(console, result))


def show_validation(console: "Console", result: "Validation") -> None:
    """Rows, then errors per system and cluster, order and memory."""
    from rich.table import Table

    def percent(value: float | None) -> str:
        return "" if value is None else f"{100 * value:+.1f} %"

    def seconds(value: float | None) -> str:
        return "" if value is None else f"{value:.2f}"

    rows = Table("line", "figure", "system", "cluster", "B", "microbatch", "batch", "hosts", "tokens", box=None)
    for name in ("measured s", "predicted s", "error", "GPU error"):
        rows.add_column(name, justify="right")
    rows.add_column("for")
    for row in result.rows:
        run = row.run
        sizes = (run.model_size, run.microbatch_size, run.global_batch, run.num_hosts, run.sequence)
        measured = run.failure or seconds(run.measured_s)
        rows.add_row(
            str(run.line), run.figure, run.system, run.cluster, *map(str, sizes), measured, seconds(row.predicted_s),
            percent(row.error), percent(row.gpu_error), row.used_for,
        )  # fmt: skip
    console.print(rows)
    for used_for, title in (("judge", "Rows that judge"), ("fit", "Rows that constants were fitted to")):
        table = Table("cluster", "system", title=f"\n{title}", title_justify="left", box=None)
        for name in ("rows", "step mean", "max", "bias", "GPU mean", "max", "bias"):
            table.add_column(name, justify="right")
        for cluster in result.clusters():
            for system, found in result.systems(cluster, used_for).items():
                step, gpu = found["step_time"], found["gpu_time"]
                table.add_row(cluster, system, str(step["num_rows"]), *_three(step), *_three(gpu))
        if table.row_count:
            console.print(table)
    for cluster, fitted in result.fitted.items():
        values = ", ".join(f"{name} {value:.4g} {fitted.units[name]}" for name, value in fitted.values.items())
        console.print(f"\n{cluster}, fitted to {fitted.num_rows} rows: {values}", soft_wrap=True)
        if fitted.num_rows < 2 * len(fitted.values):
            console.print(f"note: so few rows hardly decide {len(fitted.values)} constants", soft_wrap=True)
    order, oom = result.order_agreement, result.oom_agreement
    console.print(
        f"\norder of systems where they differ by more than 5 %: {order['num_agreeing']} of {order['num_pairs']} pairs"
    )
    for pair in order["wrong"]:
        console.print(f"  not so: {pair}")
    console.print(
        f"out of memory: {oom['num_failed_predicted']} of {oom['num_failed']} failures predicted, "
        f"{oom['num_ran_predicted']} of {oom['num_ran']} runs predicted to fit"
    )
    lines: dict[str, list[str]] = {}
    for skipped in result.skipped:
        lines.setdefault(skipped["reason"], []).append(str(skipped["line"]))
    for reason, numbers in lines.items():
        plural = "s" if len(numbers) > 1 else ""
        console.print(f"line{plural} {', '.join(numbers)} left out: {reason}", soft_wrap=True)


def _three(found: dict[str, Any]) -> tuple[str, str, str]:
    if not found["num_rows"]:
        return "", "", ""
    return (
        f"{100 * found['mean_abs_error']:.1f} %",
        f"{100 * found['max_abs_error']:.1f} %",
        f"{100 * found['bias']:+.1f} %",
    )


COMMANDS = (validate,)
