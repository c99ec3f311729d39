"""The command that draws figures from runs, plans and result files."""

import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spipe.cli.common import Force, HardwareOverride, new_file, progress, replacing, whole_number
from spipe.cli.inputs import expect, load_result, plan_of, timed_step, what_is
from spipe.errors import SpipeError
from spipe.timed import name_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Request:
    """What a figure is drawn from."""

    inputs: list[Path]
    step: int | None = None
    window_s: tuple[float, float] | None = None
    ranks: list[int] | None = None
    lanes: str = "all"
    hardware: str | None = None

    def one(self, kind: str) -> Path:
        if len(self.inputs) > 1:
            raise SpipeError(f"{kind} is drawn from one input, {len(self.inputs)} were given; give one")
        return self.inputs[0]


def _timeline(request: Request) -> "Figure":
    from spipe import plots

    timed = timed_step(request.one("timeline"), request.step, request.hardware)
    return plots.timeline(timed, window_s=request.window_s, ranks=request.ranks, lanes=request.lanes)


def _memory(request: Request) -> "Figure":
    from spipe import plots

    return plots.memory_over_time(timed_step(request.one("memory"), request.step, request.hardware))


def _idle(request: Request) -> "Figure":
    from spipe import plots

    results = {}
    for path in request.inputs:
        name = name_of(path)
        if name in results:
            raise SpipeError(f"two inputs are called {name}, by which the figure tells them apart; rename one")
        found = expect(path, ("simulate", "run", "plan", "search"), "idle")
        results[name] = load_result(path) if found == "simulate" else _idle_of(path, request)
    return plots.idle_time(results)


def _idle_of(path: Path, request: Request) -> dict[str, Any]:
    metrics = timed_step(path, request.step, request.hardware).metrics()
    return {
        "busy_s": metrics.busy_s,
        "bubbles": metrics.total(),
        "bubbles_by_rank": metrics.bubbles,
        "predicted": {"step_s": metrics.duration_s},
    }


def _errors(request: Request) -> "Figure":
    from spipe import plots, sim
    from spipe.cli.common import load_override
    from spipe.timed import TimedStep

    path = request.one("errors")
    expect(path, ("run",), "errors")
    measured = timed_step(path)
    assert measured.plan is not None
    simulation = sim.simulate(measured.plan, hardware=load_override(request.hardware))
    predicted = TimedStep.of("prediction", measured.plan, simulation.trace, simulation.last_step)
    return plots.op_errors(predicted, measured)


def _predicted(request: Request) -> "Figure":
    from spipe import plots

    path = request.one("predicted")
    expect(path, ("validate",), "predicted")
    return plots.predicted_against_measured(load_result(path)["rows"])


def _from_result(kind: str, made_by: str, draw: str) -> Callable[[Request], "Figure"]:
    def drawn(request: Request) -> "Figure":
        from spipe import plots

        path = request.one(kind)
        expect(path, (made_by,), kind)
        data = load_result(path)
        figure: Figure = getattr(plots, draw)(data["rows"] if made_by == "whatif" else data)
        return figure

    return drawn


def _step_of(path: Path) -> tuple[Any, float, float]:
    """Plan (None for a result of ``simulate``), step seconds and tokens per second of an input."""
    found = expect(path, ("simulate", "plan", "search", "run"), "this figure")
    if found == "simulate":
        predicted = load_result(path)["predicted"]
        return None, predicted["step_s"], predicted["tokens_per_s"]
    plan = plan_of(path)
    if found == "run":
        step_s = timed_step(path).metrics().duration_s
    else:
        from spipe import sim

        step_s = (plan.predicted or {}).get("step_s") or sim.simulate(plan).step_s
    return plan, step_s, plan.tokens_per_step / step_s


def _scaling(request: Request) -> "Figure":
    from spipe import plots

    series: dict[str, list[tuple[int, float]]] = {}
    for path in request.inputs:
        found = expect(path, ("plan", "search", "run"), "scaling")
        plan, _, tokens_per_s = _step_of(path)
        name = f"{plan.model.name}, {plan.schedule}, {plan.hardware.accelerator.name}"
        name += ", measured" if found == "run" else ""
        series.setdefault(name, []).append((len(plan.layout.layout().ranks_used), tokens_per_s))
    return plots.scaling(series)


def _ablation(request: Request) -> "Figure":
    from spipe import plots

    return plots.ablation([(name_of(path), _step_of(path)[1]) for path in request.inputs])


