"""Figures: every kind is drawn, deterministic, from what it should be; anything else is refused with a reason."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spipe import plots, show
from spipe.cli.plotting import KINDS, Request
from spipe.errors import SpipeError
from spipe.hardware import load_hardware
from spipe.memory import memory
from spipe.model import MODELS
from spipe.occupancy import WORKSPACES, occupancy
from spipe.plan import Plan, make_plan
from spipe.plots.scaling import scaling
from spipe.plots.timeline import COLUMNS, boxes_of, covered, slices
from spipe.sim import calibrate, compare, simulate
from spipe.timed import TimedStep
from spipe.trace import Trace

from .conftest import Command

Refused = Callable[..., str]


@pytest.fixture
def simulation(tmp_path: Path) -> Path:
    path = tmp_path / "s.json"
    result = {
        "busy_s": [1.0, 1.0],
        "idle_s": 1.0,
        "bubbles": {"fill": 0.25, "drain": 0.75},
        "predicted": {"step_s": 1.5},
    }
    path.write_text(json.dumps(result))
    return path


def drawn(command: Command, *arguments: object) -> None:
    result = command("plot", *arguments)
    assert (result.code, result.out) == (0, ""), result.err


@pytest.mark.parametrize(
    "suffix", ["png", pytest.param("svg", marks=pytest.mark.slow), pytest.param("pdf", marks=pytest.mark.slow)]
)
def test_the_same_data_give_the_same_bytes(
    command: Command, validation: Path, run_folder: Path, tmp_path: Path, suffix: str
) -> None:
    for made_from in (validation, run_folder):
        figure = tmp_path / f"{made_from.stem}.{suffix}"
        drawn(command, made_from, "-o", figure)
        first = figure.read_bytes()
        assert len(first) > 1000
        assert "exists; give another name" in command("plot", made_from, "-o", figure).err
        drawn(command, made_from, "-o", figure, "--force")
        assert figure.read_bytes() == first


def test_every_kind_is_drawn(
    command: Command, validation: Path, simulation: Path, run_folder: Path, plan_file: Path, tmp_path: Path
) -> None:
    plan = Plan.load(plan_file)
    measured = Trace.load(run_folder / "trace.json")
    fitted = calibrate([(plan, measured)], plan.hardware)
    found = {"schedule": "spipe", "rank_bytes": 1 << 30, "host_bytes": 1 << 31, "step_s": 0.5}
    row = {"model": "m", "offer": "o", "upgrade": "", "tokens_per_s": 10.0, "feasible": True,
           "rent_dollars_per_billion_tokens": 1.0}  # fmt: skip
    case = {"count": 10**6, "bytes_per_s": 1e10, "ratio_to_same_streams": 0.9, "ratio_to_triad": 1.1}
    results: dict[str, Any] = {
        "front": {"plan": {}, "candidates": [found, {**found, "step_s": 0.7}], "front": [found], "lower_bound_s": 0.4},
        "residuals": fitted.to_json(),
        "whatif": {"rows": [row, {**row, "upgrade": "dram", "tokens_per_s": 12.0}], "helps": []},
        "adam": {"cases": [{**case, "threads": 1}, {**case, "threads": 2}], "settling": {}},
    }
    alone = tmp_path / "alone.json"
    make_plan(
        plan.model, plan.hardware, num_ranks=1, forward_stages=1, backward_stages=1, global_batch=4, microbatch_size=2,
        sequence=32, precision="fp32",
    ).save(alone)  # fmt: skip
    inputs: dict[str, list[Path]] = {
        "timeline": [run_folder],
        "idle": [simulation, run_folder, plan_file],
        "memory": [plan_file],
        "errors": [run_folder],
        "predicted": [validation],
        "scaling": [plan_file, alone],
        "ablation": [plan_file, run_folder],
    }
    for name, data in results.items():
        inputs[name] = [tmp_path / f"{name}.json"]
        inputs[name][0].write_text(json.dumps(data))
    assert set(inputs) == set(KINDS)
    for kind, paths in inputs.items():
        drawn(command, kind, *paths, "-o", tmp_path / f"{kind}.svg")
        text = (tmp_path / f"{kind}.svg").read_text()
        assert len(text) > 5000
    for name in ("front", "residuals", "whatif", "adam"):  # known without being told
        drawn(command, *inputs[name], "-o", tmp_path / f"{name}.svg", "--force")


def texts(figure: Any) -> set[str]:
    """All words of a figure."""
    from matplotlib.text import Text

    return {text.get_text() for text in figure.findobj(Text) if text.get_text()}


def test_the_timeline_shows_lanes_ops_and_causes(run_folder: Path) -> None:
    timed = TimedStep.of_run(run_folder)
    words = texts(plots.timeline(timed))
    assert {"rank 0  compute", "rank 1  compute", "CPU optimizer", "messages, rank 1", "forward", "drain"} <= words
    assert any(re.search(r"measured step \d, .* % busy", word) for word in words)
    assert "CPU optimizer" not in texts(plots.timeline(timed, lanes="compute"))
    assert "rank 1  compute" not in texts(plots.timeline(timed, ranks=[0]))
    begin, end = timed.metrics().window_s
    boxes = boxes_of(timed, begin, end)
    for rank, busy in enumerate(timed.metrics().busy_s):
        assert sum(box.end - box.start for box in boxes[rank, "compute"]) == pytest.approx(busy)


def test_a_prediction_and_a_run_in_one_picture(run_folder: Path) -> None:
    plan, trace = Plan.load(run_folder / "plan.json"), Trace.load(run_folder / "trace.json")
    windows = compare(plan, trace).windows
    figure = plots.timelines(plan.program(), windows)
    words = texts(figure)
    assert {"rank 0  compute: predicted", "rank 1  compute: predicted", "measured", "backward", "drain"} <= words
    times = [window.end_s - window.begin_s for window in windows.values()]
    assert (
        f"step:  predicted {show.seconds(times[0])} (solid line),  measured {show.seconds(times[1])} (dashed line)"
        in words
    )
    ends = [line.get_xdata()[0] for line in figure.axes[0].lines if line.get_label() in windows]
    assert ends == pytest.approx([1e3 * time for time in times])
    for window in windows.values():
        assert sum(end - begin for begin, end, _ in window.idle[0]) < window.end_s - window.begin_s


def test_residuals_tell_runs_that_were_seen_from_those_that_were_not() -> None:
    fits = [{"what": "a", "value": 1.0, "unit": "s", "spread": 0.1, "samples": 3}]
    run = {"name": "x/a", "measured_s": 1.0, "predicted_s": 1.1, "error": 0.1}
    held_out = [{**run, "error": -0.25, "used_for": "left out"}, {**run, "name": "x/b", "used_for": "judge"}]
    words = texts(plots.residuals({"fits": fits, "runs": [run], "held_out": held_out}))
    assert {"seen by the fit", "not seen by the fit", "+10.0 %", "-25.0 %", "a\n1.00 s", "b\n1.00 s"} <= words
    alone = texts(plots.residuals({"fits": fits, "runs": [run], "held_out": []}))
    assert "not seen by the fit" not in alone


def test_idle_intervals_are_the_gaps_of_the_compute_lane(run_folder: Path) -> None:
    metrics = TimedStep.of_run(run_folder).metrics()
    for idle, causes in zip(metrics.idle, metrics.bubbles, strict=True):
        for cause, seconds in causes.items():
            assert sum(end - begin for begin, end, why in idle if why == cause) == pytest.approx(seconds, abs=1e-12)
        assert all(first[1] <= second[0] + 1e-12 for first, second in pairwise(idle))


def test_aggregated_slices_keep_the_time() -> None:
    random = np.random.default_rng(0)
    starts = np.sort(random.uniform(0, 9, 5000))
    ends = starts + random.exponential(0.0005, 5000)
    edges = slices(starts, 3.001, 10.0)
    assert (edges[0], edges[-1]) == (0.0, 10.0)
    assert len(edges) <= COLUMNS + 2
    assert np.diff(edges)[1:-1] == pytest.approx(0.02)
    assert 3.001 + edges[1:-1] == pytest.approx(np.round((3.001 + edges[1:-1]) / 0.02) * 0.02)
    share = covered(starts, ends, edges)
    assert (share * np.diff(edges)).sum() == pytest.approx((ends - starts).sum())
    assert covered(np.array([2.5]), np.array([7.5]), edges).max() == pytest.approx(1.0)


def test_a_regular_lane_has_the_same_height_everywhere() -> None:
    for period, busy in ((0.49, 0.3), (0.52, 0.004), (0.0107, 0.9)):
        starts = np.arange(0, 314, period)
        share = covered(starts, starts + busy * period, slices(starts, 0.0, 314.0))[:-1]
        assert share.mean() == pytest.approx(busy, rel=0.1)
        assert np.abs(share - busy).max() < 0.4 * busy


def test_every_chosen_rank_has_its_compute_row_and_every_lane_with_an_op_is_there(run_folder: Path) -> None:
    timed = TimedStep.of_run(run_folder)
    begin, end = timed.metrics().window_s
    drawn_lanes = texts(plots.timeline(timed))
    for _, lane in boxes_of(timed, begin, end):
        assert lane in drawn_lanes or lane == "compute"
    for rank, intervals in enumerate(timed.metrics().idle):
        start, stop, cause = max(intervals, key=lambda part: part[1] - part[0])
        words = texts(plots.timeline(timed, window_s=(start - begin, stop - begin), ranks=[rank]))
        assert {f"rank {rank}  compute", cause, "strip below compute: why it is idle"} <= words
        assert any("compute lanes 0.0 % busy" in word for word in words)


@pytest.mark.slow
def test_thousands_of_ops_make_a_small_figure(tmp_path: Path) -> None:
    plan = make_plan(
        MODELS["tiny"], load_hardware("v100x4"), forward_stages=1, backward_stages=2, global_batch=384,
        microbatch_size=1, sequence=128, precision="fp16",
    )  # fmt: skip
    simulation = simulate(plan, num_steps=1)
    assert len(simulation.program) > 10_000
    plots.save(plots.timeline(TimedStep.of("many", plan, simulation.trace, 0)), tmp_path / "many.svg")
    assert (tmp_path / "many.svg").stat().st_size < 4e6


@pytest.mark.parametrize(
    "options", [{}, {"stage_input_route": "host"}, {"device_layers": 2}, {"recompute": "never"}, {"weight_slots": None}]
)
def test_memory_in_use_stays_below_what_is_planned(options: dict[str, Any]) -> None:
    schedule, stages = ("gpipe", (1, 1)) if options.get("recompute") else ("spipe", (2, 4))
    plan = make_plan(
        MODELS["tiny"], load_hardware("v100x4"), num_ranks=2, schedule=schedule, forward_stages=stages[0],
        backward_stages=stages[1], global_batch=8, microbatch_size=2,
        sequence=64, precision="fp16", options=options,
    )  # fmt: skip
    simulation = simulate(plan)
    used = occupancy(TimedStep.of("plan", plan, simulation.trace, simulation.last_step))
    report = memory(plan)
    for items, planned in zip(used.ranks, report.rank_bytes, strict=True):
        in_use, constant = sum(items.values()), items[WORKSPACES].max()
        assert items["activations and temporaries"].max() > 0
        assert in_use.min() >= 0
        assert 0.3 * (planned - constant) < in_use.max() - constant <= planned - constant
    for items, planned in zip(used.hosts, report.host_bytes, strict=True):
        assert 0 < sum(items.values()).max() <= planned


def test_bad_input_is_named(
    refused: Refused, validation: Path, simulation: Path, run_folder: Path, tmp_path: Path
) -> None:
    files = {
        "list": "[]",
        "unknown": '{"a": 1}',
        "empty": '{"rows": [], "order_agreement": {}}',
        "foreign": '{"traceEvents": []}',
        "cut": '{"traceEvents": [',
        "half": '{"fits": [{"what": "x"}], "runs": []}',
    }
    for name, text in files.items():
        (tmp_path / f"{name}.json").write_text(text)
    path = {name: tmp_path / f"{name}.json" for name in files}
    (tmp_path / "folder").mkdir()
    figure = ("-o", tmp_path / "a.png")
    for arguments, message in (
        ((validation, "-o", tmp_path / "a.gif"), "should end in .png"),
        ((validation, "-o", "/proc/a.png"), "/proc/a.png: cannot write this file"),
        ((validation, "-o", tmp_path / "none" / "a.png"), "there is no folder"),
        ((path["list"], *figure), "holds list, not a result"),
        ((path["unknown"], *figure), "not a plan, trace or result that spipe knows (its keys: a)"),
        ((tmp_path / "none.json", *figure), "there is no such file"),
        (("predicted", validation, simulation, *figure), "is drawn from one input, 2 were given"),
        (("idle", simulation, simulation, *figure), "two inputs are called s"),
        ((path["empty"], *figure), "nothing to plot"),
        ((path["foreign"], *figure), "not a spipe trace"),
        ((path["cut"], *figure), "not a readable JSON file"),
        ((path["half"], *figure), "missing or wrong fields (KeyError"),
        ((tmp_path / "folder", *figure), "holds no finished run"),
        (("timelime", run_folder, *figure), "nearest: timeline"),
        (("front", validation, *figure), "is a result of `spipe validate --json`, but front is made from a result of"),
        (("timeline", *figure), "nothing to draw from; give RUNDIR or PLAN"),
        (("timeline", run_folder, "--step", "99", *figure), "the trace has no step 99; it has 0 to 5"),
        (("timeline", run_folder, "--window", "1", *figure), "should be A:B in milliseconds"),
        (
            ("timeline", run_folder, "--window", "5000:6000", *figure),
            "window 5000 to 6000 ms should lie within the step",
        ),
        (("timeline", run_folder, "--window", "5:2", *figure), "window 5 to 2 ms should lie within the step"),
        (("timeline", run_folder, "--ranks", "7", *figure), "rank 7 is not in the plan; it has 0 to 1"),
        (("timeline", run_folder, "--lanes", "none", *figure), "should be all or compute"),
        (("scaling", run_folder, *figure), "tiny, spipe, one core, measured: 2 accelerators; give plans, runs or"),
        (("idle", run_folder, "--window", "0:5", *figure), "--window is for timeline; idle does not use it"),
        (("memory", run_folder, "--ranks", "0", *figure), "--ranks is for timeline; memory does not use it"),
        (("predicted", validation, "--step", "1", *figure), "--step is for timeline, memory, idle; predicted does not"),
    ):
        assert message in refused("plot", *arguments)
    assert not (tmp_path / "a.png").exists()


def test_traces_that_are_empty_partial_or_of_another_plan(refused: Refused, run_folder: Path, tmp_path: Path) -> None:
    whole = Trace.load(run_folder / "trace.json")
    for change, message in (
        ("empty", "the trace is empty"),
        ("partial", "the trace is not complete"),
        ("simulated", "a simulated trace, not what a run measured"),
        ("timeless", "of the trace takes no time"),
        ("other", "it belongs to another plan"),
    ):
        trace = Trace("measured", whole.names, whole.ranks, whole.lanes)
        for row in {"partial": range(5), "simulated": range(len(whole)), "timeless": range(len(whole))}.get(change, ()):
            times = (whole.ready_s[row], whole.start_s[row], whole.end_s[row])
            trace.add(whole.step[row], whole.op[row], *((0.0, 0.0, 0.0) if change == "timeless" else times))
        if change == "simulated":
            trace.source = change
        if change == "other":
            trace.names = [name.replace(" m", " m1") for name in whole.names]
        trace.save(run_folder / "trace.json")
        for kind in ("timeline", "memory", "idle", "errors"):
            assert message in refused("plot", kind, run_folder, "-o", tmp_path / "a.png")
        assert message in refused("report", run_folder, "-o", tmp_path / "a.html")


def test_without_matplotlib_the_message_says_what_to_install(run_folder: Path, tmp_path: Path) -> None:
    code = f"""
