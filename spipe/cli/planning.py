"""Commands that need no device: search a plan, simulate one."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spipe.cli.common import (
    Count,
    Force,
    HardwareOverride,
    JsonFile,
    Output,
    PlanFile,
    load_override,
    load_plan,
    parse_options,
    positive,
    processes,
    progress,
    replacing,
    whole_number,
)
from spipe.cli.names import OnlySchedules, hardware_names, model_names
from spipe.errors import SpipeError, unknown

if TYPE_CHECKING:
    from rich.console import Console

    from spipe.sim import SearchResult, Simulation
    from spipe.sim.interval import Interval
    from spipe.sim.search import Progress
    from spipe.sim.zero3 import Zero3


def search(
    model: Annotated[
        str,
        typer.Option(
            "--model", metavar="M", autocompletion=model_names, help="Name, config.json, its folder, or .toml file."
        ),
    ],
    hardware: Annotated[
        str, typer.Option("--hardware", metavar="H", autocompletion=hardware_names, help="Name or .toml file.")
    ],
    global_batch: Annotated[
        int, typer.Option("--global-batch", parser=Count, metavar="N", help="Sequences per training step.")
    ],
    sequence: Annotated[
        int, typer.Option("--sequence", "--seq", parser=Count, metavar="N", help="Tokens per sequence.")
    ],
    plan: Annotated[Path | None, typer.Option("-o", "--output", metavar="PLAN", help="Write the plan here.")] = None,
    schedule: OnlySchedules = None,
    ranks: Annotated[int | None, typer.Option(parser=Count, metavar="N", help="Use exactly so many ranks.")] = None,
    forward_stages: Annotated[
        int | None, typer.Option(parser=Count, metavar="N", help="Forward stages per rank.")
    ] = None,
    backward_stages: Annotated[
        int | None, typer.Option(parser=Count, metavar="N", help="Backward stages per rank.")
    ] = None,
    microbatch_size: Annotated[
        int | None, typer.Option(parser=Count, metavar="N", help="Sequences per microbatch.")
    ] = None,
    compute_threads: Annotated[
        list[int] | None,
        typer.Option(parser=Count, metavar="N", help="Device cpu: threads of a rank's compute; repeat to choose."),
    ] = None,
    precision: Annotated[str | None, typer.Option(help="fp32, bf16 or fp16; default by hardware.")] = None,
    gradient_precision: Annotated[
        str | None, typer.Option(help="In which gradients add up; default: as above.")
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Fix an option of the plan; may be repeated.")
    ] = None,
    seed: Annotated[int, typer.Option(parser=whole_number(0), metavar="N", help="Seed of weights and data order.")] = 0,
    learning_rate: Annotated[float | None, typer.Option(help="Of AdamW.")] = None,
    objective: Annotated[
        str, typer.Option(metavar="NAME", help="What is best: time, dollars, memory, sequence or layers.")
    ] = "time",
    min_speed: Annotated[
        float | None, typer.Option(parser=positive, metavar="N", help="Tokens per second to reach at least.")
    ] = None,
    max_gpu_memory: Annotated[
        float | None, typer.Option(parser=positive, metavar="GIB", help="Use no more of each accelerator.")
    ] = None,
    max_host_memory: Annotated[
        float | None, typer.Option(parser=positive, metavar="GIB", help="Use no more of each host.")
    ] = None,
    max_dollars: Annotated[
        float | None, typer.Option(parser=positive, metavar="N", help="Dollars per hour, by the hardware's prices.")
    ] = None,
    full_forward: Annotated[
        bool, typer.Option("--full-forward", help="Forward also covers what the top stage recomputes (published).")
    ] = False,
    cross_mapping: Annotated[
        bool, typer.Option("--cross-mapping", help="Several hosts: both ends of the pipeline share a host (published).")
    ] = False,
    cuts: Annotated[
        str, typer.Option(metavar="HOW", help="Stages: improve, balanced, or all ways to cut.")
    ] = "improve",
    split_blocks: Annotated[
        bool, typer.Option("--split-blocks", help="Cut inside blocks, too: between attention and feed-forward.")
    ] = False,
    contention: Annotated[
        bool, typer.Option("--contention/--no-contention", help="Whether transfers and CPU work share what they use.")
    ] = True,
    max_simulations: Annotated[
        int, typer.Option(parser=Count, metavar="N", help="Candidates that the engine judges.")
    ] = 48,
    effort: Annotated[
        float, typer.Option(parser=positive, metavar="X", help="Candidates looked at, against the usual number.")
    ] = 1.0,
    workers: Annotated[
        int, typer.Option(parser=whole_number(0), metavar="N", help="Processes; 0 for all cores. Same plan for any.")
    ] = 0,
    mpi: Annotated[
        bool,
        typer.Option("--mpi", help="Work in MPI processes; `python -m mpi4py.futures -m spipe` does, too."),
    ] = False,
    json_file: JsonFile = None,
    force: Force = False,
) -> None:
    """Search the best plan that fits, and say how far it is from what the hardware can do at most.

    Ctrl-C ends the search with the best plan found so far.

    \b
    Examples:
      spipe search --model tiny --hardware laptop --global-batch 16 --sequence 128 -o plan.json
      spipe search --model 10b --hardware v100x4 --global-batch 16 --sequence 1024 --schedule spipe --schedule mobius
      spipe search --model llama3-8b --hardware rtx4090x8 --global-batch 64 --sequence 4096 \\
          --microbatch-size 1 --option stage_input_route=host --json -
      mpirun -n 9 python -m mpi4py.futures -m spipe search ...    one process decides, eight work; same plan
      spipe search --model llama2-7b --hardware rtx4090-cluster --global-batch 64 --sequence 2048 --objective dollars
    """
    from spipe.hardware import load_hardware
    from spipe.model import load_model
    from spipe.options import Options
    from spipe.plan import ELEMENT_BYTES, AdamW
    from spipe.schedules import get_schedule

    output = Output(json_file, force, (plan,))
    for name in schedule or ():
        get_schedule(name)
    for what, given in (("precision", precision), ("gradient precision", gradient_precision)):
        if given is not None and given not in ELEMENT_BYTES:
            raise unknown(what, given, ELEMENT_BYTES)
    options = parse_options(option or [])
    Options(**options)
    fields: dict[str, Any] = {} if learning_rate is None else {"optimizer": AdamW(learning_rate=learning_rate)}
    if gradient_precision is not None:
        fields["gradient_precision"] = gradient_precision
    chosen_model, chosen_hardware = load_model(model), load_hardware(hardware)
    if split_blocks:
        chosen_model = chosen_model.replace(split_blocks=True)

    from spipe import sim

    with processes(workers, mpi) as executor:
        result = sim.search_for(
            objective,
            chosen_model,
            chosen_hardware,
            min_tokens_per_s=min_speed,
            max_dollars_per_hour=max_dollars,
            global_batch=global_batch,
            sequence=sequence,
            schedules=schedule or None,
            num_ranks=ranks,
            forward_stages=forward_stages,
            backward_stages=backward_stages,
            microbatch_size=microbatch_size,
            compute_threads=compute_threads or 1,
            precision=precision,
            cuts=cuts,
            contention=contention,
            executor=executor,
            progress=search_progress(),
            max_simulations=max_simulations,
            effort=effort,
            full_forward=full_forward,
            cross_mapping=cross_mapping,
            max_rank_bytes=max_gpu_memory and max_gpu_memory * 2**30,
            max_host_bytes=max_host_memory and max_host_memory * 2**30,
            options=options,
            seed=seed,
            **fields,
        )
    if plan is not None:
        with replacing(plan) as new:
            result.plan.save(new)
        progress(f"wrote {plan}")
    costs = sim.dollars(result) if objective == "dollars" or max_dollars is not None else {}
    output.show({**search_data(result), **costs}, lambda console: show_search(console, result, costs))


def search_progress() -> "Progress":
    """Reports a search on stderr: on a terminal in one line that changes, elsewhere not at all."""
    import sys

    def report(done: int, total: int, best_s: float | None) -> None:
        total = max(total, done)
        if sys.stderr.isatty():
            best = "" if best_s is None else f", best {best_s:.4g} s"
            end = "\n" if done == total else ""
            print(f"\r{done} of {total} candidates{best}   ", end=end, file=sys.stderr, flush=True)

    return report


def search_data(result: "SearchResult") -> dict[str, Any]:
    """What ``--json`` holds of a search."""
    return {
        "plan": result.plan.model_dump(mode="json"),
        **simulation_data(result.simulation),
        "lower_bound_s": result.lower_bound_s,
        "limit": result.limit,
        "gap": result.gap,
        "interval_s": result.interval_s,
        "counts": result.counts,
        "candidates": result.candidates,
        "front": result.front,
        "rejected": result.rejected,
        "notes": list(result.notes),
    }


def show_search(console: "Console", result: "SearchResult", costs: Mapping[str, Any]) -> None:
    """A search as tables; ``costs`` as from ``spipe.sim.dollars``, if they were asked about."""
    from spipe import show

    show.candidates(console, result.candidates)
    if result.rejected:
        console.print(f"{len(result.rejected)} more do not fit or cannot be laid out (--json lists them)\n")
    console.print(show.plan_words(result.plan), soft_wrap=True)
    show.metrics(console, result.simulation.predicted())
    if costs:
        console.print(
            f"dollars: {costs['dollars_per_hour']:.2f} an hour for {costs['hosts']} host(s), "
            f"{costs['dollars_per_billion_tokens']:,.2f} for 1e9 tokens ({costs['priced_by']})",
            soft_wrap=True,
        )
    console.print(certificate(result), soft_wrap=True)
    show.bubbles(console, result.simulation.bubbles)
    show.memory(console, result.simulation.memory)
    show.notes(console, result.notes)


def certificate(result: "SearchResult") -> str:
    """How good the plan is, in words."""
    from spipe import show

    counts = result.counts
    spread = ""
    if result.interval_s is not None:
        low, high = result.interval_s
        spread = f"90 % interval of the step: {show.seconds(low)} to {show.seconds(high)}\n"
    bound = f"no plan of this search has a step shorter than {show.seconds(result.lower_bound_s)} ({result.limit})"
    if result.gap <= 1:
        proof = f"within {100 * result.gap:.1f} % of what this hardware can do: {bound}"
    else:
        proof = f"no proof that it is good: its step is {1 + result.gap:.1f} times a loose bound, {bound}"
    return spread + (
        f"{proof}\n"
        f"{counts['enumerated']} candidates, {counts['discarded']} discarded by their bounds; {counts['ranked']} plans "
        f"and cuts ranked by replay, {counts['simulated']} simulated\n"
    )


def simulate(
    plan: PlanFile,
    hardware: HardwareOverride = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", metavar="T", help="Write the simulated steps for Perfetto.")
    ] = None,
    steps: Annotated[
        int, typer.Option("--steps", parser=Count, metavar="N", help="Steps in a row; the last one counts.")
    ] = 3,
    contention: Annotated[
        bool, typer.Option("--contention/--no-contention", help="Whether transfers and CPU work share what they use.")
    ] = True,
    zero3: Annotated[
        bool, typer.Option("--zero3", help="The same job with DeepSpeed's ZeRO-3 and CPU offload, for comparison.")
    ] = False,
    with_interval: Annotated[
        bool, typer.Option("--interval", help="Also how surely the step time is known, and what makes it unsure.")
    ] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Say what limits the plan, and what one better part would buy.")
    ] = False,
    json_file: JsonFile = None,
    force: Force = False,
) -> None:
    """Simulate a plan: step time, idle time by cause, memory.

    \b
    Examples:
      spipe simulate plan.json
      spipe simulate plan.json --trace trace.json       open it at ui.perfetto.dev
      spipe simulate plan.json --hardware hardware.toml
      spipe simulate plan.json --explain
      spipe simulate plan.json --hardware calibrated.toml --interval
      spipe simulate plan.json --zero3 --json zero3.json
    """
    output = Output(json_file, force, (trace,))
    chosen = load_plan(plan)
    override = load_override(hardware)
    if zero3:
        if trace is not None or explain or with_interval:
            raise SpipeError(
                "--zero3 simulates another system than the plan's: it goes without --trace, --interval and --explain"
            )
        from spipe.model import ModelSpec
        from spipe.sim.zero3 import ranks_only
        from spipe.sim.zero3 import zero3 as simulate_zero3

        if not isinstance(chosen.model, ModelSpec):
            raise SpipeError(f"--zero3 knows built-in layers; {chosen.model.name} is a list of layers: leave it out")
        step = simulate_zero3(
            chosen.model,
            ranks_only(override or chosen.hardware, chosen.layout.num_ranks),
            global_batch=chosen.global_batch,
            microbatch_size=chosen.microbatch_size,
            sequence=chosen.sequence,
            precision=chosen.precision,
        )
        output.show(step.to_json(), lambda console: show_zero3(console, step))
        return

    from spipe import sim

    simulation = sim.simulate(chosen, hardware=override, num_steps=steps, contention=contention)
    if trace is not None:
        with replacing(trace) as new:
            simulation.trace.save(new)
        progress(f"wrote {trace}")
    data, lines = simulation_data(simulation), list[str]()
    if with_interval:
        from spipe.sim.interval import interval

        found = interval(simulation)
        data["interval"] = None if found is None else asdict(found)
        lines += ["", *interval_words(found)]
    if explain:
        from spipe.sim.explain import explain as explained

        why = explained(simulation)
        data["explanation"] = why.to_json()
        lines += ["", *why.words()]

    def render(console: "Console") -> None:
        show_simulation(console, simulation)
        for line in lines:
            console.print(line, soft_wrap=True)

    output.show(data, render)


def interval_words(found: "Interval | None") -> list[str]:
    """An interval in words, with the three things that make it wide."""
    from spipe import show

    if found is None:
        return ["no interval: this hardware does not say how surely it was measured (`spipe profile` and calibrate do)"]
    low, high = (show.seconds(value) for value in found.seconds)
    parts = ", ".join(f"{name} ({100 * share:.2g} %)" for name, share in list(found.parts.items())[:3])
    return [f"{100 * found.level:.0f} % interval of the step: {low} to {high}", f"what makes it unsure: {parts}"]


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
    window_s = simulation.bubbles.window_s
    console.print(show.timeline(simulation.program, simulation.trace, window_s, console.width), soft_wrap=True)
    console.print()
    show.metrics(console, simulation.predicted())
    show.bubbles(console, simulation.bubbles)
    show.memory(console, simulation.memory)
    for problem in simulation.memory.problems:
        console.print(f"does not fit: {problem}", soft_wrap=True)
    show.notes(console, simulation.notes)


def show_zero3(console: "Console", step: "Zero3") -> None:
    """A ZeRO-3 step: times, idle time by cause, memory."""
    result = step.to_json()
    whole = sum(result["busy_s"]) + result["idle_s"]
    console.print(f"ZeRO-3 with parameters and optimizer in CPU memory, {step.num_ranks} ranks of {result['hardware']}")
    console.print(f"step {step.makespan_s:.4g} s, {result['predicted']['tokens_per_s']:.4g} tokens/s")
    shares = [f"{100 * seconds / whole:.1f} % {cause}" for cause, seconds in result["bubbles"].items() if seconds > 0]
    console.print(f"compute lanes: {100 * sum(result['busy_s']) / whole:.1f} % busy, idle: {', '.join(shares)}")
    console.print(f"host memory: {step.host_bytes / 1e9:.1f} GB a host")
    for problem in step.problems:
        console.print(f"does not fit: {problem}", soft_wrap=True)
    from spipe import show

    show.notes(console, step.notes)


COMMANDS = (search, simulate)
