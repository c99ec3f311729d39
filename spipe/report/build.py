"""The page: sections as text, figures as inline SVG, the timeline's data and script, all in one file."""

import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib import resources
from typing import TYPE_CHECKING, Any

from spipe import plots, show
from spipe.metrics import CAUSES
from spipe.plots.style import CAUSE_COLOURS, GROUP_COLOURS, style
from spipe.report.packed import packed
from spipe.timed import GROUP_OF, TimedStep

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from spipe.sim import Comparison


@dataclass(frozen=True)
class Facts:
    """What a report shows beside the timed step.

    Attributes:
        title: the page's heading.
        numbers: the tiles at the top, name -> value in words.
        notes: what the numbers rest on.
        warnings: what makes the run doubtful; shown below the tiles.
        metrics: rows of ``metrics.jsonl``, if it is a run.
        comparison: the run held against its prediction, if there is one.
        environment: versions, devices and whatever else reproduces it, name -> value.
    """

    title: str
    numbers: Mapping[str, str]
    notes: Sequence[str] = ()
    metrics: Sequence[Mapping[str, Any]] = ()
    comparison: "Comparison | None" = None
    predicted: TimedStep | None = None
    environment: Mapping[str, Any] = field(default_factory=dict)
    warnings: Sequence[str] = ()


def report(timed: TimedStep, facts: Facts) -> str:
    """The HTML text of a report. ``timed`` needs a plan; its trace may hold more steps, which are shown, too."""
    assert timed.plan is not None
    body = [
        f"<h1>{escape(facts.title)}</h1>",
        _tiles(facts.numbers),
        *(f'<p class="note">Warning: {escape(warning)}.</p>' for warning in facts.warnings),
        _section("Plan", f"<pre>{escape(show.plan_words(timed.plan))}</pre>"),
        _section("Timeline", _timeline(timed)),
        _section("Where the time goes", _idle(timed)),
    ]
    if facts.metrics:
        body.append(_section("Training", _figure(plots.training(facts.metrics))))
    if facts.comparison is not None and facts.predicted is not None:
        body.append(_section("Prediction and measurement", _comparison(facts.comparison, facts.predicted, timed)))
    memory = _figure(plots.memory_over_time(timed))
    what = (
        "What is in use at a time of the step, by the plan's account; dashed: what the plan reserves for the whole run."
    )
    body.append(_section("Memory", f'<p class="note">{what}</p>{memory}'))
    if facts.notes:
        items = "".join(f"<li>{escape(note)}</li>" for note in facts.notes)
        body.append(_section("What the prediction rests on", f"<ul>{items}</ul>"))
    if facts.environment:
        rows = [(name, _words(value)) for name, value in facts.environment.items()]
        body.append(_section("Environment", _table(("what", "value"), rows)))
    data = json.dumps(packed(timed), separators=(",", ":"), allow_nan=False).replace("</", "<\\/")
    return _PAGE.format(
        title=escape(facts.title),
        css=_file("style.css"),
        body="\n".join(body),
        data=data,
        script=_file("timeline.js"),
    )


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>
{css}</style>
</head>
<body>
{body}
<script type="application/json" id="timeline-data">{data}</script>
<script>
{script}</script>
</body>
</html>
"""


def _file(name: str) -> str:
    return resources.files("spipe.report").joinpath(name).read_text(encoding="utf-8")


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>\n{content}</section>"


def _tiles(numbers: Mapping[str, str]) -> str:
    tiles = "".join(f'<div class="tile">{escape(k)}<b>{escape(v)}</b></div>' for k, v in numbers.items())
    return f'<div class="tiles">{tiles}</div>'


def _words(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]], left: int = 2) -> str:
    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(
            f"<{tag}>{escape(cell)}</{tag}>" if k < left else f'<{tag} class="number">{escape(cell)}</{tag}>'
            for k, cell in enumerate(row)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f"<table><thead><tr>{cells('th', columns)}</tr></thead><tbody>{body}</tbody></table>"


def _figure(figure: "Figure") -> str:
    text = io.StringIO()
    with style():
        figure.savefig(text, format="svg", metadata={"Date": None})
    svg = re.sub(r"^.*?(?=<svg)", "", text.getvalue(), flags=re.DOTALL)
    return f"<figure>{svg}</figure>"


def _timeline(timed: TimedStep) -> str:
    kinds = {GROUP_OF[kind] for kind in GROUP_OF if kind in set(timed.program.kind)}
    groups = "".join(
        f'<span><i style="background:{GROUP_COLOURS[g]}"></i>{g}</span>' for g in GROUP_COLOURS if g in kinds
    )
    causes = "".join(f'<span><i style="background:{CAUSE_COLOURS[c]}"></i>{c}</span>' for c in CAUSES)
    return f"""<p class="note">Drag to move, Ctrl and wheel (or double-click, or + and -) to zoom, hover for an op,
click to see what it waited for. Times count from the start of step {timed.step}.</p>
<div class="tools"><input id="search" type="search" placeholder="search, e.g. backward b1 m0" aria-label="search ops">
<span id="found" role="status"></span>
<button id="in" title="zoom in">+</button><button id="out" title="zoom out">−</button>
<button id="home">one step</button><button id="all">all steps</button></div>
<div class="keys">{groups}</div>
<div id="frame"><canvas id="timeline" tabindex="0" role="img" aria-label="timeline of all lanes"></canvas>
<div id="tip" hidden></div></div>
<div class="keys"><span>strip below compute, why it is idle:</span>{causes}</div>"""


def _idle(timed: TimedStep) -> str:
    metrics = timed.metrics()
    figure = plots.idle_time(
        {
            timed.trace.source: {
                "busy_s": metrics.busy_s,
                "bubbles": metrics.total(),
                "bubbles_by_rank": metrics.bubbles,
                "predicted": {"step_s": metrics.duration_s},
            }
        }
    )
    whole = metrics.duration_s * len(metrics.busy_s)
    total = metrics.total()
    rows = [
        (cause, show.seconds(total[cause]), show.percent(total[cause], whole))
        for cause in sorted(CAUSES, key=lambda cause: -total[cause])
        if total[cause] > 0
    ]
    rows.append(("sum", show.seconds(metrics.idle_s), show.percent(metrics.idle_s, whole)))
    return _figure(figure) + _table(("cause", "all ranks", "of all time"), rows, left=1)


def _comparison(comparison: "Comparison", predicted: TimedStep, measured: TimedStep) -> str:
    step = comparison.step_time
    error = show.error(step["predicted_s"], step["measured_s"])
    words = (
        f"Step: predicted {show.seconds(step['predicted_s'])}, measured {show.seconds(step['measured_s'])}, {error}."
    )
    rows = [
        (row["cause"], *_beside(row["predicted_s"], row["measured_s"]))
        for row in comparison.bubbles
        if row["predicted_s"] or row["measured_s"]
    ]
    columns = ("time of all compute lanes", "predicted", "measured", "error")
    return f"<p>{escape(words)}</p>" + _figure(plots.op_errors(predicted, measured)) + _table(columns, rows, left=1)


def _beside(predicted_s: float, measured_s: float) -> tuple[str, str, str]:
    error = show.error(predicted_s, measured_s) if measured_s else ""
    return show.seconds(predicted_s), show.seconds(measured_s), error
