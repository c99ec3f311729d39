"""Results for people: tables, a plan in words, and a timeline in characters."""

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Column, Table
from rich.text import Text

from spipe.hardware import HardwareSpec
from spipe.layout import Stage
from spipe.memory import MemoryReport
from spipe.metrics import CAUSES, StepMetrics
from spipe.model import ModelSpec
from spipe.ops import Kind
from spipe.plan import Plan
from spipe.program import Program
from spipe.trace import Trace
from spipe.units import to_human_units

LETTERS = {Kind.FORWARD: "F", Kind.RECOMPUTE: "r", Kind.BACKWARD: "B", Kind.WEIGHT_GRADIENT: "W"}
STYLES = {"F": "cyan", "r": "blue", "B": "green", "W": "green", "=": "magenta", "^": "yellow"}


def console(*, stderr: bool = False) -> Console:
    """A console on stdout or stderr; where that is no terminal, lines have up to 120 characters."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, width=None if stream.isatty() else 120, highlight=False, markup=False)


# Quantities


def seconds(value: float) -> str:
    """``1.23 s``, ``4.56 ms`` or ``7.89 us``: three significant digits."""
    if value == 0:
        return "0"
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        if abs(value) * factor >= 1 or unit == "us":
            return f"{three(value * factor)} {unit}"
    raise AssertionError("unreachable")


def size(num_bytes: float) -> str:
    """``1.23 GiB`` or, below a tenth of that, MiB."""
    if math.isinf(num_bytes):
        return "unlimited"
    return f"{three(num_bytes / 2**30)} GiB" if num_bytes >= 0.1 * 2**30 else f"{three(num_bytes / 2**20)} MiB"


def count(value: float) -> str:
    """``1.26 M``: a large number with three significant digits."""
    for factor, unit in ((1e9, " B"), (1e6, " M"), (1e3, " k")):
        if value >= factor:
            return f"{three(value / factor)}{unit}"
    return f"{value:.0f}"


def percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "0.0 %"


def three(value: float) -> str:
    """Three significant digits."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:#.3g}"


