"""Results of measuring, calibrating, comparing and tuning for people."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from spipe.hardware import HardwareSpec
from spipe.profile import Profile
from spipe.show import count, error, percent, seconds, size, table, three


def judged(to: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    """Plans that were predicted first and run then."""
    made = [
        (
            row["plan"],
            seconds(row["predicted_before_s"]),
            error(row["predicted_before_s"], row["measured_s"]),
            seconds(row["predicted_after_s"]),
            error(row["predicted_after_s"], row["measured_s"]),
            seconds(row["measured_s"]),
        )
        for row in rows
    ]
    columns = ("plan", "before calibration", "error", "after calibration", "error", "measured")
    to.print(table("Step time: predicted, then measured", columns, made))


def calibration(to: Console, result: Mapping[str, Any]) -> None:
    """What a calibration fitted, how well the fitted hardware predicts the runs, and where its values come from."""
    made = [
        (row["what"], quantity(row["value"], row["unit"]), percent(row["spread"], 1.0), str(row["samples"]))
        for row in result["fits"]
    ]
    to.print(table("Fitted", ("what", "value", "spread", "samples"), made))
    columns = ("run", "before", "error", "predicted now", "error", "measured")
    rows = [
        (
            str(row["run"]),
            seconds(row["before_s"]),
            error(row["before_s"], row["measured_s"]),
            seconds(row["predicted_s"]),
            error(row["predicted_s"], row["measured_s"]),
            seconds(row["measured_s"]),
        )
        for row in result["runs"]
    ]
    to.print(
        table(
            "Step time of the runs it was fitted to (measured: median of the traced steps after warm-up)", columns, rows
        )
    )
    if result["held_out"]:
        unseen = [
            (row["name"], row["used_for"], seconds(row["predicted_s"]), seconds(row["measured_s"]),
             error(row["predicted_s"], row["measured_s"]))
            for row in result["held_out"]
        ]  # fmt: skip
        names = ("run", "used for", "predicted", "measured", "error")
        to.print(table("Step time of runs that the fit had not seen", names, unseen, left=2))
    origins = Counter(row["provenance"] for row in result["entries"])
    to.print("values: " + ", ".join(f"{number} {origin}" for origin, number in origins.most_common()))
    assumed = [row["what"] for row in result["entries"] if row["provenance"] == "assumed"]
    if assumed:
        to.print(f"assumed: {', '.join(assumed)}", soft_wrap=True)


def tuning(to: Console, result: Mapping[str, Any]) -> None:
    """Plans that were run one after the other, and what came of it."""
    rows = [
        (row["name"], row["schedule"], seconds(row["predicted_s"]),
         row["failure"] if row["measured_s"] is None else seconds(row["measured_s"]),
         "" if row["measured_s"] is None else error(row["predicted_s"], row["measured_s"]))
        for row in result["trials"]
    ]  # fmt: skip
    to.print(table("Plans that were run", ("plan", "schedule", "predicted", "measured", "error"), rows, left=2))
    to.print(f"ended because {result['reason']}", soft_wrap=True)
    best = next(row["name"] for row in result["trials"] if row["plan"] == result["plan"])
    to.print(
        f"best: {best}, {seconds(result['step_s'])} a step; the first plan took {seconds(result['first_s'])} "
        f"({100 * result['gain']:+.1f} % speed)"
    )


def profile(to: Console, found: Profile, hardware: HardwareSpec) -> None:
    """What was measured on a machine, and the spec made of it."""
    made = []
    for sample in found.samples:
        ordered = sorted(sample.seconds)
        middle, quarter = statistics.median(ordered), len(ordered) // 4
        spread = (ordered[-1 - quarter] - ordered[quarter]) / 2
        about = ", ".join(f"{key.replace('_', ' ')} {_fact(value)}" for key, value in sample.about.items() if value)
        rate = f"{three(sample.about['bytes'] / middle / 1e9)} GB/s" if "bytes" in sample.about else ""
        made.append((sample.what, about, seconds(middle), percent(spread, middle), str(len(ordered)), rate))
    to.print(table("Measured", ("what", "of", "median", "spread", "samples", "rate"), made, left=2))
    to.print(hardware.note, soft_wrap=True)


def layers(to: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    """Times of layers by kind and pass."""
    made = [
        (row["layer_kind"], row["pass_name"], seconds(row["seconds"]), percent(row["spread_s"], row["seconds"]),
         str(row["num_samples"]))
        for row in rows
    ]  # fmt: skip
    to.print(table("Layers", ("layer", "pass", "median", "spread", "samples"), made, left=2))


def _fact(value: object) -> str:
    return three(value) if isinstance(value, float) else str(value)


def quantity(value: float, unit: str) -> str:
    """A fitted value with its unit: seconds, bytes/s, a share, or anything counted."""
    if unit == "s":
        return seconds(value)
    if unit == "bytes/s":
        return f"{three(value / 1e9)} GB/s"
    if unit == "share":
        return percent(value, 1.0)
    return f"{count(value)} {unit}"


def comparison(to: Console, result: Mapping[str, Any]) -> None:
    """A prediction beside a measurement: step time, kinds of ops, where the ranks' time went, memory."""
    step_time = result["step_time"]
    predicted_s, measured_s = step_time["predicted_s"], step_time["measured_s"]
    span = step_time["interval_s"]
    surely = "" if span is None else f" (90 % interval {seconds(span[0])} to {seconds(span[1])})"
    to.print(
        f"step: predicted {seconds(predicted_s)}{surely}, measured {seconds(measured_s)}, "
        f"{error(predicted_s, measured_s)}",
        soft_wrap=True,
    )
    for line in result["disagreements"]:
        to.print(f"  {line}", soft_wrap=True)
    made = [
        (row["kind"], str(row["count"]), *_beside(row["predicted_total_s"], row["measured_total_s"]))
        for row in sorted(result["ops"], key=lambda row: -float(row["measured_total_s"]))
        if row["predicted_total_s"] or row["measured_total_s"]
    ]
    columns = ("op", "a step", "predicted", "measured", "error")
    to.print(table("Seconds of all ops of a kind in a step", columns, made))
    lanes = [
        (f"rank {row['rank']}, {row['lane']}", *_beside(row["predicted_s"], row["measured_s"]))
        for row in result["lanes"]
        if row["predicted_s"] or row["measured_s"]
    ]
    to.print(table("Seconds of a step in which a lane runs ops", ("lane", *columns[2:]), lanes))
    shown = [row for row in result["bubbles"] if row["predicted_s"] or row["measured_s"]]
    rows = [(row["cause"], *_beside(row["predicted_s"], row["measured_s"])) for row in shown]
    to.print(table("Where the time of all ranks' compute lanes goes", ("cause", *columns[2:]), rows))
    known = [row for row in result["memory"] if row["measured_bytes"] is not None]
    held = [
        (row["place"], row["item"], size(row["predicted_bytes"]), size(row["measured_bytes"]),
         error(row["predicted_bytes"], row["measured_bytes"]) if row["measured_bytes"] else "")
        for row in known
    ]  # fmt: skip
    if held:
        to.print(table("Memory", ("place", "item", "planned", "measured", "error"), held, left=2))


def _beside(predicted_s: float, measured_s: float) -> tuple[str, str, str]:
    return seconds(predicted_s), seconds(measured_s), error(predicted_s, measured_s) if measured_s else ""