KINDS: dict[str, tuple[str, Callable[[Request], "Figure"]]] = {
    "timeline": ("RUNDIR or PLAN: every lane of every rank over one step, and why compute is idle", _timeline),
    "idle": ("RUNDIRs, PLANs or results of simulate: idle time by cause; of one, rank by rank", _idle),
    "memory": ("RUNDIR or PLAN: memory in use over one step, item by item, below its limits", _memory),
    "errors": ("RUNDIR: predicted against measured ops, and the error by kind", _errors),
    "predicted": ("result of validate: predicted against measured steps", _predicted),
    "front": ("result of search: step time against memory", _from_result("front", "search", "search_front")),
    "whatif": ("result of whatif: speed and rent of machines", _from_result("whatif", "whatif", "what_if")),
    "scaling": ("PLANs or results of search on more and more accelerators", _scaling),
    "ablation": ("RUNDIRs, PLANs or results of simulate, in the order in which features are added", _ablation),
    "residuals": (
        "result of calibrate: spread around fitted values",
        _from_result("residuals", "calibrate", "residuals"),
    ),
    "adam": ("result of scripts/bench_adam.py --json", _from_result("adam", "adam", "adam_roofline")),
}
_USUAL = {
    "run": "timeline",
    "trace": "timeline",
    "plan": "timeline",
    "validate": "predicted",
    "simulate": "idle",
    "search": "front",
    "whatif": "whatif",
    "calibrate": "residuals",
    "adam": "adam",
}
_HELP = "\n".join(
    textwrap.fill(words, 76, initial_indent=f"  {name:<10} ", subsequent_indent=" " * 13)
    for name, (words, _) in KINDS.items()
)


def kind_names(incomplete: str) -> list[str]:
    """As the shell completes them."""
    return [kind for kind in KINDS if kind.startswith(incomplete)]


def plot(
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="[KIND] INPUT...", autocompletion=kind_names, help="What to draw (see below), and from what."
        ),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FIGURE", help="A .png, .svg or .pdf.")],
    step: Annotated[
        int | None, typer.Option(parser=whole_number(0), metavar="N", help="Step of the trace; default: a typical one.")
    ] = None,
    window: Annotated[
        str | None, typer.Option(metavar="A:B", help="timeline: only from A to B, in ms from the step's start.")
    ] = None,
    ranks: Annotated[str | None, typer.Option(metavar="R,R,...", help="timeline: only these ranks.")] = None,
    lanes: Annotated[str, typer.Option(metavar="all|compute", help="timeline: all lanes, or one row a rank.")] = "all",
    hardware: HardwareOverride = None,
    force: Force = False,
) -> None:
    # The help text lists the kinds, so that it is put together below.
    from spipe.plots.style import check_figure

    check_figure(output)
    kind, paths = inputs[0], [Path(text) for text in inputs]
    if kind in KINDS and (len(paths) > 1 or not paths[0].exists()):
        paths = paths[1:]
        if not paths:
            raise SpipeError(f"plot {kind}: nothing to draw from; give {KINDS[kind][0].partition(':')[0]}")
    elif "." not in kind and "/" not in kind and not paths[0].exists():
        from spipe.errors import unknown

        raise unknown("kind of figure, and no file or folder,", kind, KINDS)
    else:
        found = what_is(paths[0])
        if found not in _USUAL:
            raise SpipeError(
                f"{paths[0]}: no figure is made from this kind of file alone; `spipe plot --help` lists all"
            )
        kind = _USUAL[found]
    if lanes not in ("all", "compute"):
        raise SpipeError(f"--lanes {lanes!r} should be all or compute")
    _require_used(
        kind, step=step, window=window, ranks=ranks, lanes=None if lanes == "all" else lanes, hardware=hardware
    )
    chosen = Request(paths, step, _window(window), _ranks(ranks), lanes, hardware)
    new_file(output, force)
    try:
        figure = KINDS[kind][1](chosen)
    except (KeyError, TypeError, ZeroDivisionError) as error:
        if kind in ("timeline", "memory", "errors"):
            raise  # these files were checked when they were read: a fault of ours
        raise SpipeError(
            f"{', '.join(map(str, paths))}: a result with missing or wrong fields ({type(error).__name__}: {error}); "
            "make it again with this version"
        ) from None
    from spipe import plots

    with replacing(output) as new:
        plots.save(figure, new)
    progress(f"wrote {output}")


plot.__doc__ = f"""Draw a figure: of a run or a plan, or from what --json of a command wrote.

Without KIND, the usual figure of the input is drawn.

\b
Kinds:
{_HELP}

\b
Examples:
  spipe plot run -o timeline.svg
  spipe plot timeline plan.json --lanes compute -o step.png
  spipe plot timeline run --window 0:50 --ranks 0,1 -o start.png
  spipe plot memory plan.json -o memory.pdf
  spipe plot idle run plan.json -o idle.svg
  spipe plot errors run --hardware hardware.toml -o errors.png
  spipe plot validation.json -o validation.png
"""


_USED_BY = {
    "step": ("timeline", "memory", "idle"),
    "window": ("timeline",),
    "ranks": ("timeline",),
    "lanes": ("timeline",),
    "hardware": ("timeline", "memory", "idle", "errors"),
}


def _require_used(kind: str, **options: object) -> None:
    """Raises SpipeError for an option that this kind of figure would ignore."""
    for name, value in options.items():
        if value is not None and kind not in _USED_BY[name]:
            raise SpipeError(f"--{name} is for {', '.join(_USED_BY[name])}; {kind} does not use it: leave it out")


def _window(text: str | None) -> tuple[float, float] | None:
    if text is None:
        return None
    low, _, high = text.partition(":")
    try:
        return float(low) / 1e3, float(high) / 1e3
    except ValueError:
        raise SpipeError(f"--window {text!r} should be A:B in milliseconds, for example 0:50") from None


def _ranks(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise SpipeError(f"--ranks {text!r} should be numbers, for example 0,1") from None


COMMANDS = (plot,)
