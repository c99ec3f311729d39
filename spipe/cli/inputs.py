"""What figures and reports are made from: run folders, plans (simulated on the spot), traces, results."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from spipe.cli.common import load_override, load_plan
from spipe.errors import SpipeError
from spipe.timed import TimedStep, name_of


def read_json(path: Path) -> Any:
    """The value in a JSON file. Raises SpipeError if there is none."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise SpipeError(f"{path}: not a readable JSON file ({error}); give a file that spipe wrote") from None


def what_is(path: Path) -> str:
    """``run``, ``plan``, ``trace``, or the command whose ``--json`` wrote it: ``validate``, ``simulate``, ..."""
    if path.is_dir():
        if not (path / "trace.json").exists():
            raise SpipeError(
                f"{path} holds no finished run (no trace.json); run a plan with `spipe run PLAN -o {path}`, or give a "
                "plan.json"
            )
        return "run"
    if not path.exists():
        raise SpipeError(f"{path}: there is no such file or folder; give one that spipe wrote")
    data = read_json(path)
    if not isinstance(data, dict):
        raise SpipeError(f"{path}: holds {type(data).__name__}, not a result of spipe; make one with --json")
    for name, keys in _KEYS.items():
        if keys <= data.keys():
            return name
    if "traceEvents" in data:
        return "trace"  # ours or not: reading it tells
    raise SpipeError(
        f"{path}: not a plan, trace or result that spipe knows (its keys: {', '.join(list(data)[:6]) or 'none'}); "
        "give a plan.json, a run folder, or what --json of a command wrote"
    )


# The kinds of files by their keys, the more special ones first.
_KEYS: dict[str, set[str]] = {
    "trace": {"traceEvents", "metadata"},
    "search": {"candidates", "front", "plan"},
    "plan": {"model", "hardware", "layout"},
    "simulate": {"busy_s", "idle_s", "bubbles", "predicted"},
    "calibrate": {"fits", "runs"},
    "validate": {"rows", "order_agreement"},
    "whatif": {"rows", "helps"},
    "compare": {"step_time", "ops", "bubbles"},
    "adam": {"cases", "settling"},
}
_WORDS = {
    "run": "a run folder",
    "plan": "a plan",
    "trace": "a trace",
    "adam": "a result of scripts/bench_adam.py --json",
}


def expect(path: Path, allowed: Collection[str], figure: str) -> str:
    """``what_is(path)`` if it is one of ``allowed``. Raises SpipeError that says what a figure is made from."""
    found = what_is(path)
    if found not in allowed:
        wanted = " or ".join(in_words(name) for name in allowed)
        raise SpipeError(f"{path} is {in_words(found)}, but {figure} is made from {wanted}")
    return found


def in_words(name: str) -> str:
    return _WORDS.get(name, f"a result of `spipe {name} --json`")


def load_result(path: Path) -> Mapping[str, Any]:
    """A result file whose kind is known; numbers that JSON spells as text are numbers again."""
    data: Mapping[str, Any] = read_json(path)
    return data


def timed_step(path: Path, step: int | None = None, hardware: str | None = None) -> TimedStep:
    """A step of a run folder, or of a plan, which is simulated. Raises SpipeError for anything else."""
    found = expect(path, ("run", "plan", "search", "trace"), "this figure")
    if found == "run":
        return TimedStep.of_run(path, step)
    if found == "trace":
        from spipe.trace import Trace

        trace = Trace.load(path)
        if not (path.parent / "plan.json").exists():
            raise SpipeError(f"{path}: a trace is drawn with the plan it is of: put that beside it as plan.json")
        return TimedStep.of(str(path), load_plan(path.parent / "plan.json"), trace, step)
    from spipe import sim

    simulation = sim.simulate(plan_of(path), hardware=load_override(hardware))
    chosen = simulation.last_step if step is None else step
    return TimedStep.of(name_of(path), simulation.plan, simulation.trace, chosen)


def plan_of(path: Path) -> Any:
    """The plan of a plan file, a run folder or a search's result."""
    from spipe.plan import Plan

    if not path.is_dir() and what_is(path) == "search":
        return Plan.of_json(read_json(path)["plan"], str(path))
    return load_plan(path)
