"""Tune: plan, run for some steps, calibrate, plan again, until the plan stays the same or the budget ends.

What counts is what was measured. At the end the best plan is run once more, in turns with the one that tuning began
with, and only kept if it is the faster one there, too: machines change their speed, and one lucky run proves nothing.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from spipe.errors import SpipeError

if TYPE_CHECKING:
    from spipe.hardware import HardwareSpec
    from spipe.plan import Plan
    from spipe.trace import Trace

WORTH = 0.01
"""A plan that is predicted to gain less than this on the best one measured is not worth a run."""
CONFIRMATIONS = 2
"""Runs of each of the two plans at the end."""

TRAINED = ("optimizer", "seed", "loss_scale", "gradient_precision", "dropout", "z_loss", "deterministic")
"""Fields of the first plan that every other one shares: what is trained, and how exactly."""

Run = Callable[["Plan", str], "tuple[Trace, list[float]]"]
"""Runs a plan (the text names the run): its trace, and the seconds of the steps that count."""
Search = Callable[["HardwareSpec"], "Plan"]


@dataclass
class Trial:
    """A plan that was run: what was predicted for its step and what it took (seconds), or why it failed."""

    name: str
    plan: "Plan"
    predicted_s: float
    measured_s: float | None = None
    failure: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "plan": self.plan.digest(),
            "schedule": self.plan.schedule,
            "predicted_s": self.predicted_s,
            "measured_s": self.measured_s,
            "failure": self.failure,
        }


@dataclass
class Tuning:
    """What tuning came to.

    Attributes:
        plan: the best plan measured; ``step_s`` its step time, ``first_s`` that of the plan it began with.
        hardware: fitted to all runs.
        trials: every plan run, in order.
        confirmed: step times of the first and the best plan in the runs in turns at the end.
        reason: why tuning ended.
    """

    plan: "Plan"
    hardware: "HardwareSpec"
    step_s: float
    first_s: float
    trials: list[Trial]
    confirmed: dict[str, list[float]] = field(default_factory=dict)
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        """For files and other tools."""
        return {
            "plan": self.plan.digest(),
            "step_s": self.step_s,
            "first_s": self.first_s,
            "gain": self.first_s / self.step_s - 1,
            "reason": self.reason,
            "trials": [trial.to_json() for trial in self.trials],
            "confirmed": self.confirmed,
        }


def tune(
    first: "Plan",
    hardware: "HardwareSpec",
    search: Search,
    run: Run,
    *,
    rounds: int = 5,
    budget_s: float = float("inf"),
    say: Callable[[str], None] = lambda text: None,
    clock: Callable[[], float] = time.monotonic,
) -> Tuning:
    """Tune a plan.

    Args:
        first: the plan to begin with; it is always run.
        hardware: the spec to start from.
        search: the best plan on a spec.
        run: runs a plan.
        rounds: plans to run at most, the first one included.
        budget_s: no run is started that would probably end later.

    Raises:
        SpipeError: if the first plan cannot be run.
    """
    return _Tuner(hardware, run, rounds, budget_s, say, clock).tune(first, search)


class _Tuner:
    def __init__(
        self, hardware: "HardwareSpec", run: Run, rounds: int, budget_s: float, say: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:  # fmt: skip
        self.start = self.hardware = hardware
        self.run, self.rounds, self.say, self.clock = run, rounds, say, clock
        self.ends = clock() + budget_s
        self.longest_run_s = self.longest_search_s = 0.0
        self.trials: list[Trial] = []
        self.traces: list[tuple[Plan, Trace]] = []

    def tune(self, first: "Plan", search: Search) -> Tuning:
        self.attempt(first)
        if self.trials[0].measured_s is None:
            raise SpipeError(f"the plan to begin with cannot be run: {self.trials[0].failure}")
        reason = f"{self.rounds} plans were run"
        while len(self.trials) < self.rounds:
            if self.clock() + self.longest_search_s + self.longest_run_s > self.ends:
                reason = "the budget is used up"
                break
            begin = self.clock()
            plan = search(self.hardware)
            self.longest_search_s = max(self.longest_search_s, self.clock() - begin)
            if (end := self.not_worth_running(plan)) is not None:
                reason = end
                break
            if self.clock() + self.longest_run_s > self.ends:
                reason = "the budget is used up"
                break
            self.attempt(plan)
        return self.confirm(reason)

    def predict(self, plan: "Plan") -> float:
        from spipe.sim import simulate

        return simulate(plan, hardware=self.hardware).step_s

    def not_worth_running(self, plan: "Plan") -> str | None:
        """Why the plan that the search found need not be run; None if it should be."""
        if any(trial.plan.digest() == plan.digest() for trial in self.trials):
            return "the plan stays the same"
        best = self.best()
        predicted_s, known_s = self.predict(plan), self.predict(best.plan)
        if predicted_s > (1 - WORTH) * known_s:
            return (
                f"the next plan is predicted to take {predicted_s:.4g} s, the best one run {known_s:.4g} s: the gain "
                "is not worth a run"
            )
        return None

    def attempt(self, plan: "Plan") -> None:
        """Run a plan and calibrate with all runs so far."""
        from spipe.runtime import RunFailedError
        from spipe.sim import calibrate

        trial = Trial(f"plan {len(self.trials)}", plan, self.predict(plan))
        self.trials.append(trial)
        self.say(f"{trial.name}: {plan.schedule}, predicted {trial.predicted_s:.4g} s a step; running it")
        begin = self.clock()
        try:
            trace, seconds = self.run(plan, f"plan-{len(self.trials) - 1}")
        except (SpipeError, RunFailedError) as error:
            trial.failure = str(error).splitlines()[0]
            self.say(f"{trial.name} failed: {trial.failure}")
            return
        self.longest_run_s = max(self.longest_run_s, self.clock() - begin)
        trial.measured_s = median(seconds)
        self.traces.append((plan, trace))
        self.hardware = calibrate(self.traces, self.start).hardware
        rate = plan.tokens_per_step / trial.measured_s
        self.say(f"{trial.name}: measured {trial.measured_s:.4g} s a step, {rate:.4g} tokens/s")

    def best(self) -> Trial:
        """The plan with the shortest measured step, of equally good ones the first."""
        measured = [trial for trial in self.trials if trial.measured_s is not None]
        return min(measured, key=lambda trial: trial.measured_s or 0.0)

    def confirm(self, reason: str) -> Tuning:
        """Run the first and the best plan in turns; the first one stays unless the best is faster again."""
        from spipe.runtime import RunFailedError

        first, best = self.trials[0], self.best()
        assert first.measured_s is not None
        assert best.measured_s is not None
        result = Tuning(best.plan, self.hardware, best.measured_s, first.measured_s, self.trials, reason=reason)
        if best is first:
            return result
        times: dict[str, list[float]] = {first.name: [], best.name: []}
        for number in range(CONFIRMATIONS):
            for trial in (first, best):
                self.say(f"{trial.name} once more, to be sure")
                try:
                    _, seconds = self.run(trial.plan, f"confirm-{trial.name.replace(' ', '-')}-{number}")
                except (SpipeError, RunFailedError) as error:
                    result.plan, result.step_s = first.plan, first.measured_s
                    result.reason += f"; {trial.name} failed when it was run again ({str(error).splitlines()[0]})"
                    return result
                times[trial.name] += seconds
        result.confirmed = times
        result.first_s, result.step_s = median(times[first.name]), median(times[best.name])
        if result.step_s >= result.first_s:
            result.plan, result.step_s = first.plan, result.first_s
            result.reason += f"; {best.name} was not faster when it was run again, so the first plan stays"
        return result
