"""Commands that need no device: search a plan, simulate one."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spipe.cli.common import (
    Force,
    HardwareOverride,
    JsonFile,
    Output,
    PlanFile,
    load_override,
    load_plan,
    new_file,
    parse_options,
    progress,
)
from spipe.errors import unknown

if TYPE_CHECKING:
    from rich.console import Console

    from spipe.sim import Simulation


def simulate(
    plan: PlanFile,
    hardware: HardwareOverride = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", metavar="T", help="Write the simulated steps for Perfetto.")
    ] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps in a row; the last one counts.")] = 3,
    contention: Annotated[
        bool, typer.Option("--contention/--no-contention", help="Whether transfers and CPU work share what they use.")
    ] = True,
    json_file: JsonFile = None,
    force: Force = False,
) -> None:
    """Simulate a plan: step time, idle time by cause, memory.

    \b
    Examples:
      spipe simulate plan.json
      spipe simulate plan.json --trace trace.json       open it at ui.perfetto.dev
      spipe simulate plan.json --hardware hardware.toml
    """
    output = Output(json_file, force)
    new_file(trace, force)
    chosen = load_plan(plan)
    override = load_override(hardware)

    from spipe import sim

    simulation = sim.simulate(chosen, hardware=override, num_steps=steps, contention=contention)
    if trace is not None:
        simulation.trace.save(trace)
        progress(f"wrote {trace}")
    output.show(simulation_data(simulation), lambda console: show_simulation(console, simulation))


def simulation_data(simulation: "Simulation") -> dict[str, Any]:
    """What ``--json`` holds of a simulation."""
    bubbles, memory = simulation.bubbles, simulation.memory
    return {
        "hardware": simulation.hardware.name,
        "predicted": simulation.predicted(),
        "bubbles": bubbles.total(),
        "bubbles_by_rank": list(bubbles.bubbles),
        "idle_s": bubbles.idle_s,
        "busy_s": list(bubbles.busy_s),
        "memory": {"ranks": list(memory.ranks), "hosts": list(memory.hosts), "problems": list(memory.problems)},
        "notes": list(simulation.notes),
    }


def show_simulation(console: "Console", simulation: "Simulation") -> None:
    """A simulation as tables."""
    from spipe import show

    console.print(show.plan_words(simulation.plan), soft_wrap=True)
    console.print(f"simulated on {simulation.hardware.name}\n")
    console.print(show.timeline(simulation.program, simulation.trace, simulation.bubbles.window_s), soft_wrap=True)
    console.print()
    show.metrics(console, simulation.predicted())
    show.bubbles(console, simulation.bubbles)
    show.memory(console, simulation.memory)
    for problem in simulation.memory.problems:
        console.print(f"does not fit: {problem}", soft_wrap=True)
    show.notes(console, simulation.notes)


COMMANDS = (simulate,)
