"""The demo: search, train, calibrate, predict other plans, run them, and hold the runs against the predictions.

Runs on two CPU ranks, one thread each. A prediction holds for the machine as it was calibrated, and machines (virtual
ones above all) change their speed within seconds. So the experiment is made in several rounds, each of which calibrates
on one run, writes down what it predicts for the other plans, and then runs those; medians over the rounds count.
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from spipe.cli.common import step_log
from spipe.errors import SpipeError
from spipe.trace import WARM_UP_STEPS

if TYPE_CHECKING:
    from rich.console import Console

    from spipe.hardware import HardwareSpec
    from spipe.plan import Plan
    from spipe.sim import Calibration, Simulation

MODEL, HARDWARE, NUM_RANKS, SEQUENCE = "tiny", "laptop", 2, 128
GLOBAL_BATCH = 16
TRAINING_STEPS = 80
TRACE_STEPS = 60
"""The last of the training steps, which the trace holds."""
ROUNDS, CALIBRATING_STEPS, JUDGED_STEPS = 3, 20, 10
"""A round runs the calibrating plan and each judged plan for so many steps; all but the first three of a run count."""
UNDISTURBED = 0.85
"""Least share of the processor that compute ops of a run on an idle machine have."""
LEARNING_RATE = 2e-3
# Plans to judge: name -> (schedule, forward and backward stages per rank, sequences per microbatch, microbatches, and
# what embedding and head count in blocks, which moves the cuts). The one with the searched plan's schedule is left
# out, so the others differ from it in schedule, cuts and number of microbatches.
OTHERS: dict[str, tuple[str, int, int, int, int, tuple[float, float]]] = {
    "spipe-1-3": ("spipe", 1, 3, 2, 6, (0.0, 0.5)),
    "mobius-2-2": ("mobius", 2, 2, 4, 8, (0.0, 0.5)),
    "1f1b-uneven": ("1f1b", 1, 1, 4, 6, (0.0, 2.0)),
    "gpipe-uneven": ("gpipe", 1, 1, 2, 10, (2.0, 0.0)),
}

Say = Callable[[str], None]


@dataclass(frozen=True)
class Judged:
    """One of the other plans: what was predicted for its step, and what it took (seconds; medians over all rounds)."""

    plan: str
    predicted_before_s: float
    predicted_after_s: float
    measured_s: float
    processor_share: float


def new_folder(given: Path | None) -> Path:
    """The folder of this demo, which must not exist; by default the first free one of demo-1, demo-2, ..."""
    if given is None:
        number = 1
        while Path(f"demo-{number}").exists():
            number += 1
        given = Path(f"demo-{number}")
    try:
        given.mkdir(parents=True)
    except FileExistsError:
        raise SpipeError(f"{given} exists; every demo makes a folder of its own: give another name") from None
    except OSError as error:
        raise SpipeError(f"{given}: cannot make the folder ({error.strerror})") from None
    return given


def run(folder: Path | None, to: "Console", say: Say) -> dict[str, Any]:
    """Run the demo.

    Args:
        folder: a new folder for everything it makes; None for demo-<number>.
        to: where the story and its tables go.
        say: for progress.

    Returns:
        What ``--json`` holds: first and last loss, idle time by cause of a simulated step, and the judged plans.
    """
    from spipe import show_measured
    from spipe.hardware import load_hardware

    begin = time.monotonic()
    folder = new_folder(folder)
    hardware = load_hardware(HARDWARE).override({"cpu.cores": usable_cores()})
    with _ranks() as processes:
        simulation = search(hardware, folder, to)
        losses, measured_s = train(simulation, folder, processes, to, say)
        _head(to, "3", "Calibrate the hardware description with that run")
        calibration = calibrate(simulation.plan, hardware, folder / "run")
        calibration.hardware.save(folder / "hardware.toml")
        show_measured.calibration(to, calibration.to_json())
        judged = judge(simulation.plan, hardware, folder, processes, to, say)
    result = {
        "folder": str(folder),
        "loss_first": losses[0],
        "loss_last": losses[-1],
        "bubbles": simulation.bubbles.total(),
        "idle_s": simulation.bubbles.idle_s,
        "predicted_before_s": simulation.step_s,
        "predicted_after_s": calibration.runs[0]["predicted_s"],
        "measured_s": measured_s,
        "judged": [asdict(each) for each in judged],
        "elapsed_s": time.monotonic() - begin,
    }
    (folder / "demo.json").write_text(json.dumps(result, indent=1) + "\n")
    to.print(f"\nEverything is in {folder}/; traces open at ui.perfetto.dev. {result['elapsed_s']:.0f} s in all.")
    to.print(f"To look at the training run: spipe report {folder}/run -o report.html", soft_wrap=True)
    return result


def usable_cores() -> int:
    """Cores that this process may use: the one fact about the machine that needs no measurement."""
    from spipe import _native

    return int(_native.features()["usable_cores"])


def search(hardware: "HardwareSpec", folder: Path, to: "Console") -> "Simulation":
    """Find a plan and show what its simulation says."""
    from spipe import show, sim
    from spipe.model import load_model
    from spipe.plan import AdamW

    _head(to, "1", f"Search a plan for {MODEL} on {NUM_RANKS} ranks of {HARDWARE} with {hardware.cpu.cores} cores")
    found = sim.search(
        load_model(MODEL),
        hardware,
        global_batch=GLOBAL_BATCH,
        sequence=SEQUENCE,
        num_ranks=NUM_RANKS,
        optimizer=AdamW(learning_rate=LEARNING_RATE),
    )
    found.plan.save(folder / "plan.json")
    simulation = found.simulation
    simulation.trace.save(folder / "simulated.json")
    to.print(f"{len(found.candidates)} plans simulated; the fastest:\n")
    to.print(show.plan_words(found.plan), soft_wrap=True)
    to.print("\nA simulated step:\n")
    window_s = simulation.bubbles.window_s
    to.print(show.timeline(simulation.program, simulation.trace, window_s, to.width), soft_wrap=True)
    to.print()
    show.bubbles(to, simulation.bubbles)
    return simulation


def train(simulation: "Simulation", folder: Path, processes: Any, to: "Console", say: Say) -> tuple[list[float], float]:
    """Train the plan; its losses and the median of its step times (seconds)."""
    from spipe import show

    _head(to, "2", f"Train it for {TRAINING_STEPS} steps on the text of Python's documentation")
    done = _train(simulation.plan, folder / "run", TRAINING_STEPS, TRACE_STEPS, processes, say)
    losses = [loss for loss in done.losses if loss is not None]
    to.print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, {show.count(done.tokens_per_s)} tokens / s")
    to.print(
        f"step: predicted {show.seconds(simulation.step_s)} from assumed numbers, measured "
        f"{show.seconds(done.median_step_s)}, the median of all steps after warm-up "
        f"({show.error(simulation.step_s, done.median_step_s)})",
        soft_wrap=True,
    )
    warn_if_busy(processor_share(folder / "run"), to)
    return losses, done.median_step_s


def calibrate(plan: "Plan", hardware: "HardwareSpec", run: Path) -> "Calibration":
    """Improve the hardware description with one run of a plan."""
    from spipe import sim
    from spipe.trace import Trace

    return sim.calibrate([(plan, Trace.load(run / "trace.json"))], hardware)


def judge(
    plan: "Plan", hardware: "HardwareSpec", folder: Path, processes: Any, to: "Console", say: Say
) -> list[Judged]:
    """In every round: calibrate on one run of ``plan``, predict other plans, write that down, then run them."""
    from spipe import show, show_measured

    plans = other_plans(hardware, plan.schedule)
    _head(to, "4", f"Calibrate again, predict {len(plans)} other plans, then run them: {ROUNDS} rounds")
    for name, other in plans.items():
        other.save(folder / f"{name}.json")
        to.print(show.plan_words(other), soft_wrap=True)
        to.print()
    before = {name: _predict(other, hardware) for name, other in plans.items()}
    after: dict[str, list[float]] = {name: [] for name in plans}
    times: dict[str, list[float]] = {name: [] for name in plans}
    shares: dict[str, list[float]] = {name: [] for name in plans}
    for number in range(1, ROUNDS + 1):
        say(f"round {number} of {ROUNDS}: the calibrating plan")
        run = folder / f"run-calibrating-{number}"
        _train(plan, run, CALIBRATING_STEPS, CALIBRATING_STEPS, processes, say)
        calibrated = calibrate(plan, hardware, run).hardware
        for name, other in plans.items():
            after[name].append(_predict(other, calibrated))
        rows = {name: {"predicted_before_s": before[name], "predicted_after_s": after[name][-1]} for name in plans}
        (folder / f"predictions-{number}.json").write_text(json.dumps(rows, indent=1) + "\n")
        for name, other in plans.items():
            say(f"round {number} of {ROUNDS}: {name}")
            run = folder / f"run-{name}-{number}"
            done = _train(other, run, JUDGED_STEPS, JUDGED_STEPS, processes, say)
            times[name].extend(done.step_s[WARM_UP_STEPS:])
            shares[name].append(processor_share(run))
    judged = [
        Judged(name, before[name], median(after[name]), median(times[name]), median(shares[name])) for name in plans
    ]
    show_measured.judged(to, [asdict(each) for each in judged])
    warn_if_busy(min(each.processor_share for each in judged), to)
    return judged


def other_plans(hardware: "HardwareSpec", schedule: str) -> "dict[str, Plan]":
    """The plans to be judged, by name: those of other schedules than ``schedule``."""
    from spipe.model import load_model
    from spipe.plan import AdamW, make_plan

    model = load_model(MODEL)
    return {
        name: make_plan(
            model,
            hardware,
            schedule=other,
            num_ranks=NUM_RANKS,
            forward_stages=forward,
            backward_stages=backward,
            microbatch_size=size,
            global_batch=size * microbatches,
            sequence=SEQUENCE,
            precision="fp32",
            layer_costs=[embedding, *[1.0] * model.num_layers, head],
            optimizer=AdamW(learning_rate=LEARNING_RATE),
        )
        for name, (other, forward, backward, size, microbatches, (embedding, head)) in OTHERS.items()
        if other != schedule
    }


def warn_if_busy(share: float, to: "Console") -> None:
    """Say so if other programs kept the processor from our compute ops: a prediction is for a machine to itself."""
    if share < UNDISTURBED:
        to.print(
            f"note: compute ops had the processor for only {share:.0%} of their time; something else uses it, "
            "which no prediction knows of. Try again on an idle machine.",
            soft_wrap=True,
        )


def processor_share(run: Path) -> float:
    """Processor time of a run's compute ops over their duration; below 1 where other threads had their core."""
    from spipe.plan import Plan
    from spipe.sim import stability
    from spipe.trace import Trace

    share = stability.processor_share(Plan.load(run / "plan.json").program(), Trace.load(run / "trace.json"))
    return 1.0 if share is None else share


def _predict(plan: "Plan", hardware: "HardwareSpec") -> float:
    from spipe import sim

    return sim.simulate(plan, hardware=hardware).step_s


def _train(plan: "Plan", output: Path, steps: int, trace_steps: int, processes: Any, say: Say) -> Any:
    from spipe import runtime

    return runtime.run(
        plan, steps=steps, output=output, trace_steps=trace_steps, ranks=processes, log=step_log(steps, say)
    )


@contextmanager
def _ranks() -> Iterator[Any]:
    """Rank processes, started once for all runs."""
    from spipe import runtime

    with runtime.RankProcesses(NUM_RANKS) as processes:
        yield processes


def _head(to: "Console", number: str, title: str) -> None:
    to.print(f"\n{number}. {title}\n", style="bold")
