"""The command that compares machines one could have."""

import csv
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spipe.cli.common import Count, Force, JsonFile, Output, positive, processes, progress, replacing, whole_number
from spipe.cli.names import OnlySchedules, hardware_names, model_names
from spipe.errors import SpipeError, unknown

if TYPE_CHECKING:
    from rich.console import Console

    from spipe.hardware import HardwareSpec


def whatif(
    model: Annotated[
        list[str],
        typer.Option(
            "--model",
            metavar="M",
            autocompletion=model_names,
            help="Name, config.json, its folder, or .toml; may be repeated.",
        ),
    ],
    hardware: Annotated[
        list[str],
        typer.Option(
            "--hardware",
            metavar="[LABEL=]H[:KEY=VALUE,...]",
            autocompletion=hardware_names,
            help="Name or .toml file, with changes; may be repeated.",
        ),
    ],
    global_batch: Annotated[
        int, typer.Option("--global-batch", parser=Count, metavar="N", help="Sequences per training step.")
    ],
    sequence: Annotated[
        int, typer.Option("--sequence", "--seq", parser=Count, metavar="N", help="Tokens per sequence.")
    ],
    upgrade: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Try only this one: dram, cpu, pcie, nvlink or none; may be repeated."),
    ] = None,
    schedule: OnlySchedules = None,
    microbatch_size: Annotated[
        int | None, typer.Option(parser=Count, metavar="N", help="Sequences per microbatch.")
    ] = None,
    cuts: Annotated[
        str, typer.Option(metavar="HOW", help="Stages: balanced (quick), improve, or all ways to cut.")
    ] = "balanced",
    effort: Annotated[
        float, typer.Option(parser=positive, metavar="X", help="Candidates looked at, against a search's usual number.")
    ] = 0.1,
    table: Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="Write all rows as a table.")] = None,
    figure: Annotated[Path | None, typer.Option("--figure", metavar="FILE", help="Draw a .png, .svg or .pdf.")] = None,
    workers: Annotated[
        int, typer.Option(parser=whole_number(0), metavar="N", help="Processes; 0 for all cores. Same result for any.")
    ] = 0,
    json_file: JsonFile = None,
    force: Force = False,
) -> None:
    """Compare machines one could have: speed, dollars, what does not fit and why, and which upgrade helps most.

    KEY=VALUE changes the hardware as in its file, for example cpu.memory_gib=1024 or price.rent_dollars_per_hour=4.
    Prices in built-in hardware are examples; put in your own.

    \b
    Examples:
      spipe whatif --model llama2-13b --hardware rtx4090x8 --hardware h200x1 --global-batch 64 --sequence 2048
      spipe whatif --model llama2-7b --hardware 'two=rtx4090-cluster:num_hosts=2' --hardware rtx4090x8 \\
          --global-batch 64 --sequence 2048 --csv whatif.csv --figure whatif.png
    """
    from spipe.model import load_model
    from spipe.schedules import get_schedule

    output = Output(json_file, force, (table, figure))
    offers = [parse_offer(text) for text in hardware]
    labels = [label for label, _ in offers]
    if len(set(labels)) < len(labels):
        raise SpipeError(f"two kinds of hardware are called {max(labels, key=labels.count)}; give them labels: LABEL=H")
    models = [load_model(name) for name in model]
    for name in schedule or ():
        get_schedule(name)

    from spipe import plots
    from spipe.sim.whatif import UPGRADES, most_helpful, what_if

    if figure is not None:
        plots.check_figure(figure)
    known = [known.name for known in UPGRADES]
    for name in upgrade or ():
        if name not in (*known, "none"):
            raise unknown("upgrade", name, (*known, "none"))
    if upgrade and "none" in upgrade and set(upgrade) != {"none"}:
        other = next(name for name in upgrade if name != "none")
        raise SpipeError(f"--upgrade none and --upgrade {other} contradict each other; keep one of them")
    with processes(workers) as executor:
        rows = what_if(
            models,
            offers,
            upgrades=[known for known in UPGRADES if not upgrade or known.name in upgrade],
            progress=progress,
            global_batch=global_batch,
            sequence=sequence,
            schedules=schedule or None,
            microbatch_size=microbatch_size,
            cuts=cuts,
            effort=effort,
            executor=executor,
        )
    helps = most_helpful(rows)
    if table is not None:
        with replacing(table) as new, new.open("w", newline="") as stream:
            writer = csv.DictWriter(stream, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        progress(f"wrote {table}")
    if figure is not None:
        with replacing(figure) as new:
            plots.save(plots.what_if(rows), new)
        progress(f"wrote {figure}")
    data = {"rows": rows, "helps": [{"model": m, "offer": o, "upgrade": text} for (m, o), text in helps.items()]}
    output.show(data, lambda console: show_rows(console, rows, helps, dict(offers)))


def parse_offer(text: str) -> tuple[str, "HardwareSpec"]:
    """``[LABEL=]H[:KEY=VALUE,...]``: label and hardware."""
    import tomllib

    from spipe.hardware import load_hardware

    head, _, changes = text.partition(":")
    label, equals, name = head.partition("=")
    if equals and not label.strip():
        raise SpipeError(f"--hardware {text!r}: the label before = is empty; write LABEL={name}, or {name} alone")
    spec = load_hardware(name if equals else label)
    values: dict[str, Any] = {}
    for change in filter(None, changes.split(",")):
        key, equals, value = change.partition("=")
        if not equals or not value:
            raise SpipeError(f"--hardware {text!r}: {change!r} should be KEY=VALUE, for example cpu.memory_gib=1024")
        try:
            values[key.strip()] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            values[key.strip()] = value
    return label, spec.override(values) if values else spec


def show_rows(
    console: "Console",
    rows: list[dict[str, Any]],
    helps: dict[tuple[str, str], str],
    offers: dict[str, "HardwareSpec"],
) -> None:
    """The offers as a table, and their upgrades as another."""
    from spipe import show

    def dollars(value: float | None) -> str:
        return "?" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.2f}"

    def break_even(row: dict[str, Any]) -> str:
        month = row["break_even_month"]
        if not row["feasible"]:
            return ""
        if month is None:
            priced = row["purchase_dollars"] is not None and row["rent_dollars_per_billion_tokens"] is not None
            return "never" if priced else "?"
        return f"{month:.0f}"

    def accelerators(row: dict[str, Any]) -> str:
        used, offered = row["accelerators_used"], row["accelerators"]
        return str(offered) if used in (None, offered) else f"{used} of {offered}"

    def paid(hosts: int) -> str:
        return "the whole host is" if hosts == 1 else f"all {hosts} hosts are"

    bases = [row for row in rows if not row["upgrade"]]
    columns = ("model", "hardware", "GPUs", "tokens / s", "gap", "price $", "rent $ / 1e9 tokens", "break-even month")
    console.print(
        show.table(
            "As they are",
            columns,
            [
                (
                    row["model"],
                    row["offer"],
                    accelerators(row),
                    show.count(row["tokens_per_s"]) if row["feasible"] else "does not fit",
                    f"{100 * row['gap']:.0f} %" if row["feasible"] else "",
                    dollars(row["purchase_dollars"]),
                    dollars(row["rent_dollars_per_billion_tokens"]) if row["feasible"] else "",
                    break_even(row),
                )
                for row in bases
            ],
            left=2,
        )
    )
    for row in bases:
        words = row["plan"] if row["feasible"] else row["reason"]
        console.print(f"{row['model']} on {row['offer']}: {words}", soft_wrap=True)
    upgraded = [row for row in rows if row["upgrade"]]
    if upgraded:
        console.print()
        console.print(
            show.table(
                "With one upgrade of every host",
                ("model", "hardware", "upgrade", "tokens / s", "gain", "$"),
                [
                    (
                        row["model"],
                        row["offer"],
                        row["upgrade"],
                        show.count(row["tokens_per_s"]) if row["feasible"] else "does not fit",
                        "" if row["gain"] is None else f"{100 * row['gain']:+.1f} %",
                        dollars(row["upgrade_dollars"]),
                    )
                    for row in upgraded
                ],
                left=3,
            )
        )
        for (model, offer), text in helps.items():
            console.print(f"{model} on {offer}: helps most: {text}", soft_wrap=True)
    dates = {spec.price.note: spec.price.date for spec in offers.values() if spec.price is not None}
    notes = [
        f"{row['model']} on {row['offer']} uses {accelerators(row)} accelerators; {paid(row['hosts'])} paid for"
        for row in bases
        if row["feasible"] and row["accelerators_used"] < row["accelerators"]
    ]
    show.notes(console, [*notes, *(f"{note} ({date})" for note, date in dates.items())])


COMMANDS = (whatif,)