class FittingTable(Table):
    """A table that fits its console without breaking words, numbers and names, wherever that can be had: headers and
    long texts take more lines, then columns stand closer."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        self._fit(options.max_width)
        yield from super().__rich_console__(console, options)

    def _fit(self, width: int) -> None:
        ranges = [_widths(column, position > 0) for position, column in enumerate(self.columns)]
        widths = [most for _, most in ranges]
        for padding in (1, 0):
            room = width - (1 + 2 * padding) * len(ranges) - 1
            if sum(least for least, _ in ranges) <= room:
                while sum(widths) > room:
                    widest = max(
                        (i for i, (least, _) in enumerate(ranges) if widths[i] > least), key=widths.__getitem__
                    )
                    widths[widest] -= 1
                for column, chosen in zip(self.columns, widths, strict=True):
                    column.width = chosen
                self.padding = (0, padding)
                return


_UNBROKEN = 12  # characters of a text that stays in one line


def _widths(column: Column, may_break: bool) -> tuple[int, int]:
    """The least width that breaks nothing but texts between their words, and the width without any break."""
    cells = [str(cell) for cell in column.cells]
    pieces = str(column.header).split()
    for cell in cells:
        pieces += cell.split() if may_break and column.justify == "left" and len(cell) > _UNBROKEN else [cell]
    return max(map(cell_len, pieces), default=1), max(map(cell_len, [str(column.header), *cells]))


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> Table:
    """A table whose first ``left`` columns are text and the others numbers."""
    made = FittingTable(title=title or None, title_justify="left", title_style="bold")
    for position, column in enumerate(columns):
        made.add_column(column, justify="left" if position < left else "right", overflow="fold")
    for row in rows:
        made.add_row(*row)
    return made


# Specs


def models(to: Console, chosen: Sequence[ModelSpec]) -> None:
    columns = ("model", "blocks", "hidden", "ffn", "heads", "kv heads", "vocab", "sequence", "parameters", "state")
    rows = [
        (
            m.name,
            *map(str, (m.num_layers, m.hidden_size, m.ffn_size, m.num_heads, m.num_kv_heads, m.vocab_size)),
            str(m.max_sequence or "any"),
            count(m.num_parameters()),
            size(16 * m.num_parameters()),
        )
        for m in chosen
    ]
    to.print(table("", columns, rows))
    to.print("state: weights, gradients, master weights and moments in CPU memory, 16 bytes a parameter")


def hardware_list(to: Console, specs: Sequence[HardwareSpec]) -> None:
    rows = [
        (
            spec.name,
            spec.device,
            f"{spec.num_hosts} x {spec.ranks_per_host}",
            spec.accelerator.name,
            size(spec.accelerator.memory_bytes),
            size(spec.cpu.usable_memory_bytes),
        )
        for spec in specs
    ]
    to.print(table("", ("hardware", "device", "hosts x ranks", "rank", "memory", "usable host memory"), rows, left=4))
    to.print("`spipe hardware NAME` shows one in full, with the source of its numbers")


def hardware(to: Console, spec: HardwareSpec) -> None:
    import tomli_w

    to.print(Text(tomli_w.dumps(to_human_units(spec), multiline_strings=True).rstrip()), soft_wrap=True)


def facts(to: Console, pairs: Mapping[str, Any]) -> None:
    rows = [(key, ", ".join(value) if isinstance(value, list) else str(value)) for key, value in pairs.items()]
    to.print(table("", ("what", "found"), rows, left=2))


# Plans


def plan_words(plan: Plan) -> str:
    """The plan in a few lines."""
    layout = plan.layout.layout()
    used = len(layout.ranks_used)
    offered = plan.hardware.num_ranks
    lines = [
        f"{plan.model.name} ({plan.model.num_total_layers} layers, {count(plan.model.num_parameters())} parameters) on "
        f"{plan.hardware.name}: {used} of {offered} ranks, schedule {plan.schedule}, {plan.precision}",
        f"a step: {plan.num_microbatches} microbatches of {plan.microbatch_size} x {plan.sequence} tokens = "
        f"{plan.tokens_per_step} tokens",
        f"forward:  {_stages('F', layout.forward)}",
        f"backward: {_stages('B', layout.backward)}",
    ]
    changed = plan.options.model_dump(exclude_defaults=True)
    if changed:
        lines.append("options:  " + ", ".join(f"{key}={value}" for key, value in changed.items()))
    return "\n".join(lines)


def _stages(letter: str, stages: Sequence[Stage]) -> str:
    if not stages:
        return "none (the only backward stage recomputes everything)"
    shown = [
        f"{letter}{k} layer{'s' if len(s.layers) > 1 else ''} {_range(s)} on rank {s.rank}"
        for k, s in enumerate(stages)
    ]
    if len(shown) > 12:
        shown = [*shown[:6], f"... {len(shown) - 8} more ...", *shown[-2:]]
    return "; ".join(shown)


def _range(stage: Stage) -> str:
    return str(stage.first) if len(stage.layers) == 1 else f"{stage.first}-{stage.stop - 1}"


def candidates(to: Console, rows: Sequence[Mapping[str, Any]], shown: int = 8) -> None:
    """The fastest plans that a search simulated, with their intervals where there are some."""
    columns = ("schedule", "options", "ranks", "F", "B", "microbatches", "step", "tokens / s")
    certain = bool(rows) and "interval_s" in rows[0]
    made = table(
        f"The fastest of {len(rows)} plans simulated",
        (*columns, "90 % interval", "first beats it") if certain else columns,
        [
            (
                row["schedule"],
                ", ".join(f"{key}={value}" for key, value in _chosen(row).items()),
                *(str(row[key]) for key in ("num_ranks", "forward_stages", "backward_stages")),
                f"{row['num_microbatches']} x {row['microbatch_size']}",
                seconds(row["step_s"]),
                count(row["tokens_per_s"]),
                *(_certainty(row, number == 0) if certain else ()),
            )
            for number, row in enumerate(rows[:shown])
        ],
        left=2,
    )
    to.print(made)
    to.print("F, B: forward and backward stages per rank; microbatches: number x sequences each")


def _chosen(row: Mapping[str, Any]) -> dict[str, Any]:
    """What a plan differs in from the defaults."""
    return {**row["options"], **({"compute_threads": row["compute_threads"]} if row["compute_threads"] > 1 else {})}


def _certainty(row: Mapping[str, Any], first: bool) -> tuple[str, str]:
    if "interval_s" not in row:
        return "-", "-"
    low, high = row["interval_s"]
    return f"{seconds(low)} to {seconds(high)}", "" if first else "yes" if row["slower"] else "not for certain"


# Time


def bubbles(to: Console, metrics: StepMetrics, title: str = "Idle time of the compute lanes, by cause") -> None:
    """Every cause, per rank and together, with the sum and the idle time it has to equal."""
    total = metrics.total()
    ranks = [f"rank {r}" for r in range(len(metrics.busy_s))]
    if len(ranks) > 8:
        ranks = []
    shown = [cause for cause in CAUSES if total[cause] > 0]
    all_s = metrics.duration_s * len(metrics.busy_s)

    def row(name: str, of_rank: Sequence[float], together: float) -> list[str]:
        return [name, *(seconds(value) for value in of_rank[: len(ranks)]), seconds(together), percent(together, all_s)]

    made = table(title, ("cause", *ranks, "all ranks", "of all time"), [])
    for cause in shown:
        made.add_row(*row(cause, [rank[cause] for rank in metrics.bubbles], total[cause]))
    made.add_section()
    sums = [math.fsum(rank.values()) for rank in metrics.bubbles]
    made.add_row(*row("sum of causes", sums, math.fsum(total.values())))
    idle = [metrics.duration_s - busy for busy in metrics.busy_s]
    made.add_row(*row("step less busy time", idle, metrics.idle_s))
    to.print(made)


def memory(to: Console, report: MemoryReport) -> None:
    """What the fullest rank and the fullest host hold."""
    rank = max(range(len(report.ranks)), key=lambda r: report.rank_bytes[r])
    host = max(range(len(report.hosts)), key=lambda h: report.host_bytes[h])
    rows = []
    for place, items, capacity in (
        (f"rank {rank}", report.ranks[rank], report.rank_capacity_bytes),
        (f"host {host}", report.hosts[host], report.host_capacity_bytes),
    ):
        largest = sorted((item for item in items.items() if item[1]), key=lambda item: -item[1])[:4]
        parts = ", ".join(f"{name} {size(num_bytes)}" for name, num_bytes in largest)
        rows.append((place, parts, size(sum(items.values())), size(capacity)))
    to.print(table("Memory of the fullest rank and host", ("place", "mostly", "planned", "usable"), rows, left=2))


_TIMELINE_COLUMNS = 96
_TIMELINE_LABEL = 17


def timeline(program: Program, trace: Trace, window_s: tuple[float, float], console_width: int = 120) -> Text:
    """A window of time as characters: for each rank its compute lane and its optimizer, a column being a slice of it.

    Lines are no longer than the console, but have 60 characters at least.

    A column shows what filled most of it: ``F`` forward, ``r`` recompute, ``B`` backward, ``.`` nothing; optimizer
    steps (``=``) are short and show wherever there is one. Ops of all steps that lie in the window are shown.
    """
    begin, end = window_s
    width = min(_TIMELINE_COLUMNS, max(console_width, 60) - _TIMELINE_LABEL)
    slice_s = (end - begin) / width or 1.0
    rows: dict[tuple[int, bool], list[dict[str, float]]] = {}
    for row, i in enumerate(trace.op):
        kind = Kind(program.kind[i])
        letter = "=" if kind is Kind.STEP else LETTERS.get(kind)
        if letter:
            filled = rows.setdefault((program.rank[i], kind is Kind.STEP), [{} for _ in range(width)])
            _fill(filled, letter, (trace.start_s[row] - begin) / slice_s, (trace.end_s[row] - begin) / slice_s)
    lines = Text()
    for (rank, is_optimizer), filled in sorted(rows.items()):
        lines.append(f"rank {rank} {'optimizer' if is_optimizer else 'compute':<9} ")
        least = 0.0 if is_optimizer else 0.5
        for letter, group in groupby(_most(column, least) for column in filled):
            lines.append(letter * len(list(group)), style=STYLES.get(letter, "dim"))
        lines.append("\n")
    lines.append(f"{'':<{_TIMELINE_LABEL}}0{seconds(end - begin):>{width - 1}}\n")
    lines.append("F forward, r recompute, B backward, W weight gradient, = optimizer step, . idle")
    return lines


def _fill(filled: list[dict[str, float]], letter: str, begin: float, end: float) -> None:
    """Add what an op from ``begin`` to ``end`` (in columns) covers of every column."""
    for column in range(max(int(begin), 0), min(math.ceil(end), len(filled))):
        covered = min(end, column + 1) - max(begin, column)
        filled[column][letter] = filled[column].get(letter, 0.0) + covered


def _most(column: Mapping[str, float], least: float) -> str:
    return max(column, key=lambda letter: column[letter]) if math.fsum(column.values()) > least else "."


def metrics(to: Console, values: Mapping[str, float], title: str = "Predicted") -> None:
    """Metrics of a step by name."""
    to.print(table(title, ("metric", "value"), [(_title(key), _value(key, value)) for key, value in values.items()]))


def _title(key: str) -> str:
    for suffix, unit in (("_per_s", " / s"), ("_s", "")):
        if key.endswith(suffix):
            return key.removesuffix(suffix).replace("_", " ") + unit
    return key.replace("_", " ")


def _value(key: str, value: float) -> str:
    if key.endswith("_utilisation"):
        return percent(value, 1.0)
    if key.endswith("_s") and not key.endswith("_per_s"):
        return seconds(value)
    return count(value) if value >= 1000 else three(value)


def notes(to: Console, lines: Sequence[str], shown: int = 6) -> None:
    """What a prediction rests on."""
    for line in lines[:shown]:
        to.print(f"note: {line}")
    if len(lines) > shown:
        to.print(f"note: and {len(lines) - shown} more (--json lists all)")


# Runs


def error(predicted_s: float, measured_s: float) -> str:
    """How far a prediction is off, in per cent of what was measured."""
    return f"{100 * (predicted_s / measured_s - 1):+.1f} %"


def run(to: Console, summary: Mapping[str, Any], predicted_s: float | None) -> None:
    """What a run came to."""
    losses = ["not finite" if loss is None else f"{loss:.4f}" for loss in summary["losses"]]
    rows = [
        ("steps", str(summary["steps"])),
        ("loss", f"{losses[0]} -> {losses[-1]}"),
        ("step (median)", seconds(summary["median_step_s"])),
        ("tokens / s", count(summary["median_tokens_per_s"])),
    ]
    if predicted_s is not None:
        rows.append(("step (predicted)", f"{seconds(predicted_s)} ({error(predicted_s, summary['median_step_s'])})"))
    if summary["skipped_steps"]:
        rows.append(("skipped steps", ", ".join(map(str, summary["skipped_steps"]))))
    to.print(table("", ("run", "value"), rows))
