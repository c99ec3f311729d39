"""The demo: search, train, calibrate, predict other plans, run them, and hold the runs against the predictions.

Runs on two CPU ranks, one thread each. Predictions of the plans to be judged are on disk before those plans run. A
prediction holds for the machine as it was calibrated, and machines (virtual ones above all) change their speed within
seconds: so every plan is measured in several rounds, and the calibrating plan runs along in each. If that plan itself
has become faster or slower, the machine is calibrated anew and the other plans are predicted and measured again.
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
from spipe.ops import COMPUTE
from spipe.trace import WARM_UP_STEPS

if TYPE_CHECKING:
    from rich.console import Console

    from spipe.hardware import HardwareSpec
    from spipe.plan import Plan
    from spipe.sim import Simulation

MODEL, HARDWARE, NUM_RANKS, SEQUENCE = "tiny", "laptop", 2, 128
GLOBAL_BATCH = 16
TRAINING_STEPS = 80
CALIBRATING_STEPS = 60
"""The last of the training steps, which go into the trace that the machine is calibrated with."""
ROUNDS, ROUND_STEPS = 3, 10
"""Every judged plan runs so often, for so many steps; all but the first three of a round count."""
STEADY = 0.1
"""So far may the calibrating plan's step time lie from what it was in the calibrating run."""
UNDISTURBED = 0.85
"""Least share of the processor that compute ops of a run on an idle machine have."""
MAX_S = 150
"""Nothing is measured again after so long."""
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
    """One of the other plans: what was predicted for its step, and what it took (seconds; median over all rounds)."""

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
    from spipe.hardware import load_hardware

    begin = time.monotonic()
    folder = new_folder(folder)
    hardware = load_hardware(HARDWARE).override({"cpu.cores": usable_cores()})
    with _ranks() as processes:
        simulation = search(hardware, folder, to)
        losses, measured_s = train(simulation, folder, processes, to, say)
        judging = _Judging(simulation.plan, hardware, folder, processes, to, say)
        judging.calibrate(folder / "run")
        calibrated_s = _predict(simulation.plan, judging.after)
        judging.judge(begin + MAX_S)
    result = {
        "folder": str(folder),
        "loss_first": losses[0],
        "loss_last": losses[-1],
        "bubbles": simulation.bubbles.total(),
        "idle_s": simulation.bubbles.idle_s,
        "predicted_before_s": simulation.step_s,
        "predicted_after_s": calibrated_s,
        "measured_s": measured_s,
        "judged": [asdict(each) for each in judging.judged],
        "attempts": judging.attempt,
        "drift": judging.drift,
        "elapsed_s": time.monotonic() - begin,
    }
    (folder / "demo.json").write_text(json.dumps(result, indent=1) + "\n")
    to.print(f"\nEverything is in {folder}/; traces open at ui.perfetto.dev. {result['elapsed_s']:.0f} s in all.")
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
    to.print(show.timeline(simulation.program, simulation.trace, simulation.bubbles.window_s), soft_wrap=True)
    to.print()
    show.bubbles(to, simulation.bubbles)
    return simulation


def train(simulation: "Simulation", folder: Path, processes: Any, to: "Console", say: Say) -> tuple[list[float], float]:
    """Train the plan; its losses and the median of its step times (seconds)."""
    from spipe import show

    _head(to, "2", f"Train it for {TRAINING_STEPS} steps on the text of Python's documentation")
    done = _train(simulation.plan, folder / "run", TRAINING_STEPS, CALIBRATING_STEPS, processes, say)
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


class _Judging:
    """Calibrate, predict other plans, run them; again if the machine's speed has changed meanwhile.

    Attributes:
        judged: the plans of the last attempt.
        drift: step time of the calibrating plan during that attempt, relative to the calibrating run, less one.
    """

    def __init__(
        self, plan: "Plan", before: "HardwareSpec", folder: Path, processes: Any, to: "Console", say: Say
    ) -> None:
        self.plan, self.before, self.after = plan, before, before
        self.plans = other_plans(before, plan.schedule)
        self.folder, self.processes, self.to, self.say = folder, processes, to, say
        self.judged: list[Judged] = []
        self.attempt, self.calibrated_s, self.drift = 1, 0.0, 0.0
        for name, other in self.plans.items():
            other.save(folder / f"{name}.json")

    def calibrate(self, run: Path) -> None:
        """Improve the hardware description with one run of the searched plan."""
        from spipe import show, sim
        from spipe.trace import Trace

        _head(self.to, "3", "Calibrate the hardware description with that run")
        calibration = sim.calibrate([(self.plan, Trace.load(run / "trace.json"))], self.before)
        self.after, self.calibrated_s = calibration.hardware, calibration.runs[0]["measured_s"]
        self.after.save(self._new("hardware.toml"))
        show.calibration(self.to, calibration.report, calibration.runs)

    def judge(self, deadline: float) -> None:
        """Predict the other plans, write that down, then run them; again until ``deadline`` (monotonic) if need be."""
        from spipe import show

        while True:
            _head(self.to, "4", f"Predict {len(self.plans)} other plans, then run them in {ROUNDS} rounds")
            if self.attempt == 1:
                for plan in self.plans.values():
                    self.to.print(show.plan_words(plan), soft_wrap=True)
                    self.to.print()
            self._once()
            show.judged(self.to, [asdict(each) for each in self.judged])
            self.to.print(
                f"The calibrating plan ran along: {self.drift:+.1%} against the calibrating run; that is the machine."
            )
            if abs(self.drift) <= STEADY or time.monotonic() > deadline:
                break
            self.attempt += 1
            self.to.print("The machine has changed its speed, and the calibration with it: both again.")
            again = self._new("run")
            _train(self.plan, again, CALIBRATING_STEPS, CALIBRATING_STEPS, self.processes, self.say)
            self.calibrate(again)
        warn_if_busy(min(each.processor_share for each in self.judged), self.to)

    def _once(self) -> None:
        predicted = {
            name: (_predict(plan, self.before), _predict(plan, self.after)) for name, plan in self.plans.items()
        }
        rows = {name: {"predicted_before_s": old, "predicted_after_s": new} for name, (old, new) in predicted.items()}
        self._new("predictions.json").write_text(json.dumps(rows, indent=1) + "\n")
        times: dict[str, list[float]] = {}
        shares: dict[str, list[float]] = {}
        for number in range(1, ROUNDS + 1):
            for name, plan in {"calibrating": self.plan, **self.plans}.items():
                self.say(f"round {number} of {ROUNDS}: {name}")
                output = self._new(f"run-{name}-{number}")
                done = _train(plan, output, ROUND_STEPS, ROUND_STEPS, self.processes, self.say)
                times.setdefault(name, []).extend(done.step_s[WARM_UP_STEPS:])
                shares.setdefault(name, []).append(processor_share(output))
        self.drift = median(times["calibrating"]) / self.calibrated_s - 1
        self.judged = [Judged(name, *predicted[name], median(times[name]), median(shares[name])) for name in self.plans]

    def _new(self, name: str) -> Path:
        """A path of this attempt in the demo's folder."""
        stem, dot, suffix = name.partition(".")
        return self.folder / (name if self.attempt == 1 else f"{stem}-again-{self.attempt - 1}{dot}{suffix}")


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
    from spipe.trace import Trace

    trace = Trace.load(run / "trace.json")
    names = {kind.name for kind in COMPUTE}
    rows = [row for row, i in enumerate(trace.op) if trace.names[i].split()[0] in names]
    duration_s = sum(trace.end_s[row] - trace.start_s[row] for row in rows)
    return sum(trace.cpu_s[row] for row in rows) / duration_s


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
