"""Trace files that were damaged: one message that names the field, never a traceback, never silence."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spipe.errors import SpipeError
from spipe.hardware import load_hardware
from spipe.model import load_model
from spipe.plan import make_plan
from spipe.program import Program
from spipe.trace import Trace


@pytest.fixture(scope="module")
def program() -> Program:
    plan = make_plan(
        load_model("tiny"),
        load_hardware("laptop"),
        num_ranks=2,
        forward_stages=1,
        backward_stages=2,
        global_batch=4,
        microbatch_size=2,
        sequence=32,
        precision="fp32",
    )
    return plan.program()


def trace_of(program: Program) -> Trace:
    result = Trace.empty(program, "measured", device="cpu")
    for step in range(2):
        for i in range(len(program)):
            result.add(step, i, step + 0.001 * i, step + 0.002 * i, step + 0.003 * i, 0.001)
    return result


@pytest.fixture
def damaged(program: Program, tmp_path: Path) -> Callable[[Callable[[Any], None]], Path]:
    """A trace file after a change by hand."""

    def damage(change: Callable[[Any], None]) -> Path:
        path = tmp_path / "trace.json"
        trace_of(program).save(path)
        document = json.loads(path.read_text())
        change(document)
        path.write_text(json.dumps(document))
        return path

    return damage


def first(document: Any) -> Any:
    return next(event for event in document["traceEvents"] if event["ph"] == "X")


WRONG_ARGS: list[tuple[str, Any]] = [
    *(("op", value) for value in ("a", 1.5, -1, 10**6, None, True, [0])),
    *(("step", value) for value in ("a", 1.5, -1, None, False)),
    *((time, value) for time in ("ready_s", "start_s", "end_s") for value in ("x", None, math.nan, math.inf, 10**400)),
    *(("cpu_s", value) for value in ("x", None, math.nan, -math.inf, -1)),
    ("note", 3),
]


@pytest.mark.parametrize(("name", "value"), WRONG_ARGS)
def test_wrong_values_of_an_event_are_named(damaged: Any, name: str, value: Any) -> None:
    path = damaged(lambda document: first(document)["args"].update({name: value}))
    with pytest.raises(SpipeError, match=rf"trace\.json: damaged trace: traceEvents\[\d+\]\.args\.{name} is .*, not"):
        Trace.load(path)


@pytest.mark.parametrize("name", ["op", "step", "ready_s", "start_s", "end_s"])
def test_missing_values_of_an_event_are_named(damaged: Any, name: str) -> None:
    path = damaged(lambda document: first(document)["args"].pop(name))
    with pytest.raises(SpipeError, match=rf"args\.{name} is None, not"):
        Trace.load(path)


@pytest.mark.parametrize("value", [None, 3, "text", [1], {}, [None]])
@pytest.mark.parametrize("name", ["names", "ranks", "lanes", "more", "source"])
def test_wrong_metadata_are_named(damaged: Any, name: str, value: Any) -> None:
    if (name, value) in (("more", {}), ("source", "text")):
        return
    path = damaged(lambda document: document["metadata"].update({name: value}))
    with pytest.raises(SpipeError, match=rf"damaged trace: metadata\..*{name}"):
        Trace.load(path)


@pytest.mark.parametrize("name", ["names", "ranks", "lanes"])
def test_a_wrong_entry_of_the_metadata_is_named(damaged: Any, name: str) -> None:
    path = damaged(lambda document: document["metadata"][name].__setitem__(3, 1.5))
    with pytest.raises(SpipeError, match=rf"metadata\.{name}\[3\] is 1\.5, not"):
        Trace.load(path)


def test_events_that_are_none(damaged: Any) -> None:
    for change, message in (
        (lambda document: document.update(traceEvents={}), "traceEvents is {}, not a list"),
        (lambda document: document["traceEvents"].append(7), r"traceEvents\[\d+\] is 7, not an event"),
        (lambda document: first(document).pop("args"), r"traceEvents\[\d+\]\.args is None, not a table"),
        (lambda document: document["traceEvents"].append(first(document)), "a second time of op 0 .* in step 0"),
    ):
        with pytest.raises(SpipeError, match=message):
            Trace.load(damaged(change))


def test_an_op_that_ends_before_its_start(damaged: Any) -> None:
    def turn(document: Any, by_s: float) -> None:
        args = first(document)["args"]
        args["end_s"] = args["start_s"] - by_s

    Trace.load(damaged(lambda document: turn(document, 1e-7)))  # rounding
    with pytest.raises(SpipeError, match=r"of step 0 starts at 0\.0 s and ends at -0\.5 s"):
        Trace.load(damaged(lambda document: turn(document, 0.5)))


def test_text_that_is_no_json(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    for content in (b"[" * 200_000, b'{"a":' * 200_000, b"\xff\xfe", b"9" * 10_000):
        path.write_bytes(content)
        with pytest.raises(SpipeError, match=r"not a (readable|spipe) trace"):
            Trace.load(path)


def test_incomplete_steps(program: Program) -> None:
    trace = trace_of(program)
    trace.check_complete("here")
    for column in (trace.step, trace.op, trace.ready_s, trace.start_s, trace.end_s, trace.cpu_s):
        del column[-1]
    last = len(program) - 1
    with pytest.raises(SpipeError, match=rf"here: step 1 of the trace has {last} of {last + 1} ops .* is missing"):
        trace.check_complete("here")