import sys
sys.modules["matplotlib"] = None
from spipe.cli import main
main(["plot", {str(run_folder)!r}, "-o", {str(tmp_path / "a.png")!r}])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, "pip install matplotlib" in done.stderr) == (2, True), done.stderr
    assert "Traceback" not in done.stderr


def test_figures_without_matplotlib_are_refused_before_the_work(
    refused: Refused, run_folder: Path, plan_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(*_: object, **__: object) -> None:
        pytest.fail("worked before it was known that there can be no figure")

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("spipe.sim.compare", work)
    monkeypatch.setattr("spipe.sim.whatif.what_if", work)
    figure = ("--figure", tmp_path / "a.png")
    for command in (
        ("compare", plan_file, run_folder),
        ("whatif", "--model", "tiny", "--hardware", "laptop", "--global-batch", 4, "--sequence", 32),
    ):
        assert "pip install matplotlib" in refused(*command, *figure)


@pytest.mark.parametrize("backend", ["TkAgg", "bogus"])
def test_figures_need_no_display(run_folder: Path, tmp_path: Path, backend: str) -> None:
    environment = {"PATH": "/usr/bin", "MPLBACKEND": backend, "PYTHONPATH": ":".join(sys.path), "HOME": str(tmp_path)}
    command = [sys.executable, "-m", "spipe", "plot", str(run_folder), "-o", str(tmp_path / "a.png")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["$\\frac{$", "$x^2$", "漢字", "a_b^c & <d>", "\udcff"])
def test_names_are_literal_and_never_a_warning(command: Command, run_folder: Path, tmp_path: Path, name: str) -> None:
    folder = run_folder.rename(tmp_path / name)
    other = shutil.copytree(folder, tmp_path / "$other$")
    for kind, *inputs in (("timeline", folder), ("idle", folder, other), ("ablation", folder, other)):
        drawn(command, kind, *inputs, "-o", tmp_path / f"{kind}.svg")
    assert command("report", folder, "-o", tmp_path / "a.html").code == 0


def test_the_idle_total_is_all_idle_time() -> None:
    bubbles = {"fill": 10.0, "drain": 0.04, "upstream": 0.04, "memory": 0.04}
    result = {"busy_s": [89.88], "bubbles": bubbles, "predicted": {"step_s": 100.0}}
    assert {"10.1 %", "drain"} <= texts(plots.idle_time({"a": result}))


def test_errors_of_ops_agree_with_compare(run_folder: Path) -> None:
    plan, trace = Plan.load(run_folder / "plan.json"), Trace.load(run_folder / "trace.json")
    for row, step in enumerate(trace.step):  # every step is another, and the typical one tells little
        trace.end_s[row] += 0.3 * step * (trace.end_s[row] - trace.start_s[row])
    result = compare(plan, trace)
    simulation = result.simulation
    figure = plots.op_errors(
        TimedStep.of("prediction", plan, simulation.trace, simulation.last_step), TimedStep.of("run", plan, trace)
    )
    for kind in ("FORWARD", "RECOMPUTE", "BACKWARD"):
        ratio = next(row["ratio"] for row in result.ops if row["kind"] == kind)
        assert f"{100 * (ratio - 1):+.0f} %" in texts(figure)
    assert any("(ms, mean of 3)" in word for word in texts(figure))


def test_scaling_has_a_line_for_each_kind_of_accelerator(
    monkeypatch: pytest.MonkeyPatch, plan_file: Path, tmp_path: Path
) -> None:
    seen: dict[str, list[tuple[int, float]]] = {}
    monkeypatch.setattr(plots, "scaling", seen.update)
    plan = Plan.load(plan_file)
    other = plan.hardware.replace(accelerator=plan.hardware.accelerator.replace(name="another core"))
    plan.replace(hardware=other).save(tmp_path / "other.json")
    KINDS["scaling"][1](Request([plan_file, tmp_path / "other.json"]))
    assert [(name, len(points)) for name, points in seen.items()] == [
        ("tiny, spipe, one core", 1),
        ("tiny, spipe, another core", 1),
    ]
    with pytest.raises(SpipeError, match="two numbers of accelerators or more, not a: 2 accelerators; b: 4"):
        scaling({"a": [(2, 1.0)], "b": [(4, 1.0)]})


def assert_readable(figure: Any) -> None:
    """Ticks, titles and texts lie within the figure, and none on another."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    with plots.style.style():
        FigureCanvasAgg(figure).draw()
    words = list(figure.axes[0].get_yticklabels())
    for axes in figure.axes:
        low, high = axes.get_xlim()
        words += [axes.xaxis.label, *axes.texts]
        words += [label for label in axes.get_xticklabels() if low <= label.get_position()[0] <= high]
    boxes = [word.get_window_extent() for word in words if word.get_text()]
    whole = figure.bbox.padded(1.0)
    for number, box in enumerate(boxes):
        assert whole.contains(box.x0, box.y0), words
        assert whole.contains(box.x1, box.y1), words
        assert not any(box.overlaps(other) for other in boxes[:number]), words


def test_long_names_leave_room(run_folder: Path) -> None:
    name = "a machine with a name of many words, two hosts of four cards each " * 2
    row = {"model": "m", "upgrade": "", "tokens_per_s": 12_345.0, "feasible": True, "step_s": 1.0,
           "rent_dollars_per_billion_tokens": 1234.5, "purchase_dollars": 340_000, "break_even_month": 17}  # fmt: skip
    rows = [{**row, "offer": f"{name} {k}", "model": f"{model}_with_a_name"} for k in "abc" for model in ("one", "two")]
    rows += [{**rows[0], "upgrade": "dram", "tokens_per_s": 15_000.0}]
    figure = plots.what_if(rows)
    assert_readable(figure)
    assert "$1,234\nto buy: $340,000, even after 17 months" in texts(figure)
    result = {"busy_s": [90.0], "bubbles": {"fill": 10.0}, "predicted": {"step_s": 100.0}}
    assert_readable(plots.idle_time({name: result, name + "x": result}))
    assert_readable(plots.ablation([(name, 2.0), (name, 1.0)]))


def test_what_is_usable_is_a_line_or_an_arrow(plan_file: Path) -> None:
    plan = Plan.load(plan_file)
    planned = max(memory(plan).rank_bytes)
    for times, drawn_as in ((2.0, " usable"), (5.0, " \u2191 usable")):
        accelerator = plan.hardware.accelerator.replace(memory_bytes=times * planned, usable_fraction=1.0)
        near = plan.replace(hardware=plan.hardware.replace(accelerator=accelerator))
        simulation = simulate(near)
        figure = plots.memory_over_time(TimedStep.of("plan", near, simulation.trace, simulation.last_step))
        assert {text.get_text().split(" usable")[0] + " usable" for text in figure.axes[0].texts[1:]} == {drawn_as}
        lines = [line for line in figure.axes[0].lines if line.get_color() == "#B00020"]
        assert len(lines) == (times == 2.0)
