"""What checkpoints and clipping cost a step, on CPU ranks: runs in turns, so that other load meets all alike.

    python scripts/bench_extras.py --json extras.json
    python scripts/bench_extras.py --model llama.toml --steps 63 --seconds 600

Rounds are repeated until the next one would take longer than what is left of --seconds; two are always done. A run's
cost is its mean time per step, after three steps of warm-up, over that of a run without. Ratios are taken
inside a round; shown are their medians and quartiles. Write rates are over the seconds from the first bucket to the
renaming, next to that of one file of the same size, written and made durable alone.
"""

import argparse
import json
import os
import re
import tempfile
import time
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

from rich.console import Console
from rich.table import Table

from spipe.hardware import load_hardware
from spipe.model import load_model
from spipe.plan import Plan, make_plan
from spipe.runtime import RankProcesses, RunResult, run
from spipe.trace import WARM_UP_STEPS

CLIPPED = (0.0, 0.05, 0.5, 1.0)


def step_s(result: RunResult) -> float:
    return mean(result.step_s[WARM_UP_STEPS:])


def disk_rate(folder: Path, num_bytes: int) -> float:
    """Bytes per second of one file, written in pieces and made durable."""
    data = os.urandom(min(num_bytes, 32 << 20))
    start = time.monotonic()
    with open(folder / "file", "wb", buffering=0) as file:
        for first in range(0, num_bytes, len(data)):
            file.write(data[: num_bytes - first])
        os.fsync(file.fileno())
    seconds = time.monotonic() - start
    (folder / "file").unlink()
    return num_bytes / seconds


def spread(values: list[float]) -> dict[str, float]:
    low, _, high = quantiles(values, n=4) if len(values) > 1 else (values[0],) * 3
    return {"median": median(values), "low": low, "high": high}


def show(report: dict[str, Any], options: argparse.Namespace) -> None:
    """The report as a table."""

    def row(what: str, value: dict[str, float], form: str) -> None:
        table.add_row(what, *(form.format(value[key]) for key in ("median", "low", "high")))

    table = Table(
        title=f"{options.model}, {options.ranks} CPU ranks, {report['rounds']} rounds of {options.steps} steps"
    )
    table.add_column("what")
    for name in ("median", "lower quartile", "upper quartile"):
        table.add_column(name, justify="right")
    row("step, without extras", {key: 1e3 * value for key, value in report["step_s"].items()}, "{:.1f} ms")
    row(f"a checkpoint every {options.every} steps", report["checkpoint_cost"], "{:+.1%}")
    for share, cost in report["clipping_cost"].items():
        row(f"clipping, {share}", cost, "{:+.1%}")
    row("synchronous optimizer, 5% clipped", report["synchronous_cost"], "{:+.1%}")
    row("writing a checkpoint", {k: v / 1e6 for k, v in report["write_bytes_per_s"].items()}, "{:.0f} MB/s")
    row("the disk, one file", {k: v / 1e6 for k, v in report["disk_bytes_per_s"].items()}, "{:.0f} MB/s")
    Console(width=110).print(table)
    print(
        f"a checkpoint has {report['checkpoint_bytes'] / 1e6:.1f} MB, {report['parameters'] / 1e6:.2f} M parameters; "
        f"load of the machine at the end {report['load']:.1f}"
    )


def with_max_norm(plan: Plan, max_norm: float) -> Plan:
    return plan.replace(optimizer=plan.optimizer.replace(max_norm=max_norm))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--backward-stages", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--global-batch", type=int, default=8)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--steps", type=int, default=43)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("--folder", type=Path, help="where runs are written; default: a temporary folder")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    plan = make_plan(
        load_model(options.model),
        load_hardware("laptop"),
        num_ranks=options.ranks,
        forward_stages=1,
        backward_stages=options.backward_stages,
        global_batch=options.global_batch,
        microbatch_size=2,
        sequence=options.sequence,
        precision=options.precision,
    )
    with tempfile.TemporaryDirectory(dir=options.folder) as name, RankProcesses(options.ranks) as ranks:
        report = measure(plan, options, Path(name), ranks)
    report["parameters"] = plan.model.num_parameters()
    show(report, options)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


def measure(plan: Plan, options: argparse.Namespace, folder: Path, ranks: RankProcesses) -> dict[str, Any]:
    count = 0
    saves: list[tuple[float, float]] = []

    def log(row: dict[str, Any]) -> None:
        if found := re.search(r", ([\d.]+) MB, ([\d.]+) s$", row.get("message", "")):
            saves.append((float(found[1]) * 1e6, float(found[2])))

    def go(plan: Plan, **more: Any) -> RunResult:
        nonlocal count
        count += 1
        more = {"steps": options.steps, "trace_steps": 0, **more}
        return run(plan, output=folder / f"run{count}", ranks=ranks, log=log, **more)

    rows = [
        json.loads(line) for line in (go(with_max_norm(plan, 1e9)).output / "metrics.jsonl").read_text().splitlines()
    ]
    norms = sorted(row["gradient_norm"] for row in rows)
    limits = {share: norms[-1] * 2 if not share else norms[int((1 - share) * (len(norms) - 1))] for share in CLIPPED}
    limits[1.0] = norms[0] / 100
    checkpoint: list[float] = []
    clipping: dict[float, list[float]] = {share: [] for share in CLIPPED}
    shares: dict[float, list[float]] = {share: [] for share in CLIPPED}
    waiting: list[float] = []
    bases: list[float] = []
    began, rounds = time.monotonic(), 0
    while rounds < 2 or (time.monotonic() - began) * (rounds + 1) / rounds < options.seconds:
        rounds += 1
        base = step_s(go(plan))
        bases.append(base)
        checkpoint.append(step_s(go(plan, checkpoint_every=options.every, keep=1)) / base - 1)
        for share, limit in limits.items():
            result = go(with_max_norm(plan, limit))
            clipping[share].append(step_s(result) / base - 1)
            shares[share].append(len(result.summary["clipped_steps"]) / options.steps)
        waiting.append(step_s(go(with_max_norm(plan.replace(options={"optimizer": "sync"}), limits[0.05]))) / base - 1)
    size, rates = saves[0][0], [num_bytes / max(seconds, 0.005) for num_bytes, seconds in saves]
    return {
        "rounds": rounds,
        "steps": options.steps,
        "step_s": spread(bases),
        "checkpoint_cost": spread(checkpoint),
        "checkpoint_bytes": size,
        "write_bytes_per_s": spread(rates),
        "disk_bytes_per_s": spread([disk_rate(folder, int(size)) for _ in range(5)]),
        "clipping_cost": {
            f"{mean(shares[share]):.0%} of steps clipped": spread(costs) for share, costs in clipping.items()
        },
        "synchronous_cost": spread(waiting),
        "load": os.getloadavg()[0],
    }


if __name__ == "__main__":
    main()
