"""Reports: one file that needs no network, with all sections; in a browser, a timeline that can be used."""

import html
import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from spipe.hardware import load_hardware
from spipe.model import MODELS
from spipe.plan import make_plan
from spipe.plots.style import CAUSE_COLOURS, GROUP_COLOURS
from spipe.report import Facts, report
from spipe.sim import simulate
from spipe.timed import TimedStep
from spipe.trace import Trace

from .conftest import Command

Refused = Callable[..., str]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Page(HTMLParser):
    """What a page holds: open tags left over, addresses it would load, headings, scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.headings: list[str] = []
        self.ids: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "link", "input", "br", "img"):
            self.open.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href") and not (value or "").startswith(("#", "data:")):
                self.loads.append(f"{tag} {value}")
            if name == "id":
                self.ids.append(value or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("h1", "h2"):
            self.headings.append(data)


def timeline_data(text: str) -> Any:
    return json.loads(re.search(r'id="timeline-data">(.*?)</script>', text, re.DOTALL)[1])  # type: ignore[index]


def test_a_run(command: Command, run_folder: Path, tmp_path: Path) -> None:
    rows = [{"step": step, "loss": 5.0 - step, "step_s": 1.0, "tokens_per_s": 9.0} for step in range(3)]
    (run_folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    results = {"device": "a <device>", "peak_device_bytes": [2**30, 2**31], "startup_s": {"pages": 0.25}}
    (run_folder / "result.json").write_text(json.dumps(results))
    starts = [{"command": ["spipe", "run", "old"]}, {"command": ["spipe", "run", "my plan"], "gpus": ["G1", "G2"]}]
    (run_folder / "environment.jsonl").write_text("\n".join(map(json.dumps, starts)))
    result = command("report", run_folder, "-o", tmp_path / "r.html")
    assert (result.code, result.out) == (0, ""), result.err
    text = (tmp_path / "r.html").read_text(encoding="utf-8")
    page = Page(text)
    assert (page.open, page.loads) == ([], [])
    assert page.headings[0] == "tiny on laptop: run"
    assert page.headings[1:] == [
        "Plan", "Timeline", "Where the time goes", "Training", "Prediction and measurement", "Memory",
        "What the prediction rests on", "Environment",
    ]  # fmt: skip
    assert {"timeline", "search", "tip", "home", "all"} <= set(page.ids)
    assert html.escape("a <device>") in text
    assert "5.000 → 3.000" in text
    for words in ("1.00 GiB, 2.00 GiB", "pages 250 ms", html.escape("spipe run 'my plan'"), "G1, G2"):
        assert f"<td>{words}</td>" in text
    data = timeline_data(text)
    trace = Trace.load(run_folder / "trace.json")
    free = sum(trace.names[i].startswith("FREE") for i in trace.op)
    assert data["first"][-1] == len(trace) - free
    assert data["left_out"] == 0
    for rank in (0, 1):
        idle = sorted((begin, end) for at, begin, end, _ in data["idle"] if at == rank)
        assert all(first[1] <= second[0] + 1e-9 for first, second in pairwise(idle))
    assert "exists; give another name" in command("report", run_folder, "-o", tmp_path / "r.html").err


def test_a_plan(command: Command, plan_file: Path, tmp_path: Path) -> None:
    assert command("report", plan_file, "-o", tmp_path / "p.html").code == 0
    page = Page((tmp_path / "p.html").read_text(encoding="utf-8"))
    assert page.loads == []
    assert page.headings[0] == "tiny on laptop: simulated"
    assert not {"Training", "Prediction and measurement"} & set(page.headings)


def test_a_run_too_short_to_judge_says_so(command: Command, run_folder: Path, tmp_path: Path) -> None:
    whole = Trace.load(run_folder / "trace.json")
    short = Trace(whole.source, whole.names, whole.ranks, whole.lanes)
    for row, step in enumerate(whole.step):
        if step < 2:
            short.add(step, whole.op[row], whole.ready_s[row], whole.start_s[row], whole.end_s[row])
    short.save(run_folder / "trace.json")
    assert command("report", run_folder, "-o", tmp_path / "r.html").code == 0
    assert "not held against a prediction: " in (tmp_path / "r.html").read_text(encoding="utf-8")


def test_bad_input_is_named(refused: Refused, run_folder: Path, validation: Path, tmp_path: Path) -> None:
    (run_folder / "metrics.jsonl").write_text('{"step": 0}\n')
    for arguments, message in (
        ((run_folder, "-o", tmp_path / "r.htm"), "should end in .html"),
        ((run_folder, "-o", "/proc/r.html"), "/proc/r.html: cannot write this file"),
        ((validation, "-o", tmp_path / "r.html"), "but a report is made from a run folder or a plan"),
        ((tmp_path / "none", "-o", tmp_path / "r.html"), "there is no such file or folder"),
        ((run_folder, "-o", tmp_path / "r.html"), "metrics.jsonl:1: not a row of metrics (KeyError"),
    ):
        assert message in refused("report", *arguments)
    (run_folder / "metrics.jsonl").unlink()
    (run_folder / "environment.jsonl").write_text("{}\n[1")
    assert "environment.jsonl:2: not a line of JSON" in refused("report", run_folder, "-o", tmp_path / "r.html")
    (run_folder / "environment.jsonl").unlink()
    other = ("--hardware", "h200x2", "-o", tmp_path / "r.html")
    assert "has device cuda" in refused("report", run_folder, *other)
    assert not (tmp_path / "r.html").exists()


# In a browser. The script runs in the page after the report's own, uses the timeline as a hand would, and leaves what
# it saw in the document, which the browser prints.
PROBE = """
<script>
(function () {
  const seen = { errors: window.spipeErrors, drawn_ms: performance.now() };
  const timeline = window.spipeTimeline, canvas = document.getElementById("timeline");
  const box = canvas.getBoundingClientRect();
  const send = (type, x, y, more) => {
    const where = { clientX: box.left + x, clientY: box.top + y, bubbles: true, cancelable: true, pointerId: 1 };
    canvas.dispatchEvent(new (type === "wheel" ? WheelEvent : PointerEvent)(type, Object.assign(where, more)));
  };
  canvas.setPointerCapture = () => {};
  seen.ops = timeline.ops;
  const home = timeline.view();
  send("wheel", 600, 40, { deltaY: -120, ctrlKey: true });
  const zoomed = timeline.view();
  seen.zoom = (zoomed[1] - zoomed[0]) / (home[1] - home[0]);
  send("pointerdown", 600, 40); send("pointermove", 500, 40); send("pointerup", 500, 40);
  const panned = timeline.view();
  seen.pan = (panned[0] - zoomed[0]) / (zoomed[1] - zoomed[0]);
  document.getElementById("home").click();
  const wanted = timeline.find(WANTED_OP, WANTED_STEP), place = timeline.place(wanted);
  send("pointermove", place[0], place[1]);
  seen.hover = document.getElementById("tip").textContent;
  send("pointerdown", place[0], place[1]); send("pointerup", place[0], place[1]);
  seen.chosen = timeline.chosen() === wanted;
  const search = document.getElementById("search");
  search.value = "validate rank 0"; search.dispatchEvent(new Event("input"));
  seen.found = document.getElementById("found").textContent;
  search.dispatchEvent(new KeyboardEvent("keydown", { key: "Enter" }));
  seen.entered = document.getElementById("found").textContent;
  seen.searching_ms = timeline.draw();
  search.value = ""; search.dispatchEvent(new Event("input"));
  document.getElementById("all").click();
  seen.draw_ms = Math.min(timeline.draw(), timeline.draw(), timeline.draw());
  const lane = timeline.place(timeline.find(WANTED_OP, WANTED_STEP)), scale = window.devicePixelRatio;
  const from = Math.round(160 * scale), wide = canvas.width - from;
  const across = canvas.getContext("2d").getImageData(from, Math.round(lane[1] * scale), wide, 1).data;
  seen.pale = 0;  // of the lane of that op, over all steps: 1 where it is empty, nearly 0 in blue and green
  for (let i = 0; i < across.length; i += 4) seen.pale += Math.min(...across.slice(i, i + 3)) / 255 / wide;
  const seenAt = (y) => {
    const row = canvas.getContext("2d").getImageData(from, Math.round(y * scale), wide, 1).data, counts = {};
    for (let i = 0; i < row.length; i += 4) {
      const colour = "#" + [0, 1, 2].map((k) => row[i + k].toString(16).padStart(2, "0")).join("").toUpperCase();
      counts[colour] = (counts[colour] || 0) + 1 / wide;
    }
    return counts;
  };
  send("pointerdown", 5, 5); send("pointerup", 5, 5); send("pointerleave", 5, 5);  // nothing is chosen
  timeline.draw();
  seen.lane = seenAt(lane[1]);
  const compute = JSON.parse(document.getElementById("timeline-data").textContent).row[WANTED_OP];
  seen.strip = seenAt(timeline.tops[compute] + timeline.heights[compute] + 1.5);
  timeline.look(home[0], home[0] + 1e-5);
  timeline.draw();
  seen.ruler = timeline.ruler();
  timeline.look(home[0] + 0.7 * (home[1] - home[0]), home[0] + 0.7 * (home[1] - home[0]) + 3e-6);
  timeline.draw();
  seen.far = timeline.ruler();
  document.getElementById("home").click();
  timeline.draw();
  const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  const colours = new Set();
  for (let i = 0; i < pixels.length; i += 4) colours.add(pixels[i] * 65536 + pixels[i + 1] * 256 + pixels[i + 2]);
  seen.colours = [0x0072B2, 0x56B4E9, 0x009E73, 0xE69F00, 0xD55E00].every((colour) => colours.has(colour));
  const text = document.createElement("pre");
  text.id = "seen"; text.textContent = JSON.stringify(seen);
  document.body.append(text);
})();
</script>
"""
CATCH = "<script>window.spipeErrors = []; window.onerror = (m) => { window.spipeErrors.push(String(m)); };</script>"


def in_browser(text: str, folder: Path, op: int, step: int) -> tuple[dict[str, Any], float]:
    """What the probe saw in headless Chromium, without a network, and how long the browser took in all (seconds)."""
    assert CHROMIUM is not None
    probe = PROBE.replace("WANTED_OP", str(op)).replace("WANTED_STEP", str(step))
    page = folder / "probed.html"
    page.write_text(
        text.replace("<style>", CATCH + "<style>", 1).replace("</body>", probe + "</body>"), encoding="utf-8"
    )
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--proxy-server=127.0.0.1:9", "--window-size=1200,900",
        f"--user-data-dir={folder / 'profile'}", "--dump-dom", page.as_uri(),
    ]  # fmt: skip
    begin = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    took_s = time.monotonic() - begin
    found = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stderr[-2000:]
    return json.loads(html.unescape(found[1])), took_s


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian: apt-get install chromium)")
def test_the_timeline_of_50000_ops_in_a_browser(tmp_path: Path) -> None:
    plan = make_plan(
        MODELS["10b"], load_hardware("v100x4"), forward_stages=2, backward_stages=6, global_batch=64, microbatch_size=2,
        sequence=1024, precision="fp16",
    )  # fmt: skip
    steps = 1
    while steps * len(plan.program()) < 55_000:
        steps += 1
    simulation = simulate(plan, num_steps=steps)
    timed = TimedStep.of("plan", plan, simulation.trace, steps - 2)
    text = report(timed, Facts("many ops", {}))
    assert len(text) <= 15e6
    names = list(simulation.trace.names)
    wanted = names.index("BACKWARD B3 m2")
    seen, took_s = in_browser(text, tmp_path, wanted, steps - 2)
    assert seen["errors"] == []
    assert seen["ops"] >= 50_000
    assert seen["drawn_ms"] <= 3000, "first paint follows the first drawing at once"
    assert took_s < 30
    assert seen["zoom"] == pytest.approx(0.6065, abs=0.01)
    assert seen["pan"] == pytest.approx(100 / (1150 - 158), rel=0.1)
    assert seen["hover"].startswith(f"BACKWARD B3 m2\nstep {steps - 2}, rank ")
    assert "last thing it needed: " in seen["hover"]
    assert seen["chosen"]
    assert seen["found"] == f"{steps} found"
    assert seen["entered"] == f"1 of {steps}"
    assert seen["colours"]
    rank = simulation.program.rank[wanted]
    empty = 1 - simulation.bubbles.busy_s[rank] / simulation.bubbles.duration_s
    assert empty - 0.05 < seen["pale"] < empty + 0.15, "short ops side by side leave no gaps"
    grid = {"#FFFFFF", "#E6E6E6"}
    assert set(seen["lane"]) <= {*GROUP_COLOURS.values(), *grid}, "what shares a pixel is not mixed"
    assert set(seen["strip"]) <= {*CAUSE_COLOURS.values(), *grid}
    lane_colours = {c: n for c, n in seen["lane"].items() if c not in grid}
    assert max(lane_colours, key=lambda c: lane_colours[c]) == GROUP_COLOURS["backward"], "the longest wins"
    for ticks in (seen["ruler"], seen["far"]):
        assert len(ticks) == len(set(ticks)) > 3
    assert max(seen["draw_ms"], seen["searching_ms"]) < 250  # of all steps; measured about 20 on an idle core
    print(f"{seen['ops']} ops, {len(text) / 1e6:.1f} MB: drawn after {seen['drawn_ms']:.0f} ms, "
          f"again in {seen['draw_ms']:.0f} ms")  # fmt: skip


def test_a_disturbed_run_is_said_to_be_one(command: Command, run_folder: Path, tmp_path: Path) -> None:
    trace = Trace.load(run_folder / "trace.json")
    last = max(trace.step)
    begin = min(start for start, step in zip(trace.start_s, trace.step, strict=True) if step == last)
    for row, step in enumerate(trace.step):
        if step == last:  # twice as slow as the others
            for column in (trace.ready_s, trace.start_s, trace.end_s):
                column[row] = begin + 2 * (column[row] - begin)
    trace.save(run_folder / "trace.json")
    assert command("report", run_folder, "-o", tmp_path / "a.html").code == 0
    text = (tmp_path / "a.html").read_text()
    assert re.search(r"Warning: 1 of 3 steps took over 1.3 times the median", text)
